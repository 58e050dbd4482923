"""From records to samples: an encoder for text, then transforms in the order of the mix file.

Samples are truncated by a length clamp, left out by a filter, and cut to rows, but never within an image.

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
    """Makes samples of records: an encoder for text, then transforms in the order of the mix file."""

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
        """Transform that joins documents. It is applied elsewhere, because it needs a whole unit."""
        self.digest = digest
        """Digest of the files, libraries and functions that transforms depend on; empty if there are none."""

    @property
    def takes_text(self) -> bool:
        """Whether records are text."""
        return self._encoder is not None

    @property
    def takes_images(self) -> bool:
        """Whether records are text with images, whose tokens follow from no bytes of them."""
        return isinstance(self._encoder, ImageEncoder)

    @property
    def goes_by_position(self) -> bool:
        """Whether the sample of a record depends on its position."""
        return bool(self._fillers)

    def with_fillers(self, fillers: Mapping[MiddleTransform, MiddleFiller]) -> Self:
        """Return the pipeline with the implementation of its transforms of type ``fim``."""
        self._fillers.update(fillers)
        return self

    def with_functions(self, functions: Sequence[MapFunction | None]) -> Self:
        """Return the pipeline with functions for its transforms of type ``map`` and ``None`` for the others."""
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
        """Return the samples of text records with further columns ``others``; see ``of``."""
        return self.of(self.encoded(texts, others), positions_N)

    def encoded(self, texts: pa.Array, others: Mapping[str, Ragged] = NO_COLUMNS) -> Samples:
        """Return the samples of text records before any transform of tokens. They depend only on the text."""
        count, rows_K = len(texts), None
        for config, function in zip(self._transforms, self._functions, strict=True):
            if function is not None and is_of_text(config):
                texts, left = function.of_texts(texts)
                if left is not None:
                    # Each function receives the output of the one before it, so its rows are rows of that output.
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
        """Describe what is probably unintended in the samples of some records; empty if there is nothing."""
        if self._encoder is None or isinstance(self._encoder, ImageEncoder):
            return ""
        column = records.column
        texts = text_array(take(as_binary(column), rows_N, column.values_V.dtype))
        return self._encoder.doubt(texts)

    def of_records(self, records: Records, rows_N: NDArray[np.int64]) -> Samples:
        """Return the samples of some records of a unit, with only the columns that the samples need."""
        column = records.column
        taken = take(as_binary(column), rows_N, column.values_V.dtype)
        if not self.takes_text:
            return self.of(Samples(tokens=taken))
        # The caller asks for lengths, and among further columns only images affect them.
        needed = records.others if self.takes_images else NO_COLUMNS
        others = {
            name: take(as_binary(other), rows_N, other.values_V.dtype)
            for name, other in needed.items()
        }
        return self.of_texts(text_array(taken), others)

    def of(self, samples: Samples, positions_N: NDArray[np.int64] | None = None) -> Samples:
        """Return the samples of records that are token ids, before documents are joined.

        Args:
            samples: The records.
            positions_N: Positions of the records in the source; ``None`` for an estimate, which does not depend on
                them.
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
                    pass  # done by the encoder
                case ImagesTransform() | MapTransform():
                    pass  # done by the encoder, or before it
        return samples

    def of_sequences(self, samples: Samples) -> Samples:
        """Return samples of joined documents, with samples that are left out emptied."""
        assert self.concat is not None, "documents are joined"
        for config in self._transforms[self._transforms.index(self.concat) :]:
            if isinstance(config, FilterTransform):
                samples = _filtered(samples, config)
        return samples

    def cut(self, samples: Samples) -> tuple[Samples, NDArray[np.int64], NDArray[np.int32]] | None:
        """Return samples with images, cut to rows like in ``cut_to_rows``; ``None`` if nothing is cut."""
        # The packer cuts text, because it knows what else is in a row; images must be whole before that.
        if self._row_length is None or samples.extents is None:
            return None
        return cut_to_rows(samples, self._row_length)


