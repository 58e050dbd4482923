"""Files that exist whole or not at all, and logs that are appended to."""

import errno
import os
import stat
import uuid
from contextlib import suppress
from pathlib import Path

from omniload.base.errors import ConfigError
from omniload.base.reading import kind_of
from omniload.base.units import format_bytes

__all__ = ["FULL", "free_in", "open_log", "require_replaceable", "sync_folder", "write_whole"]

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Error numbers for a lack of room, which others may free."""


def free_in(folder: Path | None) -> str:
    """Return the free space of a folder, as words that follow a comma; ``None`` for a folder of another machine."""
    if folder is None:
        return "and what is free there cannot be seen from here"
    try:
        room = os.statvfs(folder)
    except OSError:  # the folder or the disk is gone: the original error says more than this
        return "and its folder cannot be looked at"
    free = room.f_bavail * room.f_frsize
    said = f"{free} bytes ({format_bytes(free)}) are free there"
    if room.f_files and not room.f_favail:  # some file systems count no files
        return f"{said}, but all {room.f_files} files that fit are there"
    return said


def write_whole(path: Path, data: bytes, *, durable: bool = False, mode: int = 0o666) -> None:
    """Write a file at ``path`` by one rename; it may replace an existing file.

    Args:
        path: Path of the file; its folder exists.
        data: Whole content.
        durable: Whether the bytes survive a crash of the machine immediately afterwards.
        mode: Permissions, reduced by the umask of the process.

    Raises:
        FileExistsError: A folder, a device, a pipe or a socket is at the path.
        OSError: The file cannot be written, and nothing of it is left; or it is written, but may not survive a crash.
    """
    require_replaceable(path)
    # A name has at most 255 bytes, however many characters that is, and some systems refuse half a character.
    name = path.name.encode(errors="ignore")[:200].decode(errors="ignore")
    partial = path.with_name(f".{name}.{uuid.uuid4().hex[:12]}")
    try:
        # Exclusive, under an unpredictable name, so that two concurrent writers each have their own draft.
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            # The user did not choose the name of the draft, and an error of a full disk has no name.
            error.filename, error.filename2 = str(path), None
        raise
    if durable:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename or a new name in a folder durable; otherwise a power cut may bring back the earlier content.

    Raises:
        OSError: The disk refuses to sync.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems do not sync folders. A file there is already as durable as it can be.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def require_replaceable(path: Path) -> None:
    """Check that a file may replace what is at ``path``, because root could replace even ``/dev/null``.

    Raises:
        FileExistsError: A folder, a device, a pipe or a socket is at the path.
    """
    with suppress(FileNotFoundError):
        # Links are not followed: a rename replaces the link itself and leaves its target alone.
        mode = path.lstat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
            raise FileExistsError(errno.EEXIST, f"{kind_of(mode)} is there, no file", str(path))


def open_log(path: str) -> int:
    """Open a log to append to: a file, created if needed, a terminal, or a pipe that has a reader.

    Returns:
        A descriptor that the caller closes.

    Raises:
        ConfigError: The log cannot be written, or the pipe has no reader.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    try:
        # Without O_NONBLOCK, opening a pipe waits for a reader.
        log = os.open(path, flags | os.O_NONBLOCK, 0o644)
    except OSError as error:
        said = "is a pipe that nobody reads" if error.errno == errno.ENXIO else None
        raise ConfigError(
            f"log {path!r} {said or f'cannot be written: {error.strerror}'}; name a file"
        ) from error
    # Opened without waiting, but written to like any other file.
    os.set_blocking(log, True)
    return log
