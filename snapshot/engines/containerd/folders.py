"""Folders of snapshots on the disk: what they take, how they go.

What lies in them was written by containers, so nothing is too deep, too strange or too
quickly changed for it to happen.
"""

import os
import shutil
import stat as stat_bits
import subprocess
from contextlib import suppress
from pathlib import Path

from omniload.base.log import get_logger

__all__ = ["take_away", "usage_of"]

_log = get_logger(__name__)


def usage_of(folder: Path) -> tuple[int, int]:
    """Return the bytes that a folder takes on its disk, and its inodes, each counted once.

    What goes while it is counted, or lies deeper than a path can say, is left out.
    """
    seen: dict[tuple[int, int], int] = {}
    with suppress(OSError):
        found = folder.lstat()
        seen[found.st_dev, found.st_ino] = found.st_blocks * 512
    waiting = [str(folder)]
    while waiting:
        with suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                with suppress(OSError):
                    found = entry.stat(follow_symlinks=False)
                    seen[found.st_dev, found.st_ino] = found.st_blocks * 512
                    if stat_bits.S_ISDIR(found.st_mode):
                        waiting.append(entry.path)
    return sum(seen.values()), len(seen)


def take_away(folder: Path) -> None:
    """Remove a folder with all that is in it; what stays is said, and no error."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except RecursionError:
        # It calls itself for each folder in a folder, and a container may have made thousands.
        subprocess.run(["rm", "-rf", "--one-file-system", "--", str(folder)], check=False)  # noqa: S603, S607
    if os.path.lexists(folder):
        _log.warning("%s cannot be removed whole; it is tried again at the next cleanup", folder)
