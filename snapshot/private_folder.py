"""Folders of a node that only their user may read, and their places."""

import os
import stat
from contextlib import suppress
from pathlib import Path

from omniload.base.errors import ConfigError
from omniload.base.log import get_logger

__all__ = ["cache_folder", "is_own_folder", "private_folder", "put_file", "readable_folder"]

_LOG = get_logger(__name__)


def cache_folder(kind: str, *, remedy: str) -> Path:
    """Return the default folder of a user's cache of a kind.

    Raises:
        ConfigError: The user has no home; ``remedy`` says what to do.
    """
    above = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(above) if above else Path.home() / ".cache") / "omniload" / kind
    except RuntimeError as error:
        raise ConfigError(f"user {os.geteuid()} has no home for a cache; {remedy}") from error


def private_folder(path: Path) -> Path:
    """Make a folder that only its user may enter, or restrict an existing one; return it.

    Raises:
        ConfigError: It belongs to another user, or is no folder.
        OSError: It cannot be made.
    """
    # The content may come from files that others must not read, and is relied on when it is read back.
    try:
        # Folders above are made with the umask, and never changed, because they may be those of a disk.
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError as error:
        raise ConfigError(f"{path} is no folder; name another cache") from error
    # Use its descriptor, because another folder may replace it at the path between two looks.
    held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        seen = os.fstat(held)
        if seen.st_uid != os.geteuid():
            raise ConfigError(
                f"cache folder {path} belongs to user {seen.st_uid}, not to user {os.geteuid()}, "
                "whose code would use what lies there; name a cache of your own"
            )
        if mode := stat.S_IMODE(seen.st_mode) & 0o077:
            os.fchmod(held, 0o700)
            _LOG.warning("%s was open to others (%03o); it is 0700 now", path, mode)
    finally:
        os.close(held)
    return path


def is_own_folder(path: Path) -> bool:
    """Return whether a folder exists and nobody but its user, or root, could have written into it."""
    try:
        seen = path.stat()
    except OSError:
        return False
    # Root may write anywhere, so a folder of root is as trustworthy as one's own.
    return (
        stat.S_ISDIR(seen.st_mode)
        and seen.st_uid in {0, os.geteuid()}
        and not stat.S_IMODE(seen.st_mode) & 0o022
    )


def readable_folder(path: Path) -> None:
    """Make a folder, and missing folders above, that others may read but not write, whatever the umask."""
    if path.is_dir():
        return
    # Not with ``parents``, which gives folders above a mode that a umask of 0 leaves open to all.
    readable_folder(path.parent)
    with suppress(FileExistsError):
        path.mkdir(mode=0o755)


def put_file(path: Path, data: bytes = b"") -> None:
    """Write a file that others may read but not write, whatever the umask."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    with os.fdopen(file, "wb") as opened:
        opened.write(data)
