"""Comparison of an open version of a file with the version that its path shows."""

import errno
from enum import Enum, auto

from fusefs.format.attributes import Attributes
from fusefs.tree.file_attributes import set_attributes
from fusefs.tree.namespace import OpenVersion, StripedFiles
from fusefs.tree.version_identity import content_name, ids_of
from omniload.base.errors import IntegrityError, StateError

__all__ = ["Shown", "names_segments", "shown_at", "with_attributes"]


class Shown(Enum):
    """The content of a path, compared with an open version."""

    SAME = auto()
    """The same version, though perhaps with other attributes."""
    ANOTHER = auto()
    NOTHING = auto()
    """No file."""


def shown_at(files: StripedFiles, path: str, version: OpenVersion) -> Shown:
    """Compare an open version with the version that is at a path now. May wait for the store.

    The store's entry, size and time stamp, decides if no other version can have the same entry. Otherwise the
    contents of both are compared. If the open version is still there, it takes over the current attributes.

    Raises:
        UnavailableError: The store does not answer.
    """
    try:
        info = files.stat(path)
        if info.kind != "file":
            return Shown.NOTHING
        if info.entry != version.info.entry or not version.is_known:
            with files.open(path, expected=info) as now:
                if not _is_same(files, version, now):
                    return Shown.ANOTHER
                # Otherwise each later look would open it again, because its attributes or the state of its time stamp
                # changed.
                version.found_as(now.info, now.manifest)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return Shown.NOTHING
    except (IntegrityError, StateError):
        return Shown.ANOTHER  # opening that version reports its fault
    except OSError as error:
        if error.errno == errno.ESTALE:
            return Shown.ANOTHER  # replaced again and again
        raise
    else:
        return Shown.SAME


def names_segments(files: StripedFiles, path: str, segment_ids: set[str]) -> bool:
    """Return whether the version at a path now shows all of these segments.

    A mount that replaces a file removes its objects, which no manifest may name after that.
    """
    try:
        there = files.manifest(path)
    except FileNotFoundError:
        return False
    # Check all segments, because the objects of a segment that is gone are being removed.
    return there is not None and segment_ids <= ids_of(there.segments)


def with_attributes(
    files: StripedFiles, path: str, version: OpenVersion, attributes: Attributes
) -> OpenVersion | None:
    """Publish attributes for an open version at its path, and open it again; None if another version is there."""
    if shown_at(files, path, version) is not Shown.SAME:
        return None
    set_attributes(files, path, attributes)
    # Open it again, because a manifest carries the attributes: the open version has none, or another.
    now = files.open(path, brings=False)
    if (made := now.manifest) is not None:
        known = version.manifest
        # A plain file now has a manifest, with its bytes in it or in objects.
        is_it = (
            made.size_bytes == version.reader.size_bytes
            if known is None
            else content_name(made) == content_name(known)
        )
        if is_it:
            return now
    now.close()
    return None


def _is_same(files: StripedFiles, version: OpenVersion, now: OpenVersion) -> bool:
    if version.manifest is not None and now.manifest is not None:
        return content_name(version.manifest) == content_name(now.manifest)
    if version.manifest is not None or now.manifest is not None:
        return False
    size_bytes = now.reader.size_bytes
    if size_bytes != version.reader.size_bytes:
        return False
    if not files.opener.comes_whole(now.info):
        return now.info.entry == version.info.entry
    # Compare bytes in memory only: other bytes would be read from the path of ``now``, and so would always be equal.
    mine, found = (file.reader.try_read(0, size_bytes) for file in (version, now))
    return mine is not None and found is not None and mine == found
