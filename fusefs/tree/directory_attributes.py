"""Mode, time and extended attributes of directories, each kept in the directory itself.

A directory with attributes holds ``.omnifs-directory``, a hidden manifest of kind
``directory``. So one rename of the store moves it along with its directory, and
no store needs to know attributes.

A directory without attributes costs no request. ``.omnifs/directories`` holds a marker for the
first two digits of the xxh3-64 of the *name* of every directory that may have attributes. A
marker outlives renames above it, is never removed, and there are at most 256. So one short
listing a second shows which directories need a look. (A directory without attributes whose
name shares its digits with a marked one costs a look that finds nothing.)
"""

import errno
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import orjson
import xxhash

from fusefs.format.attributes import Attributes, encoded
from fusefs.format.manifest import Manifest, decode_manifest
from fusefs.format.manifest_header import HEADER_BYTES
from fusefs.stores.protocol import RESERVED, Entry, Store, name_of
from omniload.base.errors import IntegrityError, OmniloadError, StateError, UnavailableError
from omniload.base.log import get_logger
from omniload.base.lru import Lru

__all__ = [
    "ATTRIBUTES_NAME",
    "MARKERS",
    "NOT_KEPT",
    "DirectoryAttributes",
    "attributes_path",
    "is_attributes",
    "mark",
    "marker_of",
    "read_attributes",
]

_LOG = get_logger(__name__)
ATTRIBUTES_NAME = ".omnifs-directory"
"""Name of the hidden manifest in a directory, which is refused in paths."""
MARKERS = f"{RESERVED}/directories"
NOT_KEPT = -(2**63)
"""Value of ``mtime_ns`` for a directory that has the time of the store."""
_SIZE_BYTES = HEADER_BYTES + 1365
"""Size of every such manifest, because it has no body."""
_KEPT_S = 1.0
"""Seconds that markers are kept, as long as a mount keeps attributes: changes of another mount show after that."""
_MOST_KNOWN = 100_000
_PLAIN_MODE = 0o755


def attributes_path(path: str) -> str:
    """Return the path of the attributes of a directory."""
    return f"{path}/{ATTRIBUTES_NAME}" if path else ATTRIBUTES_NAME


def is_attributes(path: str) -> bool:
    """Return whether a path of the store holds the attributes of the directory above it."""
    return name_of(path) == ATTRIBUTES_NAME


def marker_of(path: str) -> str:
    """Return the path of the marker for directories of this name."""
    return f"{MARKERS}/{_digits(path)}"


def mark(store: Store, path: str) -> None:
    """Add the marker by which all mounts look for attributes of directories of this name."""
    store.publish(marker_of(path), orjson.dumps({"version": 1}))


def read_attributes(store: Store, path: str) -> Manifest | None:
    """Read the attributes that are kept for a directory; None if there are none.

    Raises:
        IntegrityError: They are cut short or altered, or something else is at their path.
        StateError: Another version wrote them.
    """
    where = attributes_path(path)
    try:
        # check first, as libhdfs prints a page of Java's stack for a missing file
        store.stat(where)
        found = decode_manifest(store.read(where, 0, _SIZE_BYTES), name=where)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if found.kind != "directory":
        raise IntegrityError(f"{where!r} is the manifest of a {found.kind}; remove it")
    return found


def _digits(path: str) -> str:
    return xxhash.xxh3_64_hexdigest(name_of(path).encode("utf-8", "surrogateescape"))[:2]


