"""The images of packed rows as a training loop takes them.

Shape suffixes:
    I  images        P  patches of all of them        V  values of a patch        E  embeddings that come
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from omniload.base.errors import ConfigError
from omniload.batch.encoding import EncoderShare
from omniload.batch.images import places_of
from omniload.batch.microbatch import CpSlice, Microbatch
from omniload.mix.columns import GRIDS, IMAGES

__all__ = ["EncodingArrays", "ImageArrays", "PatchArrays", "dealt_images", "own_images"]

_LARGEST_VALUE = 255.0

_ToTensor: TypeAlias = Callable[[NDArray[Any], type[np.generic]], Any]


class PatchArrays:
    """Patches of some images, each field a tensor made when it is first asked for."""

    def __init__(
        self, values_V: NDArray[np.uint8], grids_I2: NDArray[np.integer[Any]], tensor: _ToTensor
    ) -> None:
        self._grids_I2, self._tensor = grids_I2.astype(np.int64), tensor
        num = int((self._grids_I2[:, 0] * self._grids_I2[:, 1]).sum())
        self._patches_PV = values_V.reshape(num, -1) if num else np.empty((0, 0), np.uint8)

    @cached_property
    def patches(self) -> Any:  # noqa: ANN401 -- the tensor type of whichever library
        """Pixels of all patches ``[P, V]``, uint8, image by image; see ``patches_of`` for their order."""
        return self._tensor(self._patches_PV, np.uint8)

    def floats(self, mean: float = 0.5, deviation: float = 0.5) -> Any:  # noqa: ANN401
        """Return the patches as float32: pixels from 0 to 1, less ``mean``, over ``deviation``."""
        scaled = self._patches_PV.astype(np.float32) / _LARGEST_VALUE
        return self._tensor((scaled - mean) / deviation, np.float32)

    @cached_property
    def grids(self) -> Any:  # noqa: ANN401
        """Rows and columns of the patches of each image ``[I, 2]``, int64."""
        return self._tensor(self._grids_I2, np.int64)

    def __len__(self) -> int:
        return len(self._grids_I2)


class ImageArrays(PatchArrays):
    """The images of rows, in their order."""

    def __init__(self, rows: Microbatch, tensor: _ToTensor) -> None:
        grids, images = rows.columns_K.get(GRIDS), rows.columns_K.get(IMAGES)
        super().__init__(
            np.empty(0, np.uint8) if images is None else images.values_V,
            (np.empty(0, np.int32) if grids is None else grids.values_V).reshape(-1, 2),
            tensor,
        )
        self._rows = rows

    @cached_property
    def places(self) -> Any:  # noqa: ANN401
        """First placeholder of each image in the flattened rows, and how many it has, ``[I, 2]``, int64."""
        return self._tensor(places_of(self._rows), np.int64)


class EncodingArrays(PatchArrays):
    """The images that a rank encodes, ordered by the rank that their embeddings go to."""

    def __init__(self, share: EncoderShare, tensor: _ToTensor) -> None:
        super().__init__(share.images_I.values_V, share.grids_I2, tensor)
        self._share = share

    @property
    def sends(self) -> list[int]:
        """Embeddings that go to each rank, in the order of ranks: input splits of an all-to-all."""
        sends: list[int] = self._share.sends_W.tolist()
        return sends

    @property
    def receives(self) -> list[int]:
        """Embeddings that come from each rank: output splits of it."""
        receives: list[int] = self._share.receives_W.tolist()
        return receives

    @cached_property
    def places(self) -> Any:  # noqa: ANN401
        """Place in the flattened rows of each embedding that comes, in the order it comes in, ``[E]``, int64."""
        return self._tensor(self._share.places_E, np.int64)


def own_images(
    rows: Microbatch | CpSlice, parts: Sequence[Microbatch | CpSlice], tensor: _ToTensor
) -> ImageArrays:
    """Return the images of rows.

    Args:
        rows: The rows.
        parts: The microbatches that they were joined of.
        tensor: Makes tensors.

    Raises:
        ConfigError: The rows are shared among cp peers, or their images are encoded elsewhere.
    """
    if isinstance(rows, CpSlice):
        raise ConfigError("rows shared among cp peers have no images of their own; use cp 1")
    if any(isinstance(part, Microbatch) and part.encoding is not None for part in parts):
        raise ConfigError(
            "balance.strategy deals images apart from rows; take microbatches[i].encoding, which says what this "
            "rank encodes and where embeddings go"
        )
    return ImageArrays(rows, tensor)


def dealt_images(rows: Microbatch | CpSlice, tensor: _ToTensor) -> EncodingArrays:
    """Return what a rank encodes for a microbatch.

    Raises:
        ConfigError: No strategy deals images apart from rows, or the rows are not one microbatch.
    """
    share = None if isinstance(rows, CpSlice) else rows.encoding
    if share is None:
        raise ConfigError(
            "these rows come with their own images; take images, or set balance.strategy hybrid and take "
            "microbatches[i].encoding"
        )
    return EncodingArrays(share, tensor)
