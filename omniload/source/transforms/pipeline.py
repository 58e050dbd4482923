"""From records to samples: an encoder where they are text, then transforms in the order of the mix file.

Samples are cut off by a length clamp, left out by a filter, and cut to rows; never within an image.

Shape suffixes:
    N  records, each a sample or none        K  records that a function of text kept        I  images of one sample
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from omniload.base.ragged import Ragged, gather_ranges, offsets_of
from omniload.mix.columns import (
    GRIDS,
    IMAGE_COLUMNS,
    IMAGE_PLACES,
    IMAGES,
    LOSS_MASK,
    NO_COLUMNS,
    column_kind,
)
from omniload.mix.schema.transforms import (
    ChatTransform,
    ClampTransform,
    CompletionTransform,
    ConcatTransform,
    FilterTransform,
    ImagesTransform,
    MapTransform,
    MiddleTransform,
    PreferenceTransform,
    TransformConfig,
    is_of_text,
)
from omniload.source.columns import as_binary, take, text_array
from omniload.source.formats.format import Records
from omniload.source.transforms.encoders import Encoder, Samples
from omniload.source.transforms.fill_in_middle import MiddleFiller
from omniload.source.transforms.images import ImageEncoder
from omniload.source.transforms.user_functions import MapFunction, spread

__all__ = [
    "Pipeline",
    "cut_to_rows",
]


class Pipeline:
    """Makes records samples: an encoder where they are text, then transforms in the order of the file."""

    def __init__(
        self,
        encoder: Encoder | ImageEncoder | None,
        transforms: Sequence[TransformConfig],
        digest: str = "",
        row_length: int | None = None,
    ) -> None:
        self._encoder, self._transforms = encoder, transforms
        self._fillers: dict[MiddleTransform, MiddleFiller] = {}
        self._functions: tuple[MapFunction | None, ...] = (None,) * len(transforms)
        self._row_length = row_length
        self.concat = next((each for each in transforms if isinstance(each, ConcatTransform)), None)
        """The transform that joins documents, which is not done here: it is of a whole unit."""
        self.digest = digest
        """Digest of the files and libraries that transforms depend on, and whose functions they call; else empty."""

    @property
    def takes_text(self) -> bool:
        """Whether records are text."""
        return self._encoder is not None

    @property
    def goes_by_position(self) -> bool:
        """Whether a record gives another sample at another position."""
        return bool(self._fillers)

    def with_fillers(self, fillers: Mapping[MiddleTransform, MiddleFiller]) -> Self:
        """Return the pipeline with what its transforms of type ``fim`` are done by."""
        self._fillers.update(fillers)
        return self

    def with_functions(self, functions: Sequence[MapFunction | None]) -> Self:
        """Return the pipeline with the functions of its transforms of type ``map``, ``None`` for the others."""
        self._functions = tuple(functions)
        called = [each.identity for each in self._functions if each is not None]
        self.digest = ", ".join((*([self.digest] if self.digest else []), *called))
        return self

    def of_texts(
        self,
        texts: pa.Array,
        others: Mapping[str, Ragged] = NO_COLUMNS,
        positions_N: NDArray[np.int64] | None = None,
    ) -> Samples:
        """Return the samples of records of text, which have further columns ``others``; see ``of``."""
        return self.of(self.encoded(texts, others), positions_N)

    def encoded(self, texts: pa.Array, others: Mapping[str, Ragged] = NO_COLUMNS) -> Samples:
        """Return the samples of records of text before any transform of tokens: they depend on the text alone."""
        count, rows_K = len(texts), None
        for config, function in zip(self._transforms, self._functions, strict=True):
            if function is not None and is_of_text(config):
                texts, left = function.of_texts(texts)
                if left is not None:
                    # Each function sees what the one before it left: its rows are rows of those.
                    rows_K = left if rows_K is None else rows_K[left]
        if rows_K is None:
            return self._encoded(texts, others)
        others = {name: column.take(rows_K) for name, column in others.items()}
        return spread(self._encoded(texts, others), rows_K, count)

    def _encoded(self, texts: pa.Array, others: Mapping[str, Ragged]) -> Samples:
        assert self._encoder is not None, "records of this source are token ids"
        if isinstance(self._encoder, ImageEncoder):
            return self._encoder.encode(texts, others)
        made = self._encoder.encode(texts)
        return replace(made, others={**others, **made.others}) if others else made

    def doubt(self, records: Records, rows_N: NDArray[np.int64]) -> str:
        """Say what seems not to be meant in the samples of some records; empty where nothing does."""
        if self._encoder is None or isinstance(self._encoder, ImageEncoder):
            return ""
        column = records.column
        texts = text_array(take(as_binary(column), rows_N, column.values_V.dtype))
        return self._encoder.doubt(texts)

    def of_records(self, records: Records, rows_N: NDArray[np.int64]) -> Samples:
        """Return the samples of some records of a unit, with what is needed to make them alone."""
        column = records.column
        taken = take(as_binary(column), rows_N, column.values_V.dtype)
        if not self.takes_text:
            return self.of(Samples(tokens=taken))
        # Lengths are asked for: of further columns images alone decide them.
        needed = records.others if isinstance(self._encoder, ImageEncoder) else NO_COLUMNS
        others = {
            name: take(as_binary(other), rows_N, other.values_V.dtype)
            for name, other in needed.items()
        }
        return self.of_texts(text_array(taken), others)

    def of(self, samples: Samples, positions_N: NDArray[np.int64] | None = None) -> Samples:
        """Return the samples of records that are token ids; where documents are joined, as they are before that.

        Args:
            samples: The records.
            positions_N: Where they stand in the source; ``None`` for an estimate, to which that is all one.
        """
        for config, function in zip(self._transforms, self._functions, strict=True):
            match config:
                case ClampTransform():
                    samples = _clamped(samples, config)
                case FilterTransform():
                    samples = _filtered(samples, config)
                case MiddleTransform():
                    places_N = (
                        np.arange(len(samples.tokens)) if positions_N is None else positions_N
                    )
                    samples = self._fillers[config].of(samples, places_N)
                case MapTransform(of="tokens"):
                    assert function is not None, "it was opened"
                    samples = function.of_samples(samples)
                case ConcatTransform():
                    break
                case ChatTransform() | CompletionTransform() | PreferenceTransform():
                    pass  # the encoder
                case ImagesTransform() | MapTransform():
                    pass  # the encoder, or before it
        return samples

    def of_sequences(self, samples: Samples) -> Samples:
        """Return samples that documents were joined to, with those empty that are left out."""
        assert self.concat is not None, "documents are joined"
        for config in self._transforms[self._transforms.index(self.concat) :]:
            if isinstance(config, FilterTransform):
                samples = _filtered(samples, config)
        return samples

    def cut(self, samples: Samples) -> tuple[Samples, NDArray[np.int64], NDArray[np.int32]] | None:
        """Return samples with images cut to rows, as ``cut_to_rows`` does; ``None`` where nothing is cut."""
        # Text is cut by the packer, which knows what else a row holds; an image must be whole before that.
        if self._row_length is None or samples.extents is None:
            return None
        return cut_to_rows(samples, self._row_length)


def _before_images(extents: Ragged, lengths_N: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return ``lengths_N``, less where one would cut an image or what stands around it: there, up to that."""
    out_N = lengths_N.copy()
    for i in np.flatnonzero(extents.lengths_N).tolist():
        begins_I, ends_I = extents[i].reshape(-1, 3).T[:2]
        cut_I = (begins_I < out_N[i]) & (out_N[i] < ends_I)
        if cut_I.any():
            out_N[i] = begins_I[cut_I][0]
    return out_N