class DirectoryAttributes:
    """Attributes of the directories of one store. Blocking and safe in threads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._markers = _Markers(store)
        self._lock = threading.Lock()
        self._known: Lru[str, tuple[float, Manifest | None]] = Lru(_MOST_KNOWN)
        self._num_changes = 0
        """Number of changes, so that attributes read before a change are not remembered after it."""

    def of(self, path: str) -> Manifest | None:
        """Return the attributes that are kept for a directory; None if there are none, which costs no request.

        Attributes that cannot be read are logged and count as none, because they must not hide
        the files in the directory.
        """
        if not self._markers.cover(path):
            return None
        with self._lock:
            known = self._known.peek(path)
            if known is not None and known[0] > time.monotonic():
                return known[1]
            before = self._num_changes
        # Read without the lock, because a slow store must not delay requests for other folders.
        found = _readable(self._store, path)
        with self._lock:
            if self._num_changes == before:
                self._known.put(path, (time.monotonic() + _KEPT_S, found))
        return found

    def set(self, path: str, changes: Attributes, entry: Entry) -> None:
        """Set those attributes of a directory that are not None.

        Args:
            path: The directory.
            changes: ``mtime_ns`` may be ``NOT_KEPT``.
            entry: The store's entry of the directory: attributes that are not set yet stay as it shows them.

        Raises:
            OSError: ``ENOSPC``: they do not fit a header.
        """
        kept = _readable(self._store, path) if self._markers.cover(path) else None
        if kept is None:
            mode = entry.mode if entry.mode is not None else _PLAIN_MODE
            # Keep the time that the store shows now, because to set a mode must not change the time.
            kept = Manifest(kind="directory", mtime_ns=entry.mtime_ns or NOT_KEPT, mode=mode)
        if changes.mode is not None and self._store.keeps_modes:
            self._store.set_mode(path, changes.mode)
        self._put(path, replace(kept, **changes.given))

    def names_changed(self, path: str) -> None:
        """Update the time of a directory: a name in it was made, removed or renamed."""
        try:
            kept = self.of(path)
            if kept is None or kept.mtime_ns == NOT_KEPT:
                return
            # Read again: another mount may have removed the directory, which a publish would bring back.
            kept = _readable(self._store, path)
            if kept is not None and kept.mtime_ns != NOT_KEPT:
                self._put(path, replace(kept, mtime_ns=NOT_KEPT))
        except (OSError, OmniloadError) as error:
            # The change itself succeeded, and must not fail only because of a time.
            _LOG.warning("the time of directory %r stays what it was: %s", path, error)

    def before_rename(self, source: str, target: str) -> None:
        """Add the marker of a new name that a directory with attributes is about to get."""
        # Before the rename, or another mount could show the folder without its attributes for a moment.
        if _digits(source) != _digits(target) and self.of(source) is not None:
            self._markers.add(target)

    def forget(self, path: str) -> None:
        """Forget the attributes of a directory, and of all directories below it, so that they are read again."""
        below = f"{path}/" if path else ""
        with self._lock:
            self._num_changes += 1
            self._known.pop_where(lambda known: known == path or known.startswith(below))

    def as_empty(self, path: str, call: Callable[[], None]) -> None:
        """Run a call that needs an empty directory, also if the directory holds nothing but its attributes."""
        try:
            call()
        except OSError as error:
            # Look only after the store refuses, because most removed folders are empty.
            if error.errno != errno.ENOTEMPTY or not _holds_attributes_alone(self._store, path):
                raise
            self._call_without(path, call)

    def _call_without(self, path: str, call: Callable[[], None]) -> None:
        kept = _readable(self._store, path)
        with suppress(FileNotFoundError):  # another mount may remove it, too
            self._store.remove(attributes_path(path))
        self.forget(path)
        try:
            call()
        except OSError as error:
            if error.errno == errno.ENOTEMPTY and kept is not None:
                self._put(path, kept)  # another mount made a file there, so the directory stays
            raise

    def _put(self, path: str, manifest: Manifest) -> None:
        data = encoded(manifest, path)
        # Add the marker first, because nobody looks for attributes without a marker.
        self._markers.add(path)
        self._store.publish(attributes_path(path), data)
        with self._lock:
            self._num_changes += 1
            self._known.pop(path)


class _Markers:
    """Names of directories that may have attributes, listed from the store once a second. Safe in threads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._asking = threading.Lock()
        """Lock of the one thread that lists the markers; the others wait for its answer."""
        self._marked: frozenset[str] = frozenset()
        self._marked_until = 0.0
        self._unanswered: tuple[float, str] | None = None
        """Time and error of the store's last failure to list the markers."""

    def cover(self, path: str) -> bool:
        """Return whether directories of this name may have attributes.

        Raises:
            UnavailableError: The store does not answer.
        """
        return _digits(path) in self._current()

    def add(self, path: str) -> None:
        """Add the marker by which all mounts look for attributes of directories of this name."""
        if self.cover(path):
            return
        mark(self._store, path)
        with self._asking:
            # Add it here at once, because the next listing of markers may be a second away.
            self._marked |= {_digits(path)}

    def _current(self) -> frozenset[str]:
        since = time.monotonic()
        with self._asking:
            if time.monotonic() < self._marked_until:
                return self._marked
            if self._unanswered is not None and self._unanswered[0] >= since:
                # The store failed while this thread waited; another attempt of each thread would take as long.
                raise UnavailableError(self._unanswered[1])
            try:
                found = frozenset(entry.name for entry in self._store.listing(MARKERS))
            except (FileNotFoundError, NotADirectoryError):
                found = frozenset()
            except UnavailableError as error:
                self._unanswered = time.monotonic(), str(error)
                raise
            # Keep the markers added here, because a store may list them late.
            self._marked |= found
            self._marked_until = time.monotonic() + _KEPT_S
            return self._marked


def _readable(store: Store, path: str) -> Manifest | None:
    """Return the attributes kept for a directory; None if there are none, or if they are unreadable (logged)."""
    try:
        return read_attributes(store, path)
    except (IntegrityError, StateError) as error:
        _LOG.warning("%s; the directory is shown without", error)
        return None


def _holds_attributes_alone(store: Store, path: str) -> bool:
    return [entry.name for entry in store.listing(path)] == [ATTRIBUTES_NAME]
