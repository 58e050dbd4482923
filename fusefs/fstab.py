"""``mount.omniload``: what mount(8) and fstab call for a filesystem of type ``omniload``.

A line of fstab::

    hdfs://namenode:9000/jobs  /mnt/jobs  omniload  _netdev,watch,count=8,cache=1GiB  0 0

``watch`` keeps a process beside the mount that mounts again whenever the daemon dies.
"""

import os
import sys
from collections.abc import Sequence

from fusefs.mount_options import mount_config, without_watch
from fusefs.mounting import start
from omniload.base.errors import ConfigError, OmniloadError

__all__ = ["main", "parsed"]


def parsed(arguments: Sequence[str]) -> tuple[str, str, tuple[str, ...]]:
    """Return store, mount point and options of ``SOURCE DIRECTORY [-fnsv] [-t TYPE] [-o OPTIONS]``.

    Raises:
        ConfigError: Source or directory is missing.
    """
    places: list[str] = []
    options: list[str] = []
    left = list(arguments)
    while left:
        word = left.pop(0)
        if word in {"-o", "-t", "-N"} and left:
            value = left.pop(0)
            options += [value] if word == "-o" else []
        elif not word.startswith("-"):
            places.append(word)
    if len(places) != 2:
        raise ConfigError(f"mount.omniload got {list(arguments)}; give SOURCE and DIRECTORY")
    return places[0], places[1], tuple(options)


def main() -> None:
    """Mount in the background; the exit code is mount's: 0, or 32 for a mount that failed."""
    try:
        store, mountpoint, options = parsed(sys.argv[1:])
        words, watched = without_watch(options)
        config = mount_config(store, mountpoint, words)
        process = start(config, log_path=os.devnull, watched=watched)
        process.returncode = 0  # it outlives us
    except OmniloadError as error:
        sys.stderr.write(f"mount.omniload: {error}\n")
        sys.exit(32)
