"""What stands in the place of a column that a rank does not get: its shape, and an error that says how to get it."""

from collections.abc import Sequence
from typing import Any, NoReturn, cast

import numpy as np
from numpy.typing import NDArray

from omniload.base.errors import ConfigError
from omniload.base.ragged import Ragged

__all__ = ["Absent", "absent_array", "absent_column", "is_absent", "stacked"]


class Absent:
    """A column that is not here. Shape, type and length of its array are known; whatever else is asked is refused.

    It is no array of zeros: a model that trained on those would not tell.
    """

    def __init__(
        self, said: str, shape: Sequence[int] = (), dtype: np.dtype[Any] | None = None
    ) -> None:
        """Stand for an array of a shape and a type; ``said`` is the message of the error."""
        self.said, self.shape, self.dtype = said, tuple(shape), dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, *_: object, **__: object) -> NoReturn:
        raise ConfigError(self.said)

    def __getitem__(self, at: object) -> NoReturn:
        raise ConfigError(self.said)

    def __getattr__(self, name: str) -> NoReturn:
        # What Python and numpy look for by themselves has to be missing, not refused.
        if name.startswith("__"):
            raise AttributeError(name)
        raise ConfigError(self.said)


def absent_array(said: str, like: NDArray[Any] | Absent) -> NDArray[Any]:
    """Return what stands in the place of an array."""
    return cast("NDArray[Any]", Absent(said, like.shape, like.dtype))


def absent_column(said: str) -> Ragged:
    """Return what stands in the place of a column of whole samples."""
    return cast("Ragged", Absent(said))


def is_absent(value: object) -> bool:
    """Tell whether a column is not here."""
    return isinstance(value, Absent)


def stacked(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return arrays one behind the other; absent ones as one that is absent."""
    first: object = arrays[0]
    if isinstance(first, Absent):
        length = sum(len(array) for array in arrays)
        return cast("NDArray[Any]", Absent(first.said, (length, *first.shape[1:]), first.dtype))
    return np.concatenate(arrays)
