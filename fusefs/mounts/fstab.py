"""``mount.omniload``: the program that mount(8) and fstab call for a filesystem of type ``omniload``.

A line of fstab::

    hdfs://namenode:9000/jobs  /mnt/jobs  omniload  _netdev,watch,log=/var/log/jobs.log,count=8  0 0

``watch`` keeps another process that mounts again whenever the daemon dies;
``log`` is the log file of both, whose messages are lost without it.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from fusefs.mounts.lifecycle import start
from fusefs.mounts.options import mount_config, without_log, without_watch
from omniload.base.errors import ConfigError, OmniloadError

__all__ = ["Call", "main", "parsed"]

_USAGE = """\
usage: mount.omniload STORE DIRECTORY [-fnsvh] [-N NAMESPACE] [-t TYPE] [-o OPTIONS]

Mounts STORE, a URL or a directory, at DIRECTORY, as mount(8) asks it to for a line of fstab.

  -f, --fake  check the arguments and mount nothing
  -o OPTIONS  as of `omniload fs mount`, and watch, log=FILE
  -h, --help  show this
  -n -s -v -N -t  of mount(8); they change nothing here
"""
_WITH_VALUE = frozenset({"-o", "-t", "-N"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The request of mount(8)."""

    store: str
    mountpoint: str
    options: tuple[str, ...]
    fake: bool = False
    """Whether to do everything except mount."""


def parsed(arguments: Sequence[str]) -> Call | None:
    """Return the request of ``SOURCE DIRECTORY [-fnsv] [-t TYPE] [-o OPTIONS]``; None for ``-h``.

    Raises:
        ConfigError: Source or directory is missing, or an option has no value.
    """
    places: list[str] = []
    options: list[str] = []
    flags = ""
    left = list(arguments)
    while left:
        word = left.pop(0)
        if word in _WITH_VALUE:
            if not left:
                raise ConfigError(f"mount.omniload got {word} without a value; give one")
            value = left.pop(0)
            options += [value] if word == "-o" else []
        elif word in {"--fake", "--help"}:
            flags += word[2]
        elif word.startswith("-"):
            flags += "" if word.startswith("--") else word[1:]
        else:
            places.append(word)
    if "h" in flags:
        return None
    if len(places) != 2:
        raise ConfigError(f"mount.omniload got {list(arguments)}; give SOURCE and DIRECTORY")
    return Call(store=places[0], mountpoint=places[1], options=tuple(options), fake="f" in flags)


def main() -> None:
    """Mount in the background; the exit code is mount's: 0, or 32 for a mount that failed."""
    try:
        call = parsed(sys.argv[1:])
        if call is None:
            sys.stdout.write(_USAGE)
            return
        words, watched = without_watch(call.options)
        words, log = without_log(words)
        config = mount_config(call.store, call.mountpoint, words)
        if call.fake:
            return
        # Log to nowhere unless asked: the daemon outlives mount(8), and must not hold a pipe of its caller.
        process = start(config, log_path=log or os.devnull, watched=watched)
        process.returncode = 0  # the daemon outlives this process
    except OmniloadError as error:
        sys.stderr.write(f"mount.omniload: {error}\n")
        # Exit code of mount(8) for "mount failure".
        sys.exit(32)
