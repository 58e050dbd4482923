"""Samples on their way from records to the source's block: how text becomes them, and how they are cut.

They are cut off by a length clamp, left out by a filter, and cut to rows; never within an image.

Shape suffixes:
    N  records, each a sample or none        I  images of one sample
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from typing_extensions import override

from omniload.base.ragged import Ragged, gather_ranges
from omniload.mix.columns import COLUMNS, GRIDS, IMAGE_COLUMNS, IMAGE_PLACES, IMAGES, LOSS_MASK
from omniload.mix.schema.transforms import ClampTransform, FilterTransform, ImagesTransform
from omniload.source.tokenize import Tokenizer

__all__ = [
    "Encoder",
    "PlainEncoder",
    "Samples",
    "clamped",
    "cut_to_rows",
    "filtered",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """One sample a record; an empty one is none."""

    tokens: Ragged
    """Token ids (int32)."""
    others: Mapping[str, Ragged] = field(default_factory=dict)
    """Further columns by name; an aligned one has the lengths of ``tokens``."""
    bad_N: NDArray[np.bool_] | None = None
    """True where a record could not be made a sample, which is then empty; ``None`` where all could."""
    reason: str = ""
    """What is wrong with the first bad record."""


class Encoder(Protocol):
    """Turns the records of a source of text into samples."""

    def encode(self, texts: pa.Array) -> Samples:
        """Return the sample of each record, whatever others stand beside it."""
        ...


class PlainEncoder(Encoder):
    """Tokenises a document as it is."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @override
    def encode(self, texts: pa.Array) -> Samples:
        return Samples(tokens=self._tokenizer.encode(texts))


def _before_images(
    places: Ragged, lengths_N: NDArray[np.int64], config: ImagesTransform
) -> NDArray[np.int64]:
    """Return ``lengths_N``, less where one would cut an image or what stands around it: there, up to that."""
    out_N = lengths_N.copy()
    for i in np.flatnonzero(places.lengths_N).tolist():
        begins_I, ends_I = _extents(places[i], config)
        cut_I = (begins_I < out_N[i]) & (out_N[i] < ends_I)
        if cut_I.any():
            out_N[i] = begins_I[cut_I][0]
    return out_N


def _first_images(
    others: Mapping[str, Ragged], lengths_N: NDArray[np.int64], config: ImagesTransform
) -> dict[str, Ragged]:
    """Return the columns of the images that lie before the end of shortened samples."""
    places = others[IMAGE_PLACES]
    counts = [
        int(np.count_nonzero(_extents(places[i], config)[1] <= length))
        for i, length in enumerate(lengths_N.tolist())
    ]
    starts = np.zeros(len(counts), np.int64)
    return _images_between(others, np.arange(len(counts)), starts, np.asarray(counts, np.int64))


