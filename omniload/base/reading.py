"""Reading users' files and kept files: opened without waiting, and small ones read whole within a limit."""

import difflib
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from omniload.base.errors import ConfigError, IntegrityError, StateError
from omniload.base.units import format_bytes

__all__ = ["kind_of", "open_file", "read_kept_file", "read_small_file"]

_STRIDE_BYTES = 1 << 20
_KINDS = (
    (stat.S_ISREG, "a file"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def kind_of(mode: int) -> str:
    """Return the kind of what is at a path, from its mode: ``a file``, ``a folder``, ``a pipe``, ..."""
    return next((kind for holds, kind in _KINDS if holds(mode)), "something else")


def open_file(path: Path) -> BinaryIO:
    """Open a file that this project keeps; anything else at the path is refused without waiting.

    Raises:
        StateError: A pipe, a device or a folder is at the path.
        OSError: The file cannot be opened.
    """
    # Without O_NONBLOCK, opening a pipe waits for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise StateError(f"{path}: is {kind_of(mode)}, not a file of ours; move it away")
    return os.fdopen(descriptor, "rb")


def read_small_file(path: Path, *, most_bytes: int, what: str) -> bytes:
    """Read a file that a user named.

    A pipe or a device is refused without waiting, because settings are read again later, by other processes.

    Args:
        path: The file.
        most_bytes: Largest size; a larger file is refused before it is read.
        what: What the file should contain, such as ``a file of settings``, for messages.

    Raises:
        ConfigError: There is no file up to that size at the path, or it cannot be read.
    """
    try:
        # Without O_NONBLOCK, opening a pipe waits for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file{_near(path)}; give the path of {what}") from None
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: cannot be read: {said}; give the path of {what}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{path}: is {kind_of(status.st_mode)}; give the path of {what}")
        held = _held(descriptor, status.st_size, most_bytes)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    finally:
        os.close(descriptor)
    # The greater of both sizes: a file that grew during reading, or a file in ``/proc`` with a size of 0, shows its
    # size only by what was read.
    if (size := max(status.st_size, len(held))) > most_bytes:
        raise ConfigError(
            f"{path}: holds {format_bytes(size)}, more than {format_bytes(most_bytes)}; is it {what}?"
        )
    return bytes(held)


def _near(path: Path) -> str:
    """Return the name in the folder that a mistyped name may stand for, as a question; empty if there is none."""
    near: list[str] = []
    with suppress(OSError):
        names = [each.name for each in path.parent.iterdir()]
        near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.8)
    return f" (did you mean {near[0]}?)" if near else ""


def read_kept_file(path: Path, *, most_bytes: int, what: str) -> bytes:
    """Read a file that one of our programs wrote, within the limits of what it can have written.

    Args:
        path: The file.
        most_bytes: Largest size; a larger file is refused before it is read.
        what: Content of the file, such as ``a trace``, for messages.

    Raises:
        FileNotFoundError: There is no file.
        IntegrityError: The file is larger, or it is not a file.
        OSError: The file cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise IntegrityError(f"{path}: is {kind_of(status.st_mode)}, not {what}; remove it")
        held = _held(descriptor, status.st_size, most_bytes)
    finally:
        os.close(descriptor)
    if (size := max(status.st_size, len(held))) > most_bytes:
        raise IntegrityError(
            f"{path}: holds {size} bytes, and {what} at most {most_bytes}; remove it"
        )
    return bytes(held)


def _held(descriptor: int, size_bytes: int, most_bytes: int) -> bytearray:
    """Return the content of an open file; empty if it is larger than the limit, and cut off just above if it grows."""
    held = bytearray()
    # A file that grows, or that reports no size, is limited while it is read.
    while (
        size_bytes <= most_bytes
        and len(held) <= most_bytes
        and (part := os.read(descriptor, _STRIDE_BYTES))
    ):
        held += part
    return held
