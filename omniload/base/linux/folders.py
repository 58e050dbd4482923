"""Folders of this machine: matches of a glob, contents of a folder, and links to other folders."""

import errno
import fnmatch
import glob
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from heapq import heappop, heappush
from pathlib import Path

from omniload.base.errors import ConfigError
from omniload.base.log import get_logger

__all__ = ["held_in", "matches_of", "whole_path", "working_folder"]

_LOG = get_logger(__name__)


def whole_path(path: str | Path) -> Path:
    """Return an absolute path, which stays valid if this process changes its folder.

    Raises:
        ConfigError: As for ``working_folder``, if the path is relative.
    """
    path = Path(path)
    return path if path.is_absolute() else working_folder() / path


def working_folder() -> Path:
    """Return the current folder of this process, in which relative paths start.

    Raises:
        ConfigError: The folder was removed, as when the scratch of a job was cleaned.
    """
    try:
        return Path.cwd()
    except FileNotFoundError as error:
        try:
            was = f" ({str(Path('/proc/self/cwd').readlink()).removesuffix(' (deleted)')})"
        except OSError:
            was = ""
        raise ConfigError(
            f"the folder that this process was started in{was} is gone; start it in one that stays, or call os.chdir"
        ) from error


def matches_of(pattern: str, root: Path) -> list[str]:
    """Return the matches of a glob on this machine, as paths relative to ``root``.

    As in ``glob.glob``, ``*`` matches no name that starts with a dot, and ``**`` matches any number of folders, also
    through links. Three things differ. A folder that may not be read is an error. A link that leads back into a folder
    that contains it is not followed: its files would appear forty times, and without end behind two such links. And
    ``**`` follows links only once to each folder: for seven folders that are linked to each other, there would be
    13,699 paths.

    Raises:
        OSError: A folder cannot be read.
    """
    here = ["/" if pattern.startswith("/") else ""]
    parts = [part for part in pattern.split("/") if part not in ("", ".")]
    for number, part in enumerate(parts):
        is_last = number == len(parts) - 1
        if part == "**":
            here = _folders(here, root)
            if is_last:
                here = [
                    f"{at}{each.name}"
                    for at in here
                    for each in _inside(root / at)
                    if each.name[0] != "." and not _is_folder(each)
                ]
        elif glob.has_magic(part):
            matches = re.compile(fnmatch.translate(part)).match
            # Only matching names are examined, because where other links lead is irrelevant.
            here = [
                f"{at}{each.name}" + "/" * (not is_last)
                for at in here
                for each in _inside(root / at)
                if (each.name[0] != "." or part[0] == ".") and matches(each.name)
                if is_last or _is_folder(each)
            ]
        else:
            here = [
                f"{at}{part}" + "/" * (not is_last)
                for at in here
                if os.path.lexists(root / at / part)
            ]
    return here


def _folders(seeds: Sequence[str], root: Path) -> list[str]:
    """Return folders and the folders in them, as matched by ``**``, each with a trailing ``/``.

    Folders reached without a link come first, then those behind links, by name. Therefore the choice among the names
    of one folder does not depend on the order in which a file system lists them.
    """
    taken = dict[str, None]()
    known = set[tuple[int, int]]()
    again = list[str]()
    # Number of links after the seed, name, and the folders that contain it.
    waiting = list[tuple[int, str, frozenset[tuple[int, int]]]]()
    for seed in dict.fromkeys(seeds):
        # Nothing is in a link that leads nowhere, or to itself.
        if (root / seed).is_dir():
            above = frozenset(_itself(parent) for parent in (root / seed).resolve().parents)
            heappush(waiting, (0, seed, above))
    while waiting:
        links, folder, around = heappop(waiting)
        if folder in taken:
            continue
        with suppress(FileNotFoundError, NotADirectoryError):
            itself = _itself(root / folder)
            # Without a link there is one path to each folder: equal numbers then come from a file system without such
            # numbers.
            if links and itself in around:
                _LOG.warning(
                    "%s leads back into a folder that it lies in, and is not followed",
                    ascii(folder),
                )
                continue
            if links and itself in known:
                again.append(folder)
                continue
            known.add(itself)
            taken[folder] = None
            within = around | {itself}
            for each in _inside(root / folder):
                if each.name[0] != "." and _is_folder(each):
                    heappush(waiting, (links + each.is_symlink(), f"{folder}{each.name}/", within))
    if again:
        _LOG.warning(
            "%d links lead to folders that are read by another name already, and are not followed, such as %s",
            len(again),
            ascii(again[0]),
        )
    return list(taken)


def _itself(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino


def _inside(folder: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder; empty if it is gone."""
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        return list(entries)
    return []


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether it is a folder, or a link to one; false for a link that leads to itself or to nothing."""
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return False


def held_in(folder: str) -> tuple[list[str], list[str]]:
    """Return the files under a folder, and the links to folders in it, which are not followed, as they may be circular.

    Raises:
        OSError: A folder cannot be read; otherwise its files would be left out silently.
    """

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    held: list[str] = []
    links: list[str] = []
    for at, folders, files in os.walk(folder, onerror=refuse):
        held += [f"{at}/{name}" for name in files]
        links += [f"{at}/{name}" for name in folders if os.path.islink(f"{at}/{name}")]  # noqa: PTH114
    return held, links
