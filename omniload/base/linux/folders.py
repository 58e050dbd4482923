"""Folders of this machine: what a glob matches, what lies in one, and links that lead to others."""

import errno
import fnmatch
import glob
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from omniload.base.log import get_logger

__all__ = ["held_in", "matches_of"]

_LOG = get_logger(__name__)


def matches_of(pattern: str, root: Path) -> list[str]:
    """Return what a glob of this machine matches, as it is written from ``root`` on.

    As ``glob.glob`` has it: ``*`` takes no name that starts with a dot, and ``**`` any number of folders, also through
    links. Other than there, a folder that may not be read is an error, and no link leads back into a folder that it
    lies in: its files would be there forty times, and behind two such links without end.

    Raises:
        OSError: A folder cannot be read.
    """
    here = ["/" if pattern.startswith("/") else ""]
    parts = [part for part in pattern.split("/") if part not in ("", ".")]
    for number, part in enumerate(parts):
        is_last = number == len(parts) - 1
        if part == "**":
            here = list(dict.fromkeys(each for at in here for each in _folders(at, root)))
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


def _folders(at: str, root: Path) -> Iterator[str]:
    """Yield a folder and those in it, as ``**`` takes them; with a ``/`` behind each."""
    waiting = list[tuple[str, frozenset[tuple[int, int]]]]()
    # Nothing lies in a link that leads nowhere, or to itself.
    if (root / at).is_dir():
        above = frozenset(_itself(parent) for parent in (root / at).resolve().parents)
        waiting.append((at, above))
    while waiting:
        folder, around = waiting.pop()
        with suppress(FileNotFoundError, NotADirectoryError):
            if (itself := _itself(root / folder)) in around:
                _LOG.warning(
                    "%s leads back into a folder that it lies in, and is not followed",
                    ascii(folder),
                )
                continue
            yield folder
            within = around | {itself}
            waiting += [
                (f"{folder}{each.name}/", within)
                for each in _inside(root / folder)
                if each.name[0] != "." and _is_folder(each)
            ]


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