def _first_images(
    samples: Samples, extents: Ragged, lengths_N: NDArray[np.int64]
) -> tuple[dict[str, Ragged], Ragged]:
    """Return the columns of the images that lie before the end of shortened samples, and where those images lie."""
    kept = [
        extents[i].reshape(-1, 3)[extents[i][1::3] <= length]
        for i, length in enumerate(lengths_N.tolist())
    ]
    # Tiles of an image are kept together, or left out.
    counts = np.array([int(each[:, 2].sum()) for each in kept], np.int64)
    starts = np.zeros(len(counts), np.int64)
    images = _images_between(samples.others, np.arange(len(counts)), starts, counts)
    return images, Ragged.of([each.reshape(-1) for each in kept])


def cut_to_rows(
    samples: Samples, row_length: int
) -> tuple[Samples, NDArray[np.int64], NDArray[np.int32]]:
    """Cut samples that are longer than a row into several, between images.

    Args:
        samples: As records gave them, with their images; each of those, its tiles together, fits a row.
        row_length: Tokens of a row.

    Returns:
        Samples of at most a row each, all but the last of a record cut as late as images allow; of
        which sample each is a part; and its number among the parts.
    """
    lengths_N = samples.tokens.lengths_N
    everything = np.arange(len(lengths_N))
    if lengths_N.max(initial=0) <= row_length:
        return samples, everything, np.zeros(len(everything), np.int32)
    assert samples.extents is not None, "they have images"
    bounds_N = [
        _bounds(int(length), samples.extents[i], row_length)
        for i, length in enumerate(lengths_N.tolist())
    ]
    parts = [(i, a, b) for i, bounds in enumerate(bounds_N) for a, b in pairwise(bounds)]
    owner, starts, stops = (np.array(column, np.int64) for column in zip(*parts, strict=True))
    subs = np.concatenate([np.arange(len(bounds) - 1) for bounds in bounds_N])
    places = samples.others[IMAGE_PLACES]
    ranges = [np.searchsorted(places[i][::2], (a, b)) for i, a, b in parts]
    firsts, lasts = (np.array([r[k] for r in ranges], np.int64) for k in (0, 1))
    others = _images_between(samples.others, owner, firsts, lasts)
    # Places count from the first token of the part that they are in.
    others[IMAGE_PLACES].values_V[::2] -= np.repeat(
        starts, others[IMAGE_PLACES].lengths_N // 2
    ).astype(np.int32)
    for name, column in samples.others.items():
        if name not in IMAGE_COLUMNS:
            others[name] = _cut(column, owner, starts, stops, aligned=column_kind(name).aligned)
    tokens = _cut(samples.tokens, owner, starts, stops, aligned=True)
    return Samples(tokens=tokens, others=others), owner, subs.astype(np.int32)


