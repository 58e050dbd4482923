"""Files that are there whole or not at all, and logs that are appended to."""

import errno
import os
import shutil
import stat
import uuid
from contextlib import suppress
from pathlib import Path

from omniload.base.errors import ConfigError
from omniload.base.reading import kind_of
from omniload.base.units import format_bytes

__all__ = ["FULL", "free_in", "open_log", "require_replaceable", "sync_folder", "write_whole"]

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""What is refused for want of room, which others may give back."""


def free_in(folder: Path | None) -> str:
    """Return what is free in a folder, as words behind a comma; ``None`` for one of another machine."""
    if folder is None:
        return "and what is free there cannot be seen from here"
    try:
        free = shutil.disk_usage(folder).free
    except OSError:  # it is gone, or the disk is: what was refused says more than this
        return "and its folder cannot be looked at"
    return f"{free} bytes ({format_bytes(free)}) are free there"


def write_whole(path: Path, data: bytes, *, durable: bool = False, mode: int = 0o666) -> None:
    """Put a file at ``path``, over one that may be there, by one rename.

    Args:
        path: Where; its folder is there.
        data: All of it.
        durable: Whether the bytes outlive a crash of the machine right after.
        mode: Who may read and write it, less what the process's umask takes away.

    Raises:
        FileExistsError: A folder, a device, a pipe or a socket is there.
        OSError: It cannot be written, and nothing of it is left; or it is there, and might not outlive a crash.
    """
    require_replaceable(path)
    # A name has 255 bytes at most, however few characters they are, and on some systems no half of one.
    name = path.name.encode(errors="ignore")[:200].decode(errors="ignore")
    partial = path.with_name(f".{name}.{uuid.uuid4().hex[:12]}")
    try:
        # Exclusive, under a name that nobody guesses: of two that write at once each has a draft of its own.
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
            # The draft has a name that nobody gave, and what does not fit on a disk none.
            error.filename, error.filename2 = str(path), None
        raise
    if durable:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a renaming or a new name in a folder durable: without it a power cut may bring back what was there.

    Raises:
        OSError: The disk refuses.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems sync no folders: a file is as durable there as it can be.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def require_replaceable(path: Path) -> None:
    """Check that a file may take the place of what is at ``path``: root would replace ``/dev/null`` as well.

    Raises:
        FileExistsError: A folder, a device, a pipe or a socket is there.
    """
    with suppress(FileNotFoundError):
        # Not followed: a rename takes the place of the link itself, and leaves alone what it leads to.
        mode = path.lstat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
            raise FileExistsError(errno.EEXIST, f"{kind_of(mode)} is there, no file", str(path))


def open_log(path: str) -> int:
    """Open what a process appends its log to: a file, made if need be, a terminal, or a pipe that is read.

    Returns:
        A descriptor, which the caller closes.

    Raises:
        ConfigError: It cannot be written, or nobody reads the pipe.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    try:
        # Without O_NONBLOCK, opening a pipe waits for whoever reads from it.
        log = os.open(path, flags | os.O_NONBLOCK, 0o644)
    except OSError as error:
        said = "is a pipe that nobody reads" if error.errno == errno.ENXIO else None
        raise ConfigError(
            f"log {path!r} {said or f'cannot be written: {error.strerror}'}; name a file"
        ) from error
    # Opened without waiting, and written to as any other file.
    os.set_blocking(log, True)
    return log
