"""Fetching of files into caches before they are read, and counting of the bytes that stayed."""

import contextlib
import errno
import json
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from fusefs.config import DiskCacheConfig, FilesConfig
from fusefs.read.version_cache import Keeping
from fusefs.tools.statistics import DROP_XATTR, LAYOUT_XATTR
from fusefs.tree.namespace import StripedFiles
from fusefs.tree.walk import files_below
from omniload.base.clock import Clock, SystemClock
from omniload.base.errors import ConfigError, StateError, UnavailableError

__all__ = [
    "Kept",
    "drop_from_mount",
    "mounted_files",
    "prefetch_from_store",
    "prefetch_on_mount",
    "settled",
    "store_files",
    "with_disk_cache",
]

_STEP_BYTES = 8 << 20
_BATCHES = 4
Report = Callable[[int], None]
"""Called with the bytes just done."""

_SETTLES_S = 1.0
"""Seconds without growth after which a cache counts as settled: it has no room left."""
_LOOK_AGAIN_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A prefetched file, and its bytes in the caches at the end."""

    path: str
    size_bytes: int
    memory_bytes: int
    disk_bytes: int | None
    """Bytes on the disk; None if no copy is kept: without a disk cache, or for a plain file without a version."""

    @property
    def left_out_bytes(self) -> int:
        """Bytes for which the cache had no room."""
        kept_bytes = self.memory_bytes if self.disk_bytes is None else self.disk_bytes
        return self.size_bytes - kept_bytes

    def as_dict(self) -> dict[str, Any]:
        """Return all numbers by name."""
        return {
            "path": self.path,
            "size_bytes": self.size_bytes,
            "memory_bytes": self.memory_bytes,
            "disk_bytes": self.disk_bytes,
            "left_out_bytes": self.left_out_bytes,
        }


def with_disk_cache(
    config: FilesConfig, directory: str | None, capacity: str | None
) -> FilesConfig:
    """Return a configuration with the disk cache of the options.

    Raises:
        ConfigError: There is no disk cache: blocks in the memory of one process are of no use to the next.
    """
    if directory is not None:
        known = config.disk_cache.capacity if config.disk_cache is not None else 64 << 30
        try:
            chosen = DiskCacheConfig.model_validate(
                {"directory": directory, "capacity": capacity or known}
            )
        except ValidationError as error:
            raise ConfigError(f"capacity {capacity!r}: {error.errors()[0]['msg']}") from error
        config = config.model_copy(update={"disk_cache": chosen})
    if config.disk_cache is None:
        raise ConfigError(
            "no disk cache is given: what this command reads would be gone with it; "
            "give --disk-cache DIR or a file with disk_cache, or prefetch on the mount"
        )
    return config


def prefetch_from_store(
    files: StripedFiles, found: Iterable[tuple[str, int]], report: Report = lambda _: None
) -> list[Kept]:
    """Fetch files into the disk cache, or into memory if there is none.

    Args:
        files: The store.
        found: Path and size of each, as ``files_below`` finds them.
        report: Called with the bytes that are done.
    """
    paths = [path for path, _ in found]
    for path in paths:
        _keep(files, path, report)
    # Look at the end, because a file may have been evicted for a later one.
    return [_kept(files, path) for path in paths]


def _keep(files: StripedFiles, path: str, report: Report) -> None:
    # The blocks that are fetched at once must fit half of the cache, or one batch would push out another.
    step = min(_STEP_BYTES, files.config.cache // (2 * _BATCHES))
    with files.open(path, brings=False) as file:
        reader, begun = file.reader, deque[tuple[Keeping, int]]()
        for at in range(0, reader.size_bytes, step):
            size = min(step, reader.size_bytes - at)
            begun.append((reader.cached.start_keeping(at, size), size))
            if len(begun) == _BATCHES:
                _finish(reader.cached.finish_keeping, begun, report)
        while begun:
            _finish(reader.cached.finish_keeping, begun, report)


def _finish(
    finish: Callable[[Keeping], None], begun: "deque[tuple[Keeping, int]]", report: Report
) -> None:
    keeping, size = begun.popleft()
    finish(keeping)
    report(size)


def _kept(files: StripedFiles, path: str) -> Kept:
    with files.open(path, brings=False) as file:
        memory, disk = file.reader.cached.held_bytes()
        size = file.reader.size_bytes
    return Kept(path=path, size_bytes=size, memory_bytes=memory, disk_bytes=disk)


def mounted_files(paths: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Yield files, and all files below directories, of a mount, with their sizes; links are not followed.

    Raises:
        StateError: Nothing is there.
    """
    for path in paths:
        try:
            if not os.path.isdir(path):  # noqa: PTH112 -- a mount is spoken to in system calls
                yield path, os.stat(path).st_size  # noqa: PTH116 -- as above
                continue
        except FileNotFoundError as error:
            raise StateError(f"{path!r} is not there; name a file or directory") from error
        for folder, _, names in os.walk(path):
            for name in sorted(names):
                below = os.path.join(folder, name)  # noqa: PTH118 -- as above
                if not os.path.islink(below):  # noqa: PTH114 -- as above
                    yield below, os.stat(below).st_size  # noqa: PTH116 -- as above


