"""Files and folders of this machine inside a started image, and the start-up log among them."""

import os
import stat as stat_bits
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from omniload.base.errors import ConfigError
from snapshot.startup.events import LOG_VARIABLE, handed_down

__all__ = ["LOG_INSIDE", "Bind", "bind_of", "log_of", "make_mount_points"]

LOG_INSIDE = "/run/omniload/startup.jsonl"
"""Where a command in an image finds the start-up log."""
_TAKEN = ("proc", "dev", "sys")


@dataclass(frozen=True, slots=True)
class Bind:
    """A file or folder of this machine, and where it is seen inside."""

    source: str
    """Absolute."""
    target: str
    """Absolute, in the image."""
    read_only: bool = False


def bind_of(text: str) -> Bind:
    """Read ``HOST``, ``HOST:PATH`` or either with ``:ro``; without PATH it is HOST's own.

    Raises:
        ConfigError: Nothing is there, or PATH cannot be mounted on.
    """
    rest, _, last = text.rpartition(":")
    read_only = bool(rest) and last == "ro"
    host, _, path = (rest if read_only else text).partition(":")
    source = os.path.realpath(host)
    if not host or not Path(source).exists():
        raise ConfigError(f"--bind {text!r}: {host!r} is not on this machine; make it first")
    target = path or str(Path(host).absolute())
    parts = PurePosixPath(target).parts
    if parts[:1] != ("/",) or len(parts) == 1 or ".." in parts or parts[1] in _TAKEN:
        raise ConfigError(
            f"--bind {text!r}: {target!r} cannot be mounted on; give an absolute path without '..', "
            f"outside of /{', /'.join(_TAKEN)}"
        )
    return Bind(source, str(PurePosixPath(target)), read_only)


def log_of(environment: Mapping[str, str] = os.environ) -> tuple[tuple[Bind, ...], list[str]]:
    """Return what makes stages inside and outside of an image lines of one start-up.

    Returns:
        The bind of the log, and ``KEY=VALUE`` that say inside which job, node and attempt it
        is; nothing where no log is written or it cannot be.
    """
    path = environment.get(LOG_VARIABLE)
    if not path:
        return (), []
    with suppress(OSError):
        Path(path).touch()
        known = handed_down(environment) | {LOG_VARIABLE: LOG_INSIDE}
        return (Bind(os.path.realpath(path), LOG_INSIDE),), [f"{k}={v}" for k, v in known.items()]
    return (), []


def make_mount_points(binds: Sequence[Bind], image: Path, upper: Path) -> None:
    """Make the mount points in the upper layer: a link of the image leads none of them elsewhere.

    Folders that the image has keep their modes and owners.

    Raises:
        ConfigError: One is to lie in a file.
    """
    for bind in binds:
        *above, name = PurePosixPath(bind.target).parts[1:]
        lower, place = image, upper
        for part in above:
            lower, place = lower / part, place / part
            _make_folder(place, lower)
        try:
            if Path(bind.source).is_dir():
                (place / name).mkdir(exist_ok=True)
            else:
                (place / name).touch()
        except OSError as error:
            raise ConfigError(
                f"--bind {bind.source}:{bind.target}: {error.strerror}; another bind lies there"
            ) from error


def _make_folder(place: Path, lower: Path) -> None:
    try:
        place.mkdir()
    except FileExistsError:
        return
    with suppress(OSError):
        found = lower.lstat()
        if stat_bits.S_ISDIR(found.st_mode):
            os.chown(place, found.st_uid, found.st_gid)
            place.chmod(stat_bits.S_IMODE(found.st_mode))
