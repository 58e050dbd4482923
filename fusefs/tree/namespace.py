"""The tree of files that a store shows, and every change to it.

Blocking and safe in threads. The mount, fsspec and the command line are built on it.
"""

import errno
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from fusefs.base.serial_executor import ByteBudget
from fusefs.base.thread_pools import StorePool
from fusefs.cache.block_cache import BlockCache
from fusefs.cache.disk_cache import disk_cache_of
from fusefs.config import DiskCacheConfig, FilesConfig
from fusefs.format.attributes import Attributes, encoded
from fusefs.format.content import Content
from fusefs.format.layout import StripeLayout
from fusefs.format.manifest import Manifest
from fusefs.metrics.counters import Numbers, Traffic, retire, watch
from fusefs.read.speculation import SpeculationBudget
from fusefs.read.unit_source import ReadEngine
from fusefs.stores.protocol import (
    RESERVED,
    Preferred,
    Store,
    checked_path,
    is_at_or_below,
    parent_of,
)
from fusefs.stores.retry import RetryingStore
from fusefs.tree.catalog import Catalog, FileInfo
from fusefs.tree.directory_attributes import DirectoryAttributes, is_attributes
from fusefs.tree.object_references import ObjectReferences
from fusefs.tree.open_versions import Opener, OpenVersion, Versions
from fusefs.tree.publish import Published, Publisher
from fusefs.write.file_writer import Writers
from fusefs.write.segment_writer import WriteEngine

__all__ = ["Names", "OpenVersion", "StripedFiles"]

_LOCAL_STREAMS = 4
_LENT_READS = 6
"""Longest reads that may be speculative before it is known how files are read here."""