def _before_images(extents: Ragged, lengths_N: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return ``lengths_N``, reduced where a sample would end within an image or its surrounding text."""
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
    """Return the columns of the images before the end of shortened samples, and the extents of those images."""
    kept = [
        extents[i].reshape(-1, 3)[extents[i][1::3] <= length]
        for i, length in enumerate(lengths_N.tolist())
    ]
    # The tiles of an image are kept together, or left out together.
    counts = np.array([int(each[:, 2].sum()) for each in kept], np.int64)
    starts = np.zeros(len(counts), np.int64)
    images = _images_between(samples.others, np.arange(len(counts)), starts, counts)
    return images, Ragged.of([each.reshape(-1) for each in kept])


def cut_to_rows(
    samples: Samples, row_length: int
) -> tuple[Samples, NDArray[np.int64], NDArray[np.int32]]:
    """Cut samples that are longer than a row into several samples, between images.

    Args:
        samples: Samples of records with images; each image, with all its tiles, fits a row.
        row_length: Tokens of a row.

    Returns:
        Samples of at most a row each; all but the last of a record are cut as late as images allow. Also, for each, the
        number of its original sample, and its number among the parts.
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
    # Places count from the first token of their part.
    others[IMAGE_PLACES].values_V[::2] -= np.repeat(
        starts, others[IMAGE_PLACES].lengths_N // 2
    ).astype(np.int32)
    for name, column in samples.others.items():
        if name not in IMAGE_COLUMNS:
            others[name] = _cut(column, owner, starts, stops, aligned=column_kind(name).aligned)
    tokens = _cut(samples.tokens, owner, starts, stops, aligned=True)
    return Samples(tokens=tokens, others=others), owner, subs.astype(np.int32)


def _bounds(length: int, extents_I3: NDArray[np.int32], row_length: int) -> list[int]:
    """Return the cuts of a sample of ``length`` tokens, including its begin and end."""
    begins_I, ends_I = extents_I3[::3], extents_I3[1::3]
    bounds = [0]
    # This loop ends, because an image with its surrounding text fits a row; the encoder refuses others.
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
    if not aligned:  # each part has the values of the whole sample
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
    """Return copies of the columns of images ``firsts_N`` to ``lasts_N``, exclusive, of the samples ``owner_N``."""
    grids, places, images = (others[name] for name in (GRIDS, IMAGE_PLACES, IMAGES))
    patches = grids.values_V[::2].astype(np.int64) * grids.values_V[1::2]
    # Values per patch, which are equal within a source.
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
        # Copied, because places are changed below, and gathered values may be in read-only memory of Arrow.
        made[str(name)] = Ragged(values_V=values.copy(), offsets=offsets)
    return made


def _clamped(samples: Samples, config: ClampTransform) -> Samples:
    """Return the first tokens of each sample; an image that would be cut is left out with everything after it."""
    lengths_N = samples.tokens.lengths_N
    return _shortened(samples, np.minimum(lengths_N, config.tokens))


def _filtered(samples: Samples, config: FilterTransform) -> Samples:
    """Return the samples, with samples that are left out emptied."""
    lengths_N = samples.tokens.lengths_N
    kept_N = (lengths_N >= config.min_tokens) & (lengths_N <= config.max_tokens)
    if config.min_trained_tokens:
        mask = samples.others.get(LOSS_MASK)
        trained_N = lengths_N if mask is None else _sums(mask)
        kept_N &= trained_N >= config.min_trained_tokens
    return _shortened(samples, np.where(kept_N, lengths_N, 0))


def _sums(mask: Ragged) -> NDArray[np.int64]:
    before = offsets_of(mask.values_V)
    # By running sums, because ``reduceat`` gives the next value for an empty sample, not 0.
    return before[mask.offsets[1:]] - before[mask.offsets[:-1]]


def _shortened(samples: Samples, lengths_N: NDArray[np.int64]) -> Samples:
    """Truncate samples and their aligned columns to ``lengths_N`` tokens, or fewer so that images stay whole."""
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