def _bounds(length: int, extents_I3: NDArray[np.int32], row_length: int) -> list[int]:
    """Return where a sample of ``length`` tokens is cut, its begin and end among them."""
    begins_I, ends_I = extents_I3[::3], extents_I3[1::3]
    bounds = [0]
    # Ends, for an image and what stands around it fit a row: the encoder refuses others.
    while length - bounds[-1] > row_length:
        stop = bounds[-1] + row_length
        inside = np.flatnonzero((begins_I < stop) & (stop < ends_I))
        bounds.append(int(begins_I[inside[0]]) if len(inside) else stop)
    return [*bounds, length]


def _cut(
    column: Ragged,
    owner_N: NDArray[np.int64],
    starts_N: NDArray[np.int64],
    stops_N: NDArray[np.int64],
    *,
    aligned: bool,
) -> Ragged:
    if not aligned:  # each part has what belongs to the whole
        return column.take(owner_N)
    begins = column.offsets[owner_N]
    values, offsets = gather_ranges(
        np.ascontiguousarray(column.values_V), begins + starts_N, begins + stops_N
    )
    return Ragged(values_V=values, offsets=offsets)


def _images_between(
    others: Mapping[str, Ragged],
    owner_N: NDArray[np.int64],
    firsts_N: NDArray[np.int64],
    lasts_N: NDArray[np.int64],
) -> dict[str, Ragged]:
    """Return the columns of images ``firsts_N`` to before ``lasts_N`` of the samples ``owner_N``, copied."""
    grids, places, images = (others[name] for name in (GRIDS, IMAGE_PLACES, IMAGES))
    patches = grids.values_V[::2].astype(np.int64) * grids.values_V[1::2]
    # Values of a patch: within a source all have as many.
    depth = len(images.values_V) // max(1, int(patches.sum()))
    before = offsets_of(patches * depth)
    first_image = grids.offsets[owner_N] // 2
    firsts, lasts = first_image + firsts_N, first_image + lasts_N
    made = {}
    for name, column, a, b in (
        (GRIDS, grids, 2 * firsts, 2 * lasts),
        (IMAGE_PLACES, places, 2 * firsts, 2 * lasts),
        (IMAGES, images, before[firsts], before[lasts]),
    ):
        values, offsets = gather_ranges(np.ascontiguousarray(column.values_V), a, b)
        # Copied, for places are moved in it: what is gathered may lie in memory of Arrow's, which is read alone.
        made[str(name)] = Ragged(values_V=values.copy(), offsets=offsets)
    return made


def _clamped(samples: Samples, config: ClampTransform) -> Samples:
    """Return the first tokens of each sample; an image that would be cut is left out, and all behind it."""
    lengths_N = samples.tokens.lengths_N
    return _shortened(samples, np.minimum(lengths_N, config.tokens))


def _filtered(samples: Samples, config: FilterTransform) -> Samples:
    """Return the samples with those empty that are left out."""
    lengths_N = samples.tokens.lengths_N
    kept_N = (lengths_N >= config.min_tokens) & (lengths_N <= config.max_tokens)
    if config.min_trained_tokens:
        mask = samples.others.get(LOSS_MASK)
        trained_N = lengths_N if mask is None else _sums(mask)
        kept_N &= trained_N >= config.min_trained_tokens
    return _shortened(samples, np.where(kept_N, lengths_N, 0))


def _sums(mask: Ragged) -> NDArray[np.int64]:
    before = offsets_of(mask.values_V)
    # By running sums: ``reduceat`` gives the next value for an empty sample, and not 0.
    return before[mask.offsets[1:]] - before[mask.offsets[:-1]]


def _shortened(samples: Samples, lengths_N: NDArray[np.int64]) -> Samples:
    """Cut the tokens of each sample, and what is aligned with them, to so many, or fewer: images stay whole."""
    # Most batches have nothing to cut, and are not copied.
    if np.array_equal(lengths_N, samples.tokens.lengths_N):
        return samples
    kept: dict[str, Ragged] = {}
    extents = samples.extents
    if extents is not None:
        lengths_N = _before_images(extents, lengths_N)
        kept, extents = _first_images(samples, extents, lengths_N)

    def cut(column: Ragged) -> Ragged:
        starts_N = column.offsets[:-1]
        values, offsets = gather_ranges(
            np.ascontiguousarray(column.values_V), starts_N, starts_N + lengths_N
        )
        return Ragged(values_V=values, offsets=offsets)

    return Samples(
        tokens=cut(samples.tokens),
        others={
            name: cut(column) if column_kind(name).aligned else column
            for name, column in samples.others.items()
            if name not in IMAGE_COLUMNS
        }
        | kept,
        extents=extents,
        bad_N=samples.bad_N,
        reason=samples.reason,
    )