class StripedFiles:
    """The files of a store: striped files whole, objects and manifests hidden.

    For the process that made it: in a forked process, every call raises ``StateError``.
    """

    def __init__(self, store: Store, config: FilesConfig | None = None) -> None:
        self.store = store
        self.config = config or FilesConfig()
        self.traffic = Traffic()
        self.cache = BlockCache(self.config.cache, self.traffic)
        self.disk = disk_cache_of(self.config, self.traffic)
        """Local copies of versions; None unless they are configured."""
        self.budget = ByteBudget(self.config.write_window)
        self._readers = StorePool(self.config.read_streams, "fusefs-read")
        self.visible = partial(_visible_path, self._readers)
        """Function that returns a path which users may name, without slashes at its ends, or raises."""
        # A separate pool, so that a slow store does not delay reads of this disk.
        self._local_readers = StorePool(_LOCAL_STREAMS, "fusefs-disk")
        self._writers = StorePool(self.config.write_streams, "fusefs-write")
        self.longest_read, read_ahead = self.config.reading(store.preferred)
        self._reading = ReadEngine(
            store=store,
            pool=self._readers,
            local_pool=self._local_readers,
            cache=self.cache,
            traffic=self.traffic,
            longest_read=self.longest_read,
            read_ahead=read_ahead,
            read_block=store.preferred.read_block,
            budget=SpeculationBudget(_LENT_READS * self.longest_read),
        )
        self.writers = Writers(
            engine=WriteEngine(store, self._writers, self.budget),
            layout_of=partial(_layout_of, self.config, store.preferred, self.visible),
            plain_limit=self.config.plain_limit,
            copy_bytes=self.longest_read,
        )
        self.directories = DirectoryAttributes(store)
        self.catalog = Catalog(store, self._readers, self.directories)
        self.references = ObjectReferences(store)
        self.publisher = Publisher(store, self.catalog, self.references)
        self.names = Names(store, self.catalog, self.directories, self.references, self.visible)
        versions = Versions(self._reading, self.catalog, self.references, self.disk)
        self.opener = Opener(self.catalog, versions, most_brought=self.config.plain_limit)
        # Last, so that a scrape in another thread does not meet an incomplete object.
        watch(self)

    def use_disk_cache(self, chosen: DiskCacheConfig) -> None:
        """Keep local copies of versions opened from now on.

        This is for a process that takes a mount over: the directory is free only after the other process
        has released it.

        Raises:
            ConfigError, StateError: Same as for ``DiskDirectory``.
        """
        config = self.config.model_copy(update={"disk_cache": chosen})
        self.disk = disk_cache_of(config, self.traffic)
        self.config = config
        self.longest_read, _ = config.reading(self.store.preferred)
        self._reading = replace(self._reading, longest_read=self.longest_read)
        self.opener.versions = Versions(self._reading, self.catalog, self.references, self.disk)

    def close(self) -> None:
        """Wait for calls under way and close the store."""
        # Nobody waits for reads that have not begun, so they are cancelled; queued writes are carried out.
        self._readers.shutdown(cancel_futures=True)
        retire(self)
        # Close it before the threads that read it, which would wait until a large copy is compared.
        if self.disk is not None:
            self.disk.close()
        self._local_readers.shutdown(cancel_futures=True)
        self._writers.shutdown()
        self.store.close()

    def numbers(self) -> Numbers:
        """Return counts since the start and present levels, as statistics and scrapes show them."""
        found = self.traffic.numbers()
        if isinstance(self.store, RetryingStore):
            found.store_calls, found.retries = self.store.counts()
        abandoned = self.store.abandoned
        found.abandoned, found.hanging = abandoned.total, abandoned.now
        found.cache_bytes["memory"] = self.cache.used_bytes
        found.cache_bytes["disk"] = self.disk.used_bytes if self.disk is not None else 0
        found.window_bytes = self.budget.used_bytes
        return found

    def stat(self, path: str) -> FileInfo:
        """Describe a path; links are not followed."""
        return self.catalog.stat(self.visible(path))

    def listing(self, path: str) -> list[FileInfo]:
        """Describe every entry of a directory, sorted by name."""
        return self.catalog.listing(self.visible(path))

    def manifest(self, path: str) -> Manifest | None:
        """Return the manifest at a path; None for a plain file."""
        return self.catalog.current(self.visible(path))[1]

    def open(
        self, path: str, *, expected: FileInfo | None = None, brings: bool = True
    ) -> OpenVersion:
        """Open the version of a file that is at a path now.

        A plain file of up to ``plain_limit`` is read at once, so that its bytes are of one version.

        Args:
            path: Path of the file.
            expected: Its probable description, which saves a look if it is right.
            brings: Whether the bytes of such a plain file are wanted.

        Raises:
            IsADirectoryError: It is a directory.
            OSError: ``ESTALE``: others replace it again and again.
        """
        return self.opener.open(self.visible(path), expected=expected, brings=brings)

    def publish(
        self,
        path: str,
        content: Content,
        attributes: Attributes | None = None,
        *,
        ready: Callable[[], None] = lambda: None,
        moves_time: bool = True,
    ) -> Published:
        """Put complete content at a path, remove the version that it replaces, and return the new version.

        Args:
            path: Path of the file.
            content: Content, which is durable once ``ready`` has returned.
            attributes: Attributes of the file.
            ready: Called just before the file shows; if it raises, nothing changes.
            moves_time: Whether a new name changes the time of its directory. A mount changed it when the file was made.
        """
        path = self.visible(path)
        done = self.publisher.publish(path, content, attributes or Attributes(), ready=ready)
        if done.is_new and moves_time:
            self.directories.names_changed(parent_of(path))
        return done

    def write_file(
        self, path: str, data: bytes | memoryview, attributes: Attributes | None = None
    ) -> None:
        """Write a whole file."""
        writer = self.writers.file(path)
        try:
            writer.write(data)
            self.publish(path, writer.seal(), attributes, ready=writer.settle)
        except BaseException:
            writer.abandon()
            raise


