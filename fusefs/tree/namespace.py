"""The tree of files a store shows: what is at a path, and every change of it.

Blocking and safe in threads. The mount, fsspec and the command line all stand on it.
"""

import errno
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from fusefs.base.serial_executor import ByteBudget
from fusefs.base.thread_pools import StorePool
from fusefs.cache.block_cache import BlockCache
from fusefs.cache.disk_cache import disk_cache_of
from fusefs.config import DiskCacheConfig, FilesConfig
from fusefs.format.attributes import Attributes, encoded
from fusefs.format.content import Content
from fusefs.format.file_segments import file_segments_of
from fusefs.format.layout import StripeLayout
from fusefs.format.manifest import Manifest
from fusefs.metrics.counters import Numbers, Traffic
from fusefs.metrics.prometheus import retire, watch
from fusefs.read.file_reader import FileReader
from fusefs.read.speculation import SpeculationBudget
from fusefs.read.unit_source import ReadEngine
from fusefs.stores.protocol import RESERVED, Store, Usage, checked_path, is_at_or_below, parent_of
from fusefs.stores.retry import RetryingStore
from fusefs.tree.catalog import Catalog, FileInfo
from fusefs.tree.directory_attributes import DirectoryAttributes, is_attributes
from fusefs.tree.object_references import ObjectReferences
from fusefs.tree.open_versions import MOST_VERSIONS, Opener, OpenVersion
from fusefs.tree.publish import Published, Publisher
from fusefs.tree.walk import files_below
from fusefs.write.file_writer import Writers
from fusefs.write.segment_writer import WriteEngine

__all__ = ["OpenVersion", "StripedFiles"]

_LOCAL_STREAMS = 4
_LENT_READS = 6
"""So many longest reads may be speculative before anything is known of how files are read here."""


