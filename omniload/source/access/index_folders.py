"""Folders of indexes: one for each mix file of a user, and what those of others keep of the same source.

An index lies there by the name of the source and by how its files are cut. What it says of a file holds whatever mix
file it was found for, as long as the file is the same: each ablation would read terabytes of lines anew.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from omniload.base.log import get_logger

__all__ = ["index_folder", "indexes_beside", "share_places"]


_ABOVE = ("omniload", "index")
"""Folders above those of mix files in the user's cache: beside one that a user names there may be anybody's."""
_MOST = 4
_log = get_logger(__name__)
_told: list[str] = []


def index_folder(mix_path: Path) -> Path | None:
    """Return the folder that keeps the indexes of a mix file's sources, under the user's cache folder.

    ``None`` where the user has none, as a container's that no file of users names: nothing is kept, and that is warned
    of once.
    """
    cache = os.environ.get("XDG_CACHE_HOME")
    try:
        above = Path(cache) if cache else Path("~/.cache").expanduser()
    except RuntimeError:
        if not _told:
            _told.append("no home")
            _log.warning(
                "user %d has no home, and neither HOME nor XDG_CACHE_HOME is set, so every start builds indexes, and "
                "searches and measures sources, again; set XDG_CACHE_HOME to a folder that keeps them",
                os.geteuid(),
            )
        return None
    # Mix files of one name lie in many folders, and have indexes of their own.
    digest = hashlib.blake2b(os.fsencode(mix_path.resolve()), digest_size=6).hexdigest()
    return above.joinpath(*_ABOVE, f"{mix_path.stem}.{digest}")


def indexes_beside(own: Path) -> Iterator[Path]:
    """Yield the indexes of the same name that other mix files have, the latest first, a few at most."""
    above = own.parent.parent
    if above.parts[-2:] != _ABOVE:
        return
    found: list[tuple[int, Path]] = []
    with suppress(OSError):
        for folder in above.iterdir():
            other = folder / own.name
            with suppress(OSError):
                if folder != own.parent:
                    found.append((other.stat().st_mtime_ns, other))
    for _, other in sorted(found, reverse=True)[:_MOST]:
        yield other


def share_places(own: Path, other: Path) -> None:
    """Have the places of compressed shards that stand beside another index beside this one too, as far as that goes.

    Each says which shard it is of, and when, and is replaced as a whole: both may have the same file.

    Args:
        own: Folder of places.
        other: The folder beside the other index.
    """
    with suppress(OSError):
        names = [path.name for path in other.iterdir() if not path.name.startswith(".")]
        own.mkdir(parents=True, exist_ok=True)
        for name in names:
            with suppress(OSError):
                os.link(other / name, own / name)