class Names:
    """Makes, renames and removes names of one store. Blocking and safe in threads.

    Args:
        store: The store.
        catalog: Describes the entries.
        directories: Updates the times of directories when names in them change.
        references: Removes the objects of removed files.
        visible: Returns a path that users may name, or raises.
    """

    def __init__(
        self,
        store: Store,
        catalog: Catalog,
        directories: DirectoryAttributes,
        references: ObjectReferences,
        visible: Callable[[str], str],
    ) -> None:
        self._store = store
        self._catalog = catalog
        self._directories = directories
        self._references = references
        self._visible = visible

    def make_link(self, path: str, target: str) -> None:
        """Make a symbolic link."""
        path = self._visible(path)
        with suppress(FileNotFoundError):
            self._store.stat(path)
            raise FileExistsError(errno.EEXIST, "something is there", path)
        link = Manifest(kind="symlink", mtime_ns=time.time_ns(), mode=0o777, target=target)
        self._store.publish(path, encoded(link, path))
        self._catalog.invalidate(path)
        self._directories.names_changed(parent_of(path))

    def read_link(self, path: str) -> str:
        """Return the target of a symbolic link."""
        path = self._visible(path)
        manifest = self._catalog.current(path)[1]
        if manifest is None or manifest.target is None:
            raise OSError(errno.EINVAL, "not a symbolic link", path)
        return manifest.target

    def make_directory(self, path: str, mode: int | None = None) -> None:
        """Make a directory; if the store keeps modes, other users may search it as this mode allows."""
        path = self._visible(path)
        self._store.make_directory(path)
        if mode is not None and self._store.keeps_modes:
            self._store.set_mode(path, mode)
        self._directories.names_changed(parent_of(path))

    def remove_directory(self, path: str) -> None:
        """Remove an empty directory."""
        path = self._visible(path)
        if not path:
            raise OSError(errno.EBUSY, "the root stays", path)
        self._directories.as_empty(path, lambda: self._store.remove_directory(path))
        self._directories.names_changed(parent_of(path))

    def remove(self, path: str) -> None:
        """Remove a file or link, and its objects when nobody here has it open."""
        path = self._visible(path)
        # Read the manifest before the file is gone, because afterwards nobody knows which objects belonged to it.
        replaced = self._catalog.manifest_or_none(path)
        self._store.remove(path)
        self._references.release_or_defer(replaced)
        self._directories.names_changed(parent_of(path))

    def rename(self, source: str, target: str) -> None:
        """Rename a file over another, or a directory: one rename in the store, and no data is moved."""
        source, target = self._visible(source), self._visible(target)
        replaced = self._catalog.manifest_or_none(target) if source != target else None
        self._directories.before_rename(source, target)
        self._directories.as_empty(target, lambda: self._store.rename(source, target))
        if replaced is not None and replaced.segments:
            # Make the new file durable before the old objects go, or a power failure could lose both.
            self._store.sync(target)
        self._references.release_or_defer(replaced)
        if source != target:
            # Renamed entries at these paths, or below them, have kept their time stamps.
            self._catalog.forget(source)
            self._catalog.forget(target)
            for above in {parent_of(source), parent_of(target)}:
                self._directories.names_changed(above)


def _layout_of(
    config: FilesConfig, preferred: Preferred, visible: Callable[[str], str], path: str
) -> StripeLayout:
    return config.striping_of(visible(path)).layout(preferred)


def _visible_path(pool: StorePool, path: str) -> str:
    """Return a path without slashes at its ends.

    Raises:
        PermissionError: The path belongs to the store itself.
        StateError: This process was forked off the one that opened the store.
        ValueError: Same as for ``checked_path``.
    """
    # Check the process here, because every path passes here before a forked process could wait for a thread.
    pool.check_process()
    path = checked_path(path)
    if is_at_or_below(path, RESERVED):
        raise PermissionError(errno.EPERM, f"{RESERVED} belongs to the store", path)
    if is_attributes(path):
        raise PermissionError(errno.EPERM, "it holds a directory's attributes", path)
    return path
