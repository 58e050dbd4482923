"""Folders of this machine: what a glob matches, what lies in one, and links that lead to others."""

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
    """Return a path from the root on, which means the same once this process is in another folder.

    Raises:
        ConfigError: As ``working_folder``, where it is a relative one.
    """
    path = Path(path)
    return path if path.is_absolute() else working_folder() / path


def working_folder() -> Path:
    """Return the folder that this process is in, which relative paths start at.

    Raises:
        ConfigError: It was removed, as that of a job whose scratch was cleaned.
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
    """Return what a glob of this machine matches, as it is written from ``root`` on.

    As ``glob.glob`` has it: ``*`` takes no name that starts with a dot, and ``**`` any number of folders, also through
    links. Other than there, a folder that may not be read is an error; no link leads back into a folder that it lies
    in: its files would be there forty times, and behind two such links without end; and ``**`` goes through links once
    to each folder: of seven that are linked to each other there would be 13,699.

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
            # Only what matches is looked at: of a link beside it nobody asked where it leads.
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
    """Return folders and those in them, as ``**`` takes them; with a ``/`` behind each.

    What is there without a link comes first, then what is there behind one, by name: which of the names of a folder
    is taken does not depend on the order in which a file system lists it.
    """
    taken = dict[str, None]()
    known = set[tuple[int, int]]()
    again = list[str]()
    # Links behind the seed, name, and the folders that it lies in.
    waiting = list[tuple[int, str, frozenset[tuple[int, int]]]]()
    for seed in dict.fromkeys(seeds):
        # Nothing lies in a link that leads nowhere, or to itself.
        if (root / seed).is_dir():
            above = frozenset(_itself(parent) for parent in (root / seed).resolve().parents)
            heappush(waiting, (0, seed, above))
    while waiting:
        links, folder, around = heappop(waiting)
        if folder in taken:
            continue
        with suppress(FileNotFoundError, NotADirectoryError):
            itself = _itself(root / folder)
            # Without a link there is one way to each: two of one number are of a file system that numbers none.
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
    """Return what lies in a folder; nothing where it is gone."""
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        return list(entries)
    return []


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether it is a folder, or a link to one; a link that leads back to itself is none, as one to nothing."""
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return False


def held_in(folder: str) -> tuple[list[str], list[str]]:
    """Return the files under a folder, and links in it to folders, which are not followed: they may lead in a circle.

    Raises:
        OSError: A folder cannot be read; what it holds would be left out and nobody would know.
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
