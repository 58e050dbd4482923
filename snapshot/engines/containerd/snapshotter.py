"""A snapshotter of containerd: layers that are read lazily from their registry, and plain folders for all others.

::

    ROOT/state.sqlite             store
    ROOT/snapshots/NUMBER/fs,work files of a snapshot, if it has its own
    ROOT/views/NUMBER             lazy layers up to that snapshot, merged; views
    ROOT/views.log                log of their processes
    ROOT/lock                     held by the one process that serves ROOT

A folder is made before its row is kept, and removed after the row is deleted. So a row
always has its folder, and a folder without a row is left from a crash: the next start
removes it.
"""

import os
import stat as stat_bits
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from omniload.base.errors import ConfigError, OmniloadError, StateError, UnavailableError
from omniload.base.linux.file_lock import FileLock
from omniload.base.log import get_logger
from omniload.base.units import decimal_of
from snapshot.engines.containerd.chain import (
    LayerWanted,
    MountEntry,
    layer_wanted,
    mounts_of,
    split_chain,
)
from snapshot.engines.containerd.images import RegistryImages
from snapshot.engines.containerd.records import (
    Kind,
    Snapshot,
    SnapshotExistsError,
    SnapshotInUseError,
    SnapshotMissingError,
    Snapshots,
    parse_filters,
)
from snapshot.engines.containerd.store import SnapshotStore, take_away, usage_of
from snapshot.engines.containerd.views import MountedViews

__all__ = ["Snapshotter"]

_log = get_logger(__name__)
_FORBIDDEN = set(":,\\\n")
"""Characters that separate the options of an overlay."""


