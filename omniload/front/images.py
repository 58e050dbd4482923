"""The images of packed rows as a training loop takes them.

Shape suffixes:
    I  images of the rows        P  patches of all of them        V  values of a patch
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from omniload.batch.images import places_of
from omniload.batch.microbatch import Microbatch
from omniload.mix.columns import GRIDS, IMAGES

__all__ = ["ImageArrays"]

_LARGEST_VALUE = 255.0

_ToTensor: TypeAlias = Callable[[NDArray[Any], type[np.generic]], Any]


class ImageArrays:
    """Patches of images, each field a tensor made when it is first asked for."""

    def __init__(self, rows: Microbatch, tensor: _ToTensor) -> None:
        self._rows, self._tensor = rows, tensor

    @cached_property
    def patches(self) -> Any:  # noqa: ANN401 -- the tensor type of whichever library
        """Pixels of all patches ``[P, V]``, uint8, image by image; see ``patches_of`` for their order."""
        return self._tensor(self._patches_PV(), np.uint8)

    def floats(self, mean: float = 0.5, deviation: float = 0.5) -> Any:  # noqa: ANN401
        """Return the patches as float32: pixels from 0 to 1, less ``mean``, over ``deviation``."""
        scaled = self._patches_PV().astype(np.float32) / _LARGEST_VALUE
        return self._tensor((scaled - mean) / deviation, np.float32)

    @cached_property
    def grids(self) -> Any:  # noqa: ANN401
        """Rows and columns of the patches of each image ``[I, 2]``, int64."""
        return self._tensor(self._grids_I2(), np.int64)

    @cached_property
    def places(self) -> Any:  # noqa: ANN401
        """First placeholder of each image in the flattened rows, and how many it has, ``[I, 2]``, int64."""
        return self._tensor(places_of(self._rows), np.int64)

    def __len__(self) -> int:
        return len(self._grids_I2())

    def _grids_I2(self) -> NDArray[np.int32]:
        grids = self._rows.columns_K.get(GRIDS)
        found = np.empty(0, np.int32) if grids is None else grids.values_V
        return found.reshape(-1, 2)

    def _patches_PV(self) -> NDArray[np.uint8]:
        grids_I2 = self._grids_I2().astype(np.int64)
        num = int((grids_I2[:, 0] * grids_I2[:, 1]).sum())
        if not num:
            return np.empty((0, 0), np.uint8)
        return self._rows.columns_K[IMAGES].values_V.reshape(num, -1)
