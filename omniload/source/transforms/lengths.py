"""Transforms of samples by their lengths: cut them off, or leave them out."""

import numpy as np
from numpy.typing import NDArray

from omniload.base.ragged import Ragged, gather_ranges
from omniload.mix.columns import COLUMNS, IMAGE_COLUMNS, IMAGE_PLACES, LOSS_MASK
from omniload.mix.schema.transforms import ClampTransform, FilterTransform, ImagesTransform
from omniload.source.transforms.image_pieces import before_images, first_images
from omniload.source.transforms.samples import Samples

__all__ = ["clamped", "filtered"]


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
        lengths_N = before_images(samples.others[IMAGE_PLACES], lengths_N, images)
        kept = first_images(samples.others, lengths_N, images)

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
