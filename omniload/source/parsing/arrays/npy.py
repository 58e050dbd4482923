"""The head of ``.npy``: where an array begins, its type and its shape. Nothing of it is unpickled, ever."""

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
"""What every such file begins with."""
LARGEST_HEADER = 64 << 10
"""Bytes of a head at most."""
_NUMBERS = "biuf"
"""Kinds of numpy's types that are numbers: no objects, which a file holds as a pickle, and no texts."""


class _Parser:
    """Whose turn it is to parse.

    Python 3.11 counts how deep it is in a literal for all threads together: two that meet there end in a SystemError.
    """

    turn = threading.Lock()

    @classmethod
    def begin_anew(cls) -> None:
        """Have nobody's turn be: a forked process lacks the thread whose it was."""
        cls.turn = threading.Lock()


os.register_at_fork(after_in_child=_Parser.begin_anew)


@dataclass(frozen=True, slots=True, kw_only=True)
class NpyArray:
    """What the head of an array says."""

    start: int
    """First byte of its values."""
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    is_fortran: bool
    """Whether the first of its dimensions runs fastest."""

    @property
    def count(self) -> int:
        """Its values. In numbers of Python: a damaged shape would wrap round in those of numpy."""
        return prod(self.shape)

    @property
    def holds_numbers(self) -> bool:
        """Whether its values are numbers or booleans."""
        return self.dtype.kind in _NUMBERS


def npy_array(path: str, head: bytes) -> NpyArray:
    """Read the head of an array.

    Args:
        path: Of its file, for messages.
        head: The first bytes, at most ``LARGEST_HEADER``.

    Raises:
        IntegrityError: It cannot be read, or says what cannot be.
    """
    read = np.lib.format
    opened = BytesIO(head)
    try:
        version = read.read_magic(opened)
        read_header = {
            (1, 0): read.read_array_header_1_0,
            (2, 0): read.read_array_header_2_0,
            # Other than version 2 in the coding of names of fields alone, and no array of numbers has fields.
            (3, 0): read.read_array_header_2_0,
        }.get(version)
        if read_header is None:
            raise IntegrityError(
                f"{path}: is of version {version[0]}.{version[1]} of .npy, and versions 1.0 to 3.0 are read; "
                "write it anew by numpy.save, or replace it"
            )
        # A header is a literal of Python, which takes the parser's time and stack: numpy refuses long ones if told to.
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
    """Return the number that a small file of ``.npy`` holds.

    Args:
        name: What the file is called.
        data: All of it.

    Raises:
        IntegrityError: It is no array of one number.
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
