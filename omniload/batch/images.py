"""The images of a microbatch: what they hold, and where their embeddings belong.

Shape suffixes:
    I  images of a microbatch        K  pieces        V  values of an image, or of all
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omniload.base.ragged import Ragged
from omniload.batch.encoding import EncoderShare
from omniload.batch.microbatch import Microbatch
from omniload.mix.columns import GRIDS, IMAGE_PLACES, IMAGES

__all__ = ["BatchImage", "images_of", "places_of", "share_of", "values_per_image"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchImage:
    """One image of a microbatch."""

    key: NDArray[np.int64]
    """Source, position and sub of its sample, ``[3]``."""
    number: int
    """Its number in the sample, from 0."""
    grid: tuple[int, int]
    """Rows and columns of its patches."""
    values_V: NDArray[Any]
    """Values of its patches, end to end."""


def images_of(microbatch: Microbatch) -> Iterator[BatchImage]:
    """Yield the images that come with a microbatch: those of its rows, or those that its rank encodes."""
    share = microbatch.encoding
    if share is not None:
        for i, (key, grid) in enumerate(zip(share.keys_I4, share.grids_I2.tolist(), strict=True)):
            yield BatchImage(
                key=key[:3], number=int(key[3]), grid=tuple(grid), values_V=share.images_I[i]
            )
        return
    images = microbatch.columns_K.get(IMAGES)
    if images is None or not len(images.values_V):
        return
    grids = microbatch.columns_K[GRIDS]
    sizes_I = values_per_image(grids, len(images.values_V))
    stops_I = np.cumsum(sizes_I)
    pieces_I = np.repeat(np.arange(len(grids)), grids.lengths_N // 2)
    numbers_I = np.arange(len(pieces_I)) - (grids.offsets[:-1] // 2)[pieces_I]
    for i, (piece, number) in enumerate(zip(pieces_I.tolist(), numbers_I.tolist(), strict=True)):
        yield BatchImage(
            key=microbatch.keys_K4[piece, :3],
            number=number,
            grid=(int(grids.values_V[2 * i]), int(grids.values_V[2 * i + 1])),
            values_V=images.values_V[stops_I[i] - sizes_I[i] : stops_I[i]],
        )


def values_per_image(grids_K: Ragged, num_values: int) -> NDArray[np.int64]:
    """Return the values of each image, ``[I]``: all images of a mix have patches of one size.

    Args:
        grids_K: Rows and columns of the patches of each image.
        num_values: Values of all images together.
    """
    patches_I = grids_K.values_V[::2].astype(np.int64) * grids_K.values_V[1::2]
    sizes_I: NDArray[np.int64] = patches_I * (num_values // max(1, int(patches_I.sum())))
    return sizes_I


def places_of(microbatch: Microbatch) -> NDArray[np.int64]:
    """Return where the embeddings of all images belong, in the flattened rows.

    Returns:
        First placeholder of each image, and how many it has, ``[I, 2]``, in the order of ``images_of``.
    """
    places = microbatch.columns_K.get(IMAGE_PLACES)
    if places is None or not len(places.values_V):
        return np.empty((0, 2), np.int64)
    begins_D = microbatch.cu_seqlens[:-1].astype(np.int64)
    begins_K = begins_D[microbatch.sources_D >= 0]
    places_I2 = places.values_V.reshape(-1, 2).astype(np.int64)
    places_I2[:, 0] += np.repeat(begins_K, places.lengths_N // 2)
    return places_I2


def share_of(microbatch: Microbatch, rank: int, num_ranks: int) -> EncoderShare:
    """Return what a rank encodes where each encodes the images of its own rows: nothing travels.

    Args:
        microbatch: Rows with their images.
        rank: The rank.
        num_ranks: Ranks among which images could have been dealt.
    """
    images = list(images_of(microbatch))
    places_I2 = places_of(microbatch)
    sizes_I = places_I2[:, 1]
    own_W = np.zeros(num_ranks, np.int64)
    own_W[rank] = int(sizes_I.sum())
    starts_I = places_I2[:, 0] - (np.cumsum(sizes_I) - sizes_I)
    return EncoderShare(
        images_I=Ragged.of([image.values_V for image in images], np.uint8),
        grids_I2=np.array([image.grid for image in images], np.int32).reshape(-1, 2),
        keys_I4=np.array([[*image.key, image.number] for image in images], np.int64).reshape(-1, 4),
        sends_W=own_W,
        receives_W=own_W,
        places_E=np.repeat(starts_I, sizes_I) + np.arange(int(sizes_I.sum())),
    )
