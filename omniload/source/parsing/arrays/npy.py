"""The header of ``.npy``: the start of an array, its type and its shape. Nothing in it is ever unpickled."""

import os
import threading
from dataclasses import dataclass
from io import BytesIO
from math import prod
from tokenize import TokenError
from typing import Any

import numpy as np

from omniload.base.errors import IntegrityError

__all__ = ["LARGEST_HEADER", "MAGIC", "NpyArray", "npy_array", "number_of_npy"]

MAGIC = b"\x93NUMPY"
"""First bytes of every such file."""
LARGEST_HEADER = 64 << 10
"""Most bytes of a header."""
_NUMBERS = "biuf"
"""Kinds of numpy types that are numbers: no objects, which a file stores as a pickle, and no texts."""


class _Parser:
    """The lock for parsing headers.

    Python 3.11 counts the depth of a literal for all threads together, so two threads that parse at once cause a
    SystemError.
    """

    turn = threading.Lock()

    @classmethod
    def begin_anew(cls) -> None:
        """Release the lock, because a forked process lacks the thread that may have held it."""
        cls.turn = threading.Lock()


os.register_at_fork(after_in_child=_Parser.begin_anew)


@dataclass(frozen=True, slots=True, kw_only=True)
class NpyArray:
    """Content of the header of an array."""

    start: int
    """First byte of its values."""
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    is_fortran: bool
    """Whether its first dimension varies fastest."""

    @property
    def count(self) -> int:
        """Number of values, as a Python integer, because a damaged shape would overflow numpy's."""
        return prod(self.shape)

    @property
    def holds_numbers(self) -> bool:
        """Whether its values are numbers or booleans."""
        return self.dtype.kind in _NUMBERS


def npy_array(path: str, head: bytes) -> NpyArray:
    """Read the header of an array.

    Args:
        path: Path of the file, for messages.
        head: First bytes of the file, at most ``LARGEST_HEADER``.

    Raises:
        IntegrityError: The header cannot be read, or has impossible values.
    """
    read = np.lib.format
    opened = BytesIO(head)
    try:
        version = read.read_magic(opened)
        read_header = {
            (1, 0): read.read_array_header_1_0,
            (2, 0): read.read_array_header_2_0,
            # Differs from version 2 only in the encoding of field names, and no array of numbers has fields.
            (3, 0): read.read_array_header_2_0,
        }.get(version)
        if read_header is None:
            raise IntegrityError(
                f"{path}: is of version {version[0]}.{version[1]} of .npy, and versions 1.0 to 3.0 are read; "
                "write it anew by numpy.save, or replace it"
            )
        # A header is a Python literal, which takes time and stack to parse; numpy refuses long ones if it is asked to.
        with _Parser.turn:
            shape, fortran, dtype = read_header(opened, max_header_size=LARGEST_HEADER)
    except (ValueError, EOFError, SyntaxError, RecursionError, TokenError) as error:
        raise IntegrityError(
            f"{path}: its header cannot be read: {error!r:.120}; the file is corrupt, replace it"
        ) from error
    if any(length < 0 for length in shape):
        raise IntegrityError(
            f"{path}: says that its shape is {shape}; the file is corrupt, replace it"
        )
    return NpyArray(start=opened.tell(), dtype=dtype, shape=shape, is_fortran=fortran)


def number_of_npy(name: str, data: bytes) -> bool | int | float:
    """Return the number in a small ``.npy`` file.

    Args:
        name: Name of the file.
        data: Whole content of the file.

    Raises:
        IntegrityError: The file is no array of one number.
    """
    found = npy_array(name, data[:LARGEST_HEADER])
    if not found.holds_numbers or found.count != 1:
        raise IntegrityError(
            f"{name}: is an array of {found.dtype} of the shape {found.shape}, not of one number"
        )
    held = data[found.start :]
    if len(held) != found.dtype.itemsize:
        raise IntegrityError(
            f"{name}: holds {len(held)} bytes behind its header, and {found.dtype} has {found.dtype.itemsize}"
        )
    number: bool | int | float = np.frombuffer(held, found.dtype)[0].item()
    return number