def prefetch_on_mount(
    found: Iterable[tuple[str, int]], report: Report = lambda _: None
) -> list[Kept]:
    """Make a mount fetch files into its caches, by reading them.

    The reads bypass the kernel's page cache, because the mount would not see reads of pages in it.

    Raises:
        StateError: The files are on no mount of ours.
        UnavailableError: The files cannot be read.
    """
    paths = [path for path, _ in found]
    with contextlib.closing(mmap.mmap(-1, _STEP_BYTES)) as buffer:  # aligned, as O_DIRECT asks
        for path in paths:
            # Check before the read, so that files on no mount of ours are refused instead of being read in vain.
            _look(path)
            try:
                _read_through(path, buffer, report)
            except OSError as error:
                raise UnavailableError(f"{path!r} cannot be read: {error}") from error
    return settled(paths, _look, SystemClock())


def settled(paths: Sequence[str], look: Callable[[str], Kept], clock: Clock) -> list[Kept]:
    """Look at files once the disk has the bytes that were read: a mount answers before its cache is written.

    This waits for all files together, as long as any of them grows: if there is no room, the
    wait is one for all and not one for each.
    """
    kept = {path: look(path) for path in paths}
    waiting = [path for path in paths if _on_its_way(kept[path])]
    until_s = clock.now_s() + _SETTLES_S
    while waiting and clock.now_s() < until_s:
        clock.sleep(_LOOK_AGAIN_S)
        now = {path: look(path) for path in waiting}
        if any(now[path].disk_bytes != kept[path].disk_bytes for path in waiting):
            until_s = clock.now_s() + _SETTLES_S
        kept |= now
        waiting = [path for path in waiting if _on_its_way(kept[path])]
    return [kept[path] for path in paths]


def _on_its_way(kept: Kept) -> bool:
    return kept.disk_bytes is not None and kept.disk_bytes < kept.size_bytes


def drop_from_mount(path: str) -> tuple[int, int]:
    """Make a mount forget the cached bytes of a path; return the bytes in memory and on the disk.

    Raises:
        StateError: The path is on no mount of ours.
    """
    found = _asked(path, DROP_XATTR)
    return found["memory_bytes"], found["disk_bytes"]


def _look(path: str) -> Kept:
    found = _asked(path, LAYOUT_XATTR)
    return Kept(path=path, size_bytes=found["size_bytes"], **found["cached"])


def _asked(path: str, name: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(os.getxattr(path, name))
    except FileNotFoundError as error:
        raise StateError(f"{path!r} is not there; name a file or directory") from error
    except OSError as error:
        raise StateError(
            f"{path!r} lies on no mount of ours: {error.strerror or error}; give --store"
        ) from error
    return found


def _read_through(path: str, buffer: mmap.mmap, report: Report) -> None:
    descriptor = _opened_directly(path)
    try:
        while done := os.readv(descriptor, [buffer]):
            report(done)
    finally:
        os.close(descriptor)


def _opened_directly(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        # The kernel, or a mount of another kind, has no O_DIRECT.
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, os.O_RDONLY)


def store_files(files: StripedFiles, paths: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Yield files, and all files below directories, of a store, with their sizes.

    Raises:
        StateError: Nothing is there.
    """
    for path in paths:
        try:
            for below, info in files_below(files, path.strip("/")):
                yield below, info.size_bytes
        except FileNotFoundError as error:
            raise StateError(f"{path!r} is not in {files.store.location}") from error