def _extents(
    places_I2: NDArray[np.int32], config: ImagesTransform
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return where each image of a sample begins and ends, with what stands around it."""
    before, behind = config.begin is not None, config.end is not None
    return places_I2[::2] - before, places_I2[::2] + places_I2[1::2] + behind


def cut_to_rows(
    samples: Samples, row_length: int, config: ImagesTransform
) -> tuple[Samples, NDArray[np.int64], NDArray[np.int32]]:
    """Cut samples that are longer than a row into several, between images.

    Args:
        samples: As records gave them; each image, with what stands around it, fits a row.
        row_length: Tokens of a row.
        config: What stands around an image.

    Returns:
        Samples of at most a row each, all but the last of a record cut as late as images allow; of
        which sample each is a part; and its number among the parts.
    """
    lengths_N = samples.tokens.lengths_N
    everything = np.arange(len(lengths_N))
    if lengths_N.max(initial=0) <= row_length:
        return samples, everything, np.zeros(len(everything), np.int32)
    bounds_N = [
        _bounds(int(length), samples.others[IMAGE_PLACES][i], row_length, config)
        for i, length in enumerate(lengths_N.tolist())
    ]
    parts = [(i, a, b) for i, bounds in enumerate(bounds_N) for a, b in pairwise(bounds)]
    owner, starts, stops = (np.array(column, np.int64) for column in zip(*parts, strict=True))
    subs = np.concatenate([np.arange(len(bounds) - 1) for bounds in bounds_N])
    places = samples.others[IMAGE_PLACES]
    ranges = [np.searchsorted(places[i][::2], (a, b)) for i, a, b in parts]
    firsts, lasts = (np.array([r[k] for r in ranges], np.int64) for k in (0, 1))
    others = _images_between(samples.others, owner, firsts, lasts)
    others[IMAGE_PLACES].values_V[::2] -= np.repeat(
        starts, others[IMAGE_PLACES].lengths_N // 2
    ).astype(np.int32)
    for name, column in samples.others.items():
        if name not in IMAGE_COLUMNS:
            others[name] = _cut(column, owner, starts, stops, aligned=COLUMNS[name].aligned)
    tokens = _cut(samples.tokens, owner, starts, stops, aligned=True)
    return Samples(tokens=tokens, others=others), owner, subs.astype(np.int32)


def _bounds(
    length: int, places_I2: NDArray[np.int32], row_length: int, config: ImagesTransform
) -> list[int]:
    """Return where a sample of ``length`` tokens is cut, its begin and end among them."""
    begins_I, ends_I = _extents(places_I2, config)
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
    before = np.concatenate(([0], np.cumsum(patches * depth)))
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


def clamped(
    samples: Samples, config: ClampTransform, images: ImagesTransform | None = None
) -> Samples:
    """Return the first tokens of each sample; an image that would be cut is left out, and all behind it."""
    lengths_N = samples.tokens.lengths_N
    return _shortened(samples, np.minimum(lengths_N, config.tokens), images)


def filtered(
    samples: Samples, config: FilterTransform, images: ImagesTransform | None = None
) -> Samples:
    """Return the samples with those empty that are left out."""
    lengths_N = samples.tokens.lengths_N
    kept_N = (lengths_N >= config.min_tokens) & (lengths_N <= config.max_tokens)
    if config.min_trained_tokens:
        mask = samples.others.get(LOSS_MASK)
        trained_N = lengths_N if mask is None else _sums(mask)
        kept_N &= trained_N >= config.min_trained_tokens
    return _shortened(samples, np.where(kept_N, lengths_N, 0), images)


def _sums(mask: Ragged) -> NDArray[np.int64]:
    before = np.concatenate((np.zeros(1, np.int64), np.cumsum(mask.values_V, dtype=np.int64)))
    return before[mask.offsets[1:]] - before[mask.offsets[:-1]]


def _shortened(
    samples: Samples, lengths_N: NDArray[np.int64], images: ImagesTransform | None
) -> Samples:
    """Cut the tokens of each sample, and what is aligned with them, to so many, or fewer: images stay whole."""
    if np.array_equal(lengths_N, samples.tokens.lengths_N):
        return samples
    kept: dict[str, Ragged] = {}
    if images is not None:
        lengths_N = _before_images(samples.others[IMAGE_PLACES], lengths_N, images)
        kept = _first_images(samples.others, lengths_N, images)

    def cut(column: Ragged) -> Ragged:
        starts_N = column.offsets[:-1]
        values, offsets = gather_ranges(
            np.ascontiguousarray(column.values_V), starts_N, starts_N + lengths_N
        )
        return Ragged(values_V=values, offsets=offsets)

    return Samples(
        tokens=cut(samples.tokens),
        others={
            name: cut(column) if COLUMNS[name].aligned else column
            for name, column in samples.others.items()
            if name not in IMAGE_COLUMNS
        }
        | kept,
        bad_N=samples.bad_N,
        reason=samples.reason,
    )