class Snapshotter:
    """Carries containerd's requests to ``Snapshots``, and the results to disk and mounts. Safe in threads.

    Everything is in ``root``, on a disk that may hold the upper folders of an overlay. Calls raise the errors of
    ``Snapshots`` and those that they name themselves.

    Raises:
        ConfigError: The folder's name cannot be an option of an overlay.
        StateError: Another process serves it, or it was written by another version.
    """

    def __init__(
        self,
        root: Path,
        images: RegistryImages,
        views: MountedViews,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        if set(str(root)) & _FORBIDDEN:
            raise ConfigError(f"folder {str(root)!r} has a colon, comma or backslash; take another")
        self._folder = root / "snapshots"
        self._folder.mkdir(parents=True, exist_ok=True)
        root.chmod(0o700)  # images hold set-uid programs, which users of the machine must not reach
        self._images, self._views, self._now_ns = images, views, now_ns
        self._lock = threading.Lock()
        # Lock first: a folder that another process is making has no row yet, and would be removed.
        try:
            self._held = FileLock(root / "lock")
        except BlockingIOError as error:
            raise StateError(f"{root} is served by {error.strerror}; end that first") from error
        try:
            self._store = SnapshotStore(root / "state.sqlite")
            self._all = Snapshots.of(self._store.snapshots())
            self.cleanup()
            self._skip_numbers()
        except BaseException:
            self._held.close()
            raise

    def restore(self) -> None:
        """Show the layers that containers use again, after a crash or a restart of the machine; log those that fail."""
        with self._lock:
            # No container runs on a committed snapshot itself: it is shown when another is prepared on it.
            in_use = [s for s in self._all.by_key.values() if s.kind != "committed"]
            chains = [self._all.parents(snapshot) for snapshot in in_use]
        for lazy in {found.number: found for c in chains if (found := split_chain(c)[1])}.values():
            try:
                self._show(lazy)
            except (OmniloadError, OSError) as error:
                _log.warning(
                    "%s is not shown again: %s; it is tried when it is used", lazy.key, error
                )

    def prepare(
        self, key: str, parent: str, labels: Mapping[str, str], kind: Kind = "active"
    ) -> tuple[MountEntry, ...]:
        """Make a snapshot for writes on top of a parent, or a view of it; return its mounts.

        Raises:
            SnapshotExistsError: The key is taken; or the labels name a layer that is lazily here now.
            UnavailableError: The parent's layers cannot be shown.
        """
        wanted = layer_wanted(labels) if kind == "active" else None
        if wanted is not None and self._have_lazily(wanted, parent, labels):
            raise SnapshotExistsError(f"layer {wanted.target} is read lazily; nothing to unpack")
        with self._lock:
            below = (self._all.get(parent),) if parent else ()
            chain = (*below, *(self._all.parents(below[0]) if below else ()))
        # Mount first, so that a failure leaves nothing, and the lock is not held while a registry is asked.
        lazy = split_chain(chain)[1]
        if lazy is not None:
            self._show(lazy)
        top = self._top_of(chain)
        with self._changing():
            found = self._all.add(key, parent, labels, kind=kind, now_ns=self._now_ns())
            folder = Path(self._path(found.number))
            try:
                _make_folder(folder, found, top)
                self._store.keep(found)
            except BaseException:
                take_away(folder)
                raise
        with self._lock:
            is_same = self._all.parents(found) == chain
        # A snapshot of the same name with another chain: it was removed and made again meanwhile.
        return (
            mounts_of(found, chain, self._path, self._views.path) if is_same else self.mounts(key)
        )

    def mounts(self, key: str) -> tuple[MountEntry, ...]:
        """Return the mounts of a snapshot that is not committed.

        Raises:
            SnapshotInUseError: It is committed.
            UnavailableError: Its layers cannot be shown.
        """
        with self._lock:
            found = self._all.get(key)
            chain = self._all.parents(found)
        if found.kind == "committed":
            raise SnapshotInUseError(f"snapshot {key!r} is committed; prepare one on it")
        lazy = split_chain(chain)[1]
        if lazy is not None:
            self._show(lazy)
        return mounts_of(found, chain, self._path, self._views.path)

    def commit(self, name: str, key: str, labels: Mapping[str, str]) -> None:
        """Make a layer of the written files."""
        with self._lock:
            number = self._all.get(key).number
        # Without the lock, because a container may have written a million files.
        usage = usage_of(Path(self._path(number)) / "fs")
        with self._changing():
            self._store.keep(self._all.commit(key, name, labels, usage, self._now_ns()))

    def remove(self, key: str) -> None:
        """Remove a snapshot."""
        with self._changing():
            found = self._all.remove(key)
            self._store.forget(found)
            # The removal may take long, so it runs without the lock, under a name that belongs to no snapshot.
            gone = self._folder / f"gone-{found.number}"
            # containerd no longer knows the snapshot; the next cleanup takes the rest.
            with suppress(OSError):
                Path(self._path(found.number)).rename(gone)
        take_away(gone)
        if found.is_lazy:
            self._drop(found.number)

    def stat(self, key: str) -> Snapshot:
        """Return a snapshot."""
        with self._lock:
            return self._all.get(key)

    def update(self, key: str, labels: Mapping[str, str], paths: Sequence[str]) -> Snapshot:
        """Change labels: all of them, or those that ``paths`` names as ``labels.NAME``."""
        with self._changing():
            found = self._all.relabel(key, labels, paths, self._now_ns())
            self._store.keep(found)
        return found

    def listing(self, filters: Sequence[str] = ()) -> tuple[Snapshot, ...]:
        """Return the snapshots that match any of the filters, by number."""
        asked = parse_filters(filters)
        with self._lock:
            found = [snapshot for snapshot in self._all.by_key.values() if asked(snapshot)]
        return tuple(sorted(found, key=lambda snapshot: snapshot.number))

    def usage(self, key: str) -> tuple[int, int]:
        """Return bytes and inodes of a snapshot's own files; those of a lazy layer are in the cache of blocks."""
        found = self.stat(key)
        if found.kind == "committed":
            return found.size_bytes, found.inodes
        return usage_of(Path(self._path(found.number)) / "fs")

    def cleanup(self) -> None:
        """Remove the remains of removed snapshots."""
        # The lock is needed only for the list: no number comes back, so nobody need wait for the removal.
        with self._lock:
            known = self._all.by_key.values()
            numbers = {str(snapshot.number) for snapshot in known}
            folders = [path for path in self._folder.iterdir() if path.name not in numbers]
            views = self._views.numbers() - {s.number for s in known if s.is_lazy}
        for path in folders:
            take_away(path)
        for number in views:
            self._drop(number)

    def close(self) -> None:
        """Close the state; mounts stay, because containers may be running on them."""
        with self._lock:
            self._store.close()
            self._held.close()

    def _have_lazily(self, wanted: LayerWanted, parent: str, labels: Mapping[str, str]) -> bool:
        """Make a committed snapshot of a layer without its bytes, if possible; return whether it exists."""
        with self._lock:
            here = self._all.by_key.get(wanted.target)
            below = self._all.by_key.get(parent)
        if here is not None:
            return here.is_lazy and here.parent == parent
        # One view shows a chain from its bottom, so no lazy layer can be on top of a folder.
        if parent and (below is None or not below.is_lazy):
            return False
        try:
            image, layers = self._images.find(wanted, below.layers if below else 0)
            with self._changing():
                found = self._all.add(
                    wanted.target,
                    parent,
                    labels,
                    kind="committed",
                    now_ns=self._now_ns(),
                    image=image.digest,
                    layers=layers,
                )
                self._store.keep(found, image)
        except SnapshotExistsError:
            return True  # another client did it meanwhile
        # For example, a missing blob, a full disk, or a malformed document.
        except (OmniloadError, OSError, ValueError) as error:
            _log.warning("layer %s is unpacked, not read lazily: %s", wanted.layer, error)
            return False
        return True

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the lock for a change inside the block; a change that cannot be kept is undone before anyone sees it."""
        with self._lock:
            before = dict(self._all.by_key)
            try:
                yield
            except BaseException:
                # Its number stays used: otherwise the next snapshot would get a folder that could not be removed.
                self._all.by_key = before
                raise

    def _top_of(self, chain: Sequence[Snapshot]) -> os.stat_result | None:
        """Return the status of the root of a chain; call it without the lock, because a view may take its time.

        Raises:
            UnavailableError: The process of a view has just died.
        """
        if not chain:
            return None
        number = chain[0].number
        path = self._views.path(number) if chain[0].is_lazy else f"{self._path(number)}/fs"
        try:
            return os.stat(path)  # noqa: PTH116
        except FileNotFoundError:
            return None  # removed meanwhile, which the caller will soon find out
        except OSError as error:
            raise UnavailableError(f"{path} cannot be looked at: {error}; try again") from error

    def _show(self, lazy: Snapshot) -> None:
        """Show lazy layers."""
        with self._lock:
            image = self._store.image(lazy.image)
        self._views.show(lazy.number, image, lazy.layers)
        # The snapshot was removed while its layers were being mounted: nobody else would ever remove that mount.
        with self._lock:
            now = self._all.by_key.get(lazy.key)
        if now is None or now.number != lazy.number:
            self._drop(lazy.number)
            raise SnapshotMissingError(f"snapshot {lazy.key!r} was removed; pull its image again")

    def _drop(self, number: int) -> None:
        try:
            self._views.drop(number)
        except (OmniloadError, OSError) as error:
            _log.warning("view %d stays: %s; it is tried again at the next cleanup", number, error)

    def _skip_numbers(self) -> None:
        """Begin above all numbers whose folders could not be removed."""
        # Otherwise a remaining view would be taken for that of a new snapshot with its number.
        names = [path.name.removeprefix("gone-") for path in self._folder.iterdir()]
        left = [number for number in map(decimal_of, names) if number is not None]
        self._all.next_number = max(self._all.next_number - 1, *left, *self._views.numbers(), 0) + 1

    def _path(self, number: int) -> str:
        return str(self._folder / str(number))


def _make_folder(folder: Path, snapshot: Snapshot, like: os.stat_result | None) -> None:
    """Make the folder of a snapshot; its root has owner and mode of the folder that it covers."""
    folder.mkdir(mode=0o711)
    top = folder / "fs"
    top.mkdir(mode=0o755)
    if snapshot.kind == "active":
        (folder / "work").mkdir(mode=0o711)
    if like is not None:
        os.chown(top, like.st_uid, like.st_gid)
        top.chmod(stat_bits.S_IMODE(like.st_mode))
