"""Folders of indexes: each mix file of a user has one, and can use the indexes that others have of the same source.

An entry of a file in an index is valid for every mix file, as long as the file and the way it is cut are the same.
Without sharing, each ablation would read terabytes of lines again.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from omniload.base.log import get_logger

__all__ = ["index_folder", "indexes_beside", "share_places"]


_ABOVE = ("omniload", "index")
"""Folders above those of mix files in the cache of a user; one that the user names may lie next to other people's."""
_MOST = 4
_log = get_logger(__name__)
_told: list[str] = []


def index_folder(mix_path: Path) -> Path | None:
    """Return the folder that keeps the indexes of a mix file's sources, under the user's cache folder.

    ``None`` if the user has no cache folder, as in a container whose user is unknown: no index is kept, and a warning
    says so once.
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
    # Mix files in several folders may have the same name, so a digest of the folder tells their indexes apart.
    digest = hashlib.blake2b(os.fsencode(mix_path.resolve()), digest_size=6).hexdigest()
    return above.joinpath(*_ABOVE, f"{mix_path.stem}.{digest}")


def indexes_beside(own: Path) -> Iterator[Path]:
    """Yield the indexes of the same name of other mix files, the latest first, and at most four."""
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
    """Link the places of compressed shards that another index has to the folder of this one; skip those that fail.

    Each file of places names its shard and its time, and is replaced as a whole, so two folders may link to it.

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
