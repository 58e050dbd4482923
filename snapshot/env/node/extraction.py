"""Extraction of packs on a store to a tree in the node cache: parallel ranges, every file verified."""

import errno
import hashlib
import os
import stat
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

from omniload.base.errors import IntegrityError, StateError
from omniload.base.linux.cores import cores_here
from snapshot.env.format.digests import file_digest
from snapshot.env.format.entries import Entry, Kind, Limits, Target, check_entries
from snapshot.env.format.manifest import Manifest
from snapshot.env.format.packs import ReadUnit, inflate, read_units
from snapshot.env.key.keys import key_of
from snapshot.env.node.cache import NodeCache, exclusively
from snapshot.env.node.tree import Tree, TreeHead, discard
from snapshot.env.store.progress import Progress
from snapshot.env.store.repository import ROOT, Repository, manifest_of
from snapshot.private_folder import put_file, readable_folder

__all__ = ["extract", "provide"]

# A new save would rely on an existing pack again, so saving alone does not repair it.
_REMEDY = f"remove {ROOT}/packs/{{}} from the store, then save the snapshot again"
UNIT_BYTES = 8 << 20
"""Raw bytes fetched in one read."""
_NO_DEVICES = frozenset({errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
_MOST_PIECES = 1024  # the most that one call takes
# Never write through a link or into an existing file, because another process made it.
_FILE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class _Read(NamedTuple):
    """One read, and the contents that it fetches."""

    pack: int
    unit: ReadUnit
    contents: tuple[tuple[bytes, int, int], ...]
    """Digest, raw offset in the pack, and size of each content that overlaps the unit."""


def provide(  # noqa: PLR0913 -- what, from where, to where, under which conditions
    cache: NodeCache,
    repository: Repository,
    key: str,
    targets: Sequence[Target],
    *,
    fits: Callable[[TreeHead], None] = lambda _: None,
    limits: Limits | None = None,
    progress: Progress = lambda *_: None,
) -> Tree | None:
    """Return the tree of a key; extract it if the node does not have it.

    ``fits`` raises if the snapshot was made for another environment; it is called before the extraction.

    Returns:
        The tree; ``None`` if the store has no such snapshot.

    Raises:
        IntegrityError: The snapshot is damaged, or would write where it must not.
        StateError: The disk of the cache has no room for it.
        OSError: The cache cannot be written; the files extracted so far were removed.
    """
    with exclusively(cache.lock(key)):
        # Another process may have extracted it while this one waited for the lock.
        tree = cache.tree(key)
        if tree is not None:
            return tree
        data = repository.manifest_bytes(key)
        if data is None:
            return None
        manifest = manifest_of(data, key)
        if key_of(manifest.head.document) != key:
            raise IntegrityError(f"manifest {key!r} holds the document of another key; refused")
        if not {"base", "command"} <= manifest.head.document.keys():
            raise IntegrityError(f"manifest {key!r} does not say what it was made of; refused")
        fits(TreeHead.of(manifest))
        check_entries(manifest.entries, targets, limits)
        cache.drop(key)  # a damaged tree, whose room is needed
        if manifest.raw_bytes > (free_bytes := cache.free_bytes()):
            raise StateError(
                f"{cache.folder} has {free_bytes} bytes free, the snapshot needs "
                f"{manifest.raw_bytes}; remove old trees or name another node cache"
            )
        tree = cache.partial(key)
        try:
            extract(repository, manifest, tree, progress)
            return cache.complete(key, tree, manifest, data)
        except BaseException as error:
            discard(tree.folder)  # or a full disk would stay full
            if isinstance(error, OSError) and error.filename is None:
                error.filename = str(cache.folder)
            raise


def extract(
    repository: Repository, manifest: Manifest, tree: Tree, progress: Progress = lambda *_: None
) -> None:
    """Write the files of a snapshot whose entries have been checked into an empty tree.

    Raises:
        IntegrityError: A file does not match its digest.
    """
    _make_folders(manifest, tree)
    extraction = _Extraction(repository, manifest, tree)
    total, done = manifest.raw_bytes, 0
    # More threads than processors, because some of them wait for the store.
    workers = min(16, 2 + cores_here())
    with ThreadPoolExecutor(workers, thread_name_prefix="omniload-env") as pool:
        reads = [pool.submit(extraction.carry_out, read) for read in extraction.reads()]
        try:
            for read in as_completed(reads):
                done += read.result()
                progress("extracting", done, total)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    _finish_folders(manifest, tree)


def _make_folders(manifest: Manifest, tree: Tree) -> None:
    """Make directories, links and whiteouts; entries are in order, so parents come first."""
    for number in range(len(manifest.head.targets)):
        readable_folder(tree.layer(number))
        readable_folder(tree.whiteouts(number))
    layers = _layers(manifest, tree)
    for entry in manifest.entries:
        if entry.kind is Kind.FILE:
            continue
        path = f"{layers[entry.target]}/{entry.path}"
        if entry.kind is Kind.DIRECTORY and entry.path:
            # Writable until it is filled, because its final mode may forbid that.
            os.mkdir(path, 0o755)  # noqa: PTH102 -- thousands of paths
        elif entry.kind is Kind.LINK:
            os.symlink(entry.link, path)  # noqa: PTH211
            os.utime(path, ns=(entry.mtime_ns, entry.mtime_ns), follow_symlinks=False)
        elif entry.kind is Kind.DELETED:
            mark = tree.whiteouts(entry.target) / entry.path
            readable_folder(mark.parent)
            try:
                os.mknod(mark, stat.S_IFCHR | 0o600, os.makedev(0, 0))
            except OSError as error:
                if error.errno not in _NO_DEVICES:
                    raise
                put_file(tree.folder / "unmarked")  # then it is not mounted, but linked or copied


def _finish_folders(manifest: Manifest, tree: Tree) -> None:
    """Set modes and times of directories, the deepest first, when nothing more is written into them."""
    layers = _layers(manifest, tree)
    for entry in reversed(manifest.entries):
        if entry.kind is Kind.DIRECTORY:
            path = f"{layers[entry.target]}/{entry.path}"
            os.chmod(path, entry.mode)  # noqa: PTH101
            os.utime(path, ns=(entry.mtime_ns, entry.mtime_ns))


def _layers(manifest: Manifest, tree: Tree) -> list[str]:
    return [str(tree.layer(number)) for number in range(len(manifest.head.targets))]


class _Extraction:
    """Reads units of packs and writes the files whose bytes they contain."""

    def __init__(self, repository: Repository, manifest: Manifest, tree: Tree) -> None:
        self._repository = repository
        self._manifest = manifest
        self._layers = _layers(manifest, tree)
        # Bits that the umask removes from a mode, read from a folder that already exists.
        self._masked = ~tree.folder.stat().st_mode & 0o777
        self._entries_of: dict[bytes, list[Entry]] = {}
        for entry in manifest.entries:
            if entry.kind is Kind.FILE:
                self._entries_of.setdefault(entry.digest, []).append(entry)
        self._missing: dict[bytes, int] = {}
        """Number of missing bytes of contents that arrive in parts."""
        self._lock = threading.Lock()

    def reads(self) -> Iterator[_Read]:
        """Plan the reads; write the empty files, which need none."""
        wanted: dict[int, dict[bytes, tuple[int, int]]] = {}
        for digest in self._entries_of:
            place = self._manifest.contents[digest]
            if place.size_bytes:
                wanted.setdefault(place.pack, {})[digest] = (place.offset, place.size_bytes)
            else:
                self._write(digest, [])
        for pack, places in sorted(wanted.items()):
            frames = self._manifest.frames[pack]
            ranges = dict(sorted(places.values()))  # the largest range of each offset
            units = read_units(frames, ranges, unit_bytes=UNIT_BYTES)
            starts = [unit.raw_offset for unit in units]
            held: list[list[tuple[bytes, int, int]]] = [[] for _ in units]
            for digest, (offset, size) in sorted(places.items(), key=lambda item: item[1]):
                first = bisect_right(starts, offset) - 1
                for number in range(first, bisect_left(starts, offset + size)):
                    held[number].append((digest, offset, size))
            for unit, contents in zip(units, held, strict=True):
                yield _Read(pack, unit, tuple(contents))

    def carry_out(self, read: _Read) -> int:
        """Fetch one unit and write its contents; return the raw bytes written."""
        name, unit = self._manifest.head.packs[read.pack], read.unit
        try:
            stored = memoryview(self._repository.read_frames(name, unit.offset, unit.stored_bytes))
        except FileNotFoundError as error:
            raise IntegrityError(
                f"pack {name!r} is not in the store any more, and snapshot "
                f"{self._manifest.head.key[:16]} needs it; save it again"
            ) from error
        raw, written = _Raw(unit.raw_offset), 0
        for frame in unit.frames:
            at = frame.offset - unit.offset
            try:
                raw.add(inflate(stored[at : at + frame.stored_bytes], frame.raw_bytes, name=name))
            except IntegrityError as error:
                error.add_note(_REMEDY.format(name))
                raise
        for digest, offset, size in read.contents:
            begin, end = max(offset, unit.raw_offset), min(offset + size, unit.raw_end)
            pieces = raw.between(begin, end)
            if end - begin == size:
                self._write(digest, pieces)
            else:
                self._write_part(digest, pieces, begin - offset, size)
            written += (end - begin) * len(self._entries_of[digest])
        return written

    def _write(self, digest: bytes, pieces: Sequence[memoryview]) -> None:
        """Write every file of a complete content."""
        entries, found = self._entries_of[digest], hashlib.sha256()
        for piece in pieces:
            found.update(piece)
        if found.digest() != digest:
            raise self._not_right(entries[0])
        for entry in entries:
            file = os.open(self._path(entry), _FILE_FLAGS, entry.mode)
            try:
                _write_at(file, pieces, 0)
                # Restore the bits that the umask removed from the mode.
                if entry.mode & self._masked:
                    os.fchmod(file, entry.mode)
                os.utime(file, ns=(entry.mtime_ns, entry.mtime_ns))
            finally:
                os.close(file)

    def _write_part(
        self, digest: bytes, pieces: Sequence[memoryview], offset: int, size: int
    ) -> None:
        """Write a part of a large content into its first file; the last part finishes it."""
        path = self._path(self._entries_of[digest][0])
        # Parts come in any order and in parallel, so the first to arrive makes the file.
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            _write_at(file, pieces, offset)
        finally:
            os.close(file)
        with self._lock:
            self._missing[digest] = self._missing.get(digest, size) - sum(map(len, pieces))
            whole = not self._missing[digest]
        if whole:
            self._finish_parted(digest, path)

    def _finish_parted(self, digest: bytes, path: str) -> None:
        """Verify a file that came in parts, and copy it to the other paths with its content."""
        first, *more = self._entries_of[digest]
        if Path(path).stat().st_size != first.size_bytes or file_digest(path) != digest:
            raise self._not_right(first)
        for entry in more:
            with Path(path).open("rb") as source, Path(self._path(entry)).open("xb") as copy:
                while piece := source.read(UNIT_BYTES):
                    copy.write(piece)
        for entry in (first, *more):
            file = os.open(self._path(entry), os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.fchmod(file, entry.mode)
                os.utime(file, ns=(entry.mtime_ns, entry.mtime_ns))
            finally:
                os.close(file)

    def _path(self, entry: Entry) -> str:
        return f"{self._layers[entry.target]}/{entry.path}"

    def _not_right(self, entry: Entry) -> IntegrityError:
        head = self._manifest.head
        pack = head.packs[self._manifest.contents[entry.digest].pack]
        return IntegrityError(
            f"{entry.path!r} does not have its SHA-256 {entry.digest.hex()}: a pack of snapshot "
            f"{head.key[:16]} is damaged; {_REMEDY.format(pack)}"
        )


class _Raw:
    """Inflated frames of a unit; most contents are in one frame and are not copied again."""

    # To join the frames into one piece would take half as long again, because new memory is filled twice.
    def __init__(self, offset: int) -> None:
        self._starts: list[int] = []
        self._frames: list[memoryview] = []
        self._end = offset

    def add(self, data: bytes) -> None:
        """Append the next frame."""
        self._starts.append(self._end)
        self._frames.append(memoryview(data))
        self._end += len(data)

    def between(self, begin: int, end: int) -> list[memoryview]:
        """Return the bytes between two offsets of the raw pack, in pieces."""
        first, last = bisect_right(self._starts, begin) - 1, bisect_left(self._starts, end) - 1
        return [
            self._frames[number][max(0, begin - self._starts[number]) : end - self._starts[number]]
            for number in range(first, last + 1)
        ]


def _write_at(file: int, pieces: Sequence[memoryview], offset: int) -> None:
    """Write pieces one after the other, in one call unless the kernel takes less."""
    rest = list(pieces)
    while rest:
        count = os.pwritev(file, rest[:_MOST_PIECES], offset)
        offset += count
        while rest and count >= len(rest[0]):
            count -= len(rest.pop(0))
        if count:
            rest[0] = rest[0][count:]
