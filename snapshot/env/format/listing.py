"""What a tree holds, folder by folder: all that a restore by links or copies has to know.

The manifest says the same path by path, with digests and places in packs; reading it takes
longer than linking the files. A listing lies beside the tree as JSON::

    {"version": 1, "manifest": SHA-256 of its file, "deleted": [[target, path], ...],
     "folders": [[target, path, mode, mtime_ns, names, sizes, times, modes], ...]}

Names, sizes, times and modes of a folder stand in the same order. The mode of a symbolic
link is 0: a file that nobody may read has its place in the file type bits, which all others keep.
"""

import json
import os
import stat
from collections.abc import Iterable
from typing import NamedTuple

from omniload.base.errors import StateError
from snapshot.env.format.entries import Entry, Kind, Place

__all__ = [
    "VERSION",
    "Folder",
    "Listing",
    "changed_in",
    "decode_listing",
    "encode_listing",
    "listing_of",
]

VERSION = 1


class Folder(NamedTuple):
    """One directory of a tree and the files and links in it."""

    target: int
    path: str
    """Relative to the target; empty for the target itself."""
    mode: int
    mtime_ns: int
    names: list[str]
    """Of files and links, sorted."""
    sizes: list[int]
    times: list[int]
    """Nanoseconds since 1970."""
    modes: list[int]
    """Type and permission bits of a file; 0 for a link, which has no mode of its own."""


class Listing(NamedTuple):
    """All folders of a tree, each after the one above it, and what the snapshot deletes."""

    folders: list[Folder]
    deleted: list[Place]
    manifest: str = ""
    """SHA-256 of the manifest it was made from, as it lies beside the tree."""


def listing_of(entries: Iterable[Entry], manifest: str = "") -> Listing:
    """Return the listing of entries that have been checked and stand in order."""
    folders: dict[Place, Folder] = {}
    deleted = list[Place]()
    for entry in entries:
        if entry.kind is Kind.DIRECTORY:
            folders[entry.target, entry.path] = Folder(
                entry.target, entry.path, entry.mode, entry.mtime_ns, [], [], [], []
            )
        elif entry.kind is Kind.DELETED:
            deleted.append((entry.target, entry.path))
        else:
            above, _, name = entry.path.rpartition("/")
            # Entries stand in order, so the folder above has been met.
            folder = folders[entry.target, above]
            folder.names.append(name)
            folder.sizes.append(entry.size_bytes)
            folder.times.append(entry.mtime_ns)
            # A file of mode 000 would else look like a link.
            folder.modes.append(stat.S_IFREG | entry.mode if entry.kind is Kind.FILE else 0)
    return Listing(list(folders.values()), deleted, manifest)


def encode_listing(listing: Listing) -> str:
    """Return the text of a listing; names of any bytes survive it."""
    return json.dumps({"version": VERSION, **listing._asdict()}, separators=(",", ":"))


def decode_listing(text: str | bytes) -> Listing:
    """Read a listing.

    Raises:
        StateError: It is damaged, or of another version.
    """
    try:
        fields = json.loads(text)
        if fields["version"] != VERSION:
            raise StateError(
                f"listing has version {fields['version']!r}, this code reads {VERSION}"
            )
        folders = [Folder._make(folder) for folder in fields["folders"]]
        deleted = [(number, path) for number, path in fields["deleted"]]
        return Listing(folders, deleted, fields["manifest"])
    except (ValueError, KeyError, TypeError) as error:
        raise StateError(
            f"listing of a tree is damaged: {error!r}; fetch the tree again"
        ) from error


def changed_in(root: str, folder: Folder) -> list[str]:
    """Return the paths of a folder below ``root`` whose kind, size, mode or time is not what it was when written.

    The kernel walks to the folder once and is asked for each file by its name alone, a third
    of the cost of asking by whole paths.
    """
    above = f"{folder.path}/" if folder.path else ""
    try:
        # Not through a link: what it leads to is not the folder that was written.
        flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(f"{root}/{folder.path}", flags)
    except (FileNotFoundError, NotADirectoryError):
        return [folder.path, *(f"{above}{name}" for name in folder.names)]
    try:
        found = [] if stat.S_IMODE(os.fstat(file).st_mode) == folder.mode else [folder.path]
        for name, size, time, mode in zip(*folder[4:], strict=True):
            try:
                seen = os.stat(name, dir_fd=file, follow_symlinks=False)
            except FileNotFoundError:
                found.append(f"{above}{name}")
                continue
            same = seen.st_mtime_ns == time
            if mode:
                same = same and seen.st_size == size and seen.st_mode == mode
            elif not stat.S_ISLNK(seen.st_mode):
                same = False
            if not same:
                found.append(f"{above}{name}")
    finally:
        os.close(file)
    return found