class StripedFiles:
    """Files of a store, striped ones whole, objects and manifests out of sight.

    Used by the process that made it: in one that is forked off, every call raises ``StateError``.
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
            layout_of=self._layout_of,
            plain_limit=self.config.plain_limit,
            copy_bytes=self.longest_read,
        )
        self.directories = DirectoryAttributes(store)
        self._catalog = Catalog(store, self._readers, self.directories)
        self._references = ObjectReferences(store)
        self._publisher = Publisher(store, self._catalog, self._references)
        self._opener = self._opener_now()
        watch(self)

    def use_disk_cache(self, chosen: DiskCacheConfig) -> None:
        """Keep local copies of versions opened from now on.

        For a process that takes a mount over: the directory is free only when the other one
        has let it go.

        Raises:
            ConfigError, StateError: As ``DiskDirectory``.
        """
        config = self.config.model_copy(update={"disk_cache": chosen})
        self.disk = disk_cache_of(config, self.traffic)
        self.config = config
        self.longest_read, _ = config.reading(self.store.preferred)
        self._reading = replace(self._reading, longest_read=self.longest_read)
        self._opener = self._opener_now()

    def close(self) -> None:
        """Wait for what is under way and let the store go."""
        self._readers.shutdown(cancel_futures=True)
        retire(self)
        # Before the threads that read it: comparing a large copy would be waited for.
        if self.disk is not None:
            self.disk.close()
        self._local_readers.shutdown(cancel_futures=True)
        self._writers.shutdown()
        self.store.close()

    def numbers(self) -> Numbers:
        """Return counts since the start and levels of now, as statistics and scrapes show them."""
        found = self.traffic.numbers()
        if isinstance(self.store, RetryingStore):
            found.store_calls, found.retries = self.store.counts()
        abandoned = self.store.abandoned
        found.abandoned, found.hanging = abandoned.total, abandoned.now
        found.cache_bytes["memory"] = self.cache.used_bytes
        found.cache_bytes["disk"] = self.disk.used_bytes if self.disk is not None else 0
        found.window_bytes = self.budget.used_bytes
        return found

    def forget(self, path: str) -> tuple[int, int]:
        """Forget what is cached of a file, or of all files below a directory: attributes, blocks, local copies.

        For a plain file that was changed without its size or time stamp telling, or to make
        room by hand. Open versions stay readable.

        Returns:
            Bytes that were dropped from memory and from the disk.
        """
        path = self._visible(path)
        self._catalog.forget(path)
        memory = disk = 0
        for file_path, _ in files_below(self, path):
            with self.open(file_path, brings=False) as file:
                dropped = self._opener.drop(file)
            memory, disk = memory + dropped[0], disk + dropped[1]
        return memory, disk

    def stat(self, path: str) -> FileInfo:
        """Describe a path; links are not followed."""
        return self._catalog.stat(self._visible(path))

    def listing(self, path: str) -> list[FileInfo]:
        """Describe everything directly in a directory, sorted by name."""
        return self._catalog.listing(self._visible(path))

    def xattrs(self, path: str) -> dict[str, bytes]:
        """Return the extended attributes of a file or directory."""
        path = self._visible(path)
        info, manifest = self._catalog.current(path)
        kept = self.directories.of(path) if info.kind == "directory" else manifest
        return dict(kept.xattrs) if kept is not None else {}

    def manifest(self, path: str) -> Manifest | None:
        """Return the manifest at a path; None for a plain file."""
        return self._catalog.current(self._visible(path))[1]

    def read_link(self, path: str) -> str:
        """Return the target of a symbolic link."""
        manifest = self.manifest(path)
        if manifest is None or manifest.target is None:
            raise OSError(errno.EINVAL, "not a symbolic link", path)
        return manifest.target

    def usage(self) -> Usage | None:
        """Return the space of the store where it is known."""
        return self.store.usage()

    # Content

    def open(
        self, path: str, *, expected: FileInfo | None = None, brings: bool = True
    ) -> OpenVersion:
        """Open the version of a file that is at a path now.

        A plain file of up to ``plain_limit`` comes with its bytes, so that they are of one version.

        Args:
            path: Where.
            expected: What it likely is: saves a look where it is.
            brings: Whether such bytes are wanted.

        Raises:
            IsADirectoryError: It is a directory.
            OSError: ``ESTALE`` where others replace it again and again.
        """
        return self._opener.open(self._visible(path), expected=expected, brings=brings)

    def open_published(self, path: str, content: Content, published: Published) -> OpenVersion:
        """Open what was just published here, though another mount may have replaced it since."""
        return self._opener.open_published(path, content, published)

    def comes_whole(self, info: FileInfo) -> bool:
        """Return whether a file is opened with its bytes."""
        return self._opener.comes_whole(info)

    def publish(
        self,
        path: str,
        content: Content,
        attributes: Attributes | None = None,
        *,
        ready: Callable[[], None] = lambda: None,
        moves_time: bool = True,
    ) -> Published:
        """Put content at a path, whole, remove what it replaces, and return what is there.

        Args:
            path: Where.
            content: What; durable once ``ready`` has returned.
            attributes: Beside it.
            ready: Called just before the file shows; if it raises, nothing changes.
            moves_time: Whether a new name moves the time of its directory. A mount has done so at its creation.
        """
        path = self._visible(path)
        done = self._publisher.publish(path, content, attributes or Attributes(), ready=ready)
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

    def reader_of(self, content: Content) -> FileReader:
        """Return a reader of content that is durable and may not be published."""
        segments = () if isinstance(content, bytes) else content
        inline = content if isinstance(content, bytes) else b""
        manifest = Manifest(mtime_ns=0, segments=segments, inline=inline)
        return FileReader(self._reading, file_segments_of(manifest))

    def discard(self, content: Content, *, kept: Manifest | None = None) -> None:
        """Remove objects of content that was never published, but for those ``kept`` names."""
        if not isinstance(content, bytes):
            named = {s.segment_id for s in kept.segments} if kept is not None else set()
            # Nothing is said of those: they may have been condemned with the version they belong to.
            loose = tuple(s for s in content if s.segment_id not in named)
            self._references.release_or_defer(Manifest(mtime_ns=0, segments=loose))

    # Names and attributes

    def set_attributes(self, path: str, attributes: Attributes) -> None:
        """Change what is not None of the attributes of a path; a plain file gets a manifest.

        Raises:
            OSError: ``ENOSPC`` where they do not fit a header; ``EBUSY`` where others replace the
                file again and again.
        """
        path = self._visible(path)
        for _ in range(MOST_VERSIONS):
            if self._set_on_this_version(path, attributes):
                return
        raise OSError(errno.EBUSY, f"replaced {MOST_VERSIONS} times meanwhile; try again", path)

    def make_link(self, path: str, target: str) -> None:
        """Make a symbolic link."""
        path = self._visible(path)
        with suppress(FileNotFoundError):
            self.store.stat(path)
            raise FileExistsError(errno.EEXIST, "something is there", path)
        link = Manifest(kind="symlink", mtime_ns=time.time_ns(), mode=0o777, target=target)
        self.store.publish(path, encoded(link, path))
        self._catalog.invalidate(path)
        self.directories.names_changed(parent_of(path))

    def make_directory(self, path: str, mode: int | None = None) -> None:
        """Make a directory; where the store keeps modes, others may search it as this one says."""
        path = self._visible(path)
        self.store.make_directory(path)
        if mode is not None and self.store.keeps_modes:
            self.store.set_mode(path, mode)
        self.directories.names_changed(parent_of(path))

    def remove(self, path: str) -> None:
        """Remove a file or link, and its objects when nobody here has it open."""
        path = self._visible(path)
        replaced = self._catalog.manifest_or_none(path)
        self.store.remove(path)
        self._references.release_or_defer(replaced)
        self.directories.names_changed(parent_of(path))

    def remove_directory(self, path: str) -> None:
        """Remove an empty directory."""
        path = self._visible(path)
        if not path:
            raise OSError(errno.EBUSY, "the root stays", path)
        self.directories.as_empty(path, lambda: self.store.remove_directory(path))
        self.directories.names_changed(parent_of(path))

    def rename(self, source: str, target: str) -> None:
        """Rename a file over another, or a directory: one rename in the store, no data moves."""
        source, target = self._visible(source), self._visible(target)
        replaced = self._catalog.manifest_or_none(target) if source != target else None
        self.directories.before_rename(source, target)
        self.directories.as_empty(target, lambda: self.store.rename(source, target))
        if replaced is not None and replaced.segments:
            self.store.sync(target)
        self._references.release_or_defer(replaced)
        if source != target:
            # What came to these paths, or below them, has kept its time stamps.
            self._catalog.forget(source)
            self._catalog.forget(target)
            for above in {parent_of(source), parent_of(target)}:
                self.directories.names_changed(above)

    # Inside

    def _layout_of(self, path: str) -> StripeLayout:
        return self.config.striping_of(self._visible(path)).layout(self.store.preferred)

    def _visible(self, path: str) -> str:
        self._readers.check_process()
        path = checked_path(path)
        if is_at_or_below(path, RESERVED):
            raise PermissionError(errno.EPERM, f"{RESERVED} belongs to the store", path)
        if is_attributes(path):
            raise PermissionError(errno.EPERM, "it holds a directory's attributes", path)
        return path

    def _opener_now(self) -> Opener:
        limit = self.config.plain_limit
        return Opener(self._reading, self._catalog, self._references, self.disk, most_brought=limit)

    def _set_on_this_version(self, path: str, attributes: Attributes) -> bool:
        """Set attributes of what is at a path; False where it was replaced before they could show."""
        try:
            opened = self.open(path)
        except IsADirectoryError:
            self.directories.set(path, attributes, self.store.stat(path))
            return True
        with opened as file:
            known = file.manifest
            made = known if known is not None else self._manifest_from_plain(path, file)
            changed = replace(made, **attributes.given)
            if self._publisher.replace(path, changed, file.info.entry, was=known):
                return True
        if known is None:
            # It may be there though: put by a call whose answer was lost.
            self._publisher.remove_replaced(path, [made])
        return False

    def _manifest_from_plain(self, path: str, file: OpenVersion) -> Manifest:
        size, mtime_ns = file.reader.size_bytes, file.info.mtime_ns
        if size <= self.config.plain_limit:
            return Manifest(mtime_ns=mtime_ns, inline=bytes(file.reader.read(0, size)))
        content = self.writers.copying(path, file.reader).finish()
        assert not isinstance(content, bytes), "larger than plain_limit, so striped"
        return Manifest(mtime_ns=mtime_ns, segments=content)
