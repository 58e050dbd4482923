"""Placeholders for columns that a rank does not get: they know the shape, and their error says how to get them."""

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
        # Attributes that Python and numpy probe for must be missing instead of raising this error.
        if name.startswith("__"):
            raise AttributeError(name)
        raise ConfigError(self.said)


def absent_array(said: str, like: NDArray[Any] | Absent) -> NDArray[Any]:
    """Return the placeholder of an array."""
    return cast("NDArray[Any]", Absent(said, like.shape, like.dtype))


def absent_column(said: str) -> Ragged:
    """Return the placeholder of a whole-sample column."""
    return cast("Ragged", Absent(said))


def is_absent(value: object) -> bool:
    """Return whether a column is a placeholder."""
    return isinstance(value, Absent)


def stacked(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return arrays one behind the other; absent ones as one that is absent."""
    first: object = arrays[0]
    if isinstance(first, Absent):
        length = sum(len(array) for array in arrays)
        return cast("NDArray[Any]", Absent(first.said, (length, *first.shape[1:]), first.dtype))
    return np.concatenate(arrays)
