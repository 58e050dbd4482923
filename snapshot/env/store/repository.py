"""Snapshots on a store: the places of manifests and packs, and the order in which they are written.

::

    omniload-env/1/manifests/<key>        published last: everything it names is there before it
    omniload-env/1/packs/<32 digits>      random names, written once: half a pack is an orphan
    omniload-env/1/condemned/<pack>       empty; written once nothing has named the pack for a grace

A store has no locks, and a saver names a pack only when its whole snapshot is written. So a
pack that nothing names is removed in two steps with a grace between them. A saver does not rely on a
condemned pack, and checks once more before it publishes. If the mark is a grace old and
still no manifest names the pack, the pack is removed, then the mark. If a run is killed between
any two of these steps, the next run completes them.
"""

import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

import zstandard

from fusefs.stores.protocol import Entry, Store
from omniload.base.errors import IntegrityError, StateError
from snapshot.env.format.manifest import (
    Manifest,
    check_header,
    decode_manifest,
    encode_manifest,
)
from snapshot.env.format.packs import FRAME_BYTES, HEADER, Frame, frames_of

__all__ = [
    "CONDEMNED",
    "MANIFESTS",
    "PACKS",
    "ROOT",
    "Found",
    "Pruned",
    "Repository",
    "Verdict",
    "judged",
    "manifest_of",
    "prune_store",
]

ROOT = "omniload-env/1"
MANIFESTS, PACKS, CONDEMNED = f"{ROOT}/manifests", f"{ROOT}/packs", f"{ROOT}/condemned"
# Bytes of a manifest that are read before its size is relied on; most manifests are shorter.
_BEGIN_BYTES = 4 << 20
# An eighth smaller than at level 3, for 5 more seconds of processor time at the one save of a scientific stack.
_LEVEL = 7
_THREADS = 8
"""Threads that read manifests."""
# Number of snapshots that are searched for existing contents; each costs the reading of a manifest.
_NEWEST = 16


class Found(NamedTuple):
    """A content that the store already has."""

    pack: str
    frames: tuple[Frame, ...]
    """All frames of the pack."""
    offset: int
    """Offset in the raw pack."""
    size_bytes: int


class Repository:
    """The snapshots of a store."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.bytes_read = 0
        """Stored bytes of packs that were read."""
        self._lock = threading.Lock()

    def all_keys(self) -> list[str]:
        """Return the keys of all snapshots, the newest first."""
        keys = [e for e in self.listed(MANIFESTS).values() if _is_key(e.name)]
        return [e.name for e in sorted(keys, key=lambda e: -e.mtime_ns)]

    def listed(self, folder: str) -> dict[str, Entry]:
        """Return the entries of a folder of the store, by name; none if the folder does not exist."""
        try:
            entries = self.store.listing(folder)
        except FileNotFoundError:
            return {}
        return {entry.name: entry for entry in entries if not entry.is_directory}

    def full_key(self, start: str) -> str:
        """Return the one key that begins with ``start``.

        Raises:
            StateError: No key or several keys do.
        """
        if len(start) == 64:
            return start
        found = [key for key in self.all_keys() if key.startswith(start)]
        if len(found) != 1:
            raise StateError(
                f"{start!r} begins {len(found)} keys in {self.store.location}; "
                "omniload env show lists them"
            )
        return found[0]

    def manifest_bytes(self, key: str) -> bytes | None:
        """Return the manifest of a key, or ``None`` if there is none.

        Raises:
            IntegrityError, StateError: It does not begin like a manifest.
        """
        path = f"{MANIFESTS}/{_checked(key)}"
        try:
            size_bytes = self.store.stat(path).size_bytes
            begin = self.store.read(path, 0, min(size_bytes, _BEGIN_BYTES))
            check_header(begin, size_bytes, name=key)
            rest = size_bytes - len(begin)
            return begin + self.store.read(path, len(begin), rest) if rest else begin
        except FileNotFoundError:
            return None

    def manifest(self, key: str) -> Manifest | None:
        """Return the manifest of a key, or ``None`` if there is none.

        Raises:
            IntegrityError: It is damaged, or names another key.
        """
        data = self.manifest_bytes(key)
        return None if data is None else manifest_of(data, key)

    def publish(self, manifest: Manifest) -> bool:
        """Publish a manifest unless there is a sound one of its key; return whether it was published.

        If two savers publish at the same instant, the last manifest stays; both are complete.

        Raises:
            StateError: It relies on a pack that was condemned meanwhile.
        """
        try:
            present = self.manifest(manifest.head.key)
        except IntegrityError:
            # replace it, like one whose packs are gone, so that a new save repairs it
            present = None
        if present is not None and all(map(self._is_whole, present.head.packs, present.frames)):
            return False  # the first one stays, so that every node that starts a job gets the same bytes
        # Check as late as possible, because the mark may have been set while packs were written.
        if lost := self.listed(CONDEMNED).keys() & set(manifest.head.packs):
            raise StateError(
                f"pack {min(lost)!r} was condemned while this snapshot was saved; save it again"
            )
        path = f"{MANIFESTS}/{_checked(manifest.head.key)}"
        self.store.publish(path, encode_manifest(manifest))
        return True

    def known_contents(self, wanted: Iterable[bytes]) -> dict[bytes, Found]:
        """Return the ``wanted`` digests that are in packs of the newest snapshots, with their places."""
        keys = self.all_keys()[:_NEWEST]
        needed, found = set(wanted), dict[bytes, Found]()
        condemned = self.listed(CONDEMNED)
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="omniload-env") as pool:
            for manifest in filter(None, pool.map(self._readable, keys)):
                packs = list(zip(manifest.head.packs, manifest.frames, strict=True))
                relied = [p not in condemned and self._is_whole(p, frames) for p, frames in packs]
                for digest in needed & manifest.contents.keys():
                    number, offset, size = manifest.contents[digest]
                    # Empty contents need no pack, so there is no use in relying on one.
                    if size and relied[number]:
                        found.setdefault(digest, Found(*packs[number], offset, size))
        return found

    def _readable(self, key: str) -> Manifest | None:
        try:
            return self.manifest(key)
        except (IntegrityError, StateError):
            return None  # a restore reports it

    def _is_whole(self, pack: str, frames: Sequence[Frame]) -> bool:
        """Return whether a pack is there up to its last frame."""
        end = frames[-1].offset + frames[-1].stored_bytes
        try:
            # Check the size alone: the bytes, which may be terabytes, are compared when they are restored.
            return self.store.stat(f"{PACKS}/{pack}").size_bytes >= end
        except FileNotFoundError:
            return False

    def write_pack(
        self, pieces: Iterator[bytes], pool: ThreadPoolExecutor
    ) -> tuple[str, tuple[Frame, ...], int]:
        """Write contents back to back as one pack; frames are compressed in parallel and written in order.

        Returns:
            Name, frames and stored bytes of the pack.
        """
        name, offset, frames = uuid.uuid4().hex, len(HEADER), list[Frame]()
        writer = self.store.create(f"{PACKS}/{name}")
        try:
            writer.write(HEADER)
            for raw_bytes, stored in _compressed(pieces, pool):
                frames.append(Frame(offset, len(stored), raw_bytes))
                writer.write(stored)
                offset += len(stored)
            writer.close()
        except BaseException:
            writer.abort()
            raise
        return name, tuple(frames), offset

    def read_frames(self, pack: str, offset: int, size_bytes: int) -> bytes:
        """Read stored bytes of a pack."""
        data = self.store.read(f"{PACKS}/{pack}", offset, size_bytes)
        with self._lock:
            self.bytes_read += len(data)
        return data


def manifest_of(data: bytes, key: str) -> Manifest:
    """Read the manifest of a key.

    Raises:
        IntegrityError: It is damaged, or names another key.
    """
    manifest = decode_manifest(data, name=key)
    if manifest.head.key != key:
        raise IntegrityError(f"manifest {key!r} says that its key is {manifest.head.key!r}")
    return manifest


def _compressed(stream: Iterator[bytes], pool: ThreadPoolExecutor) -> Iterator[tuple[int, bytes]]:
    """Compress a limited number of frames ahead of their writer."""
    waiting: list[tuple[int, Future[bytes]]] = []
    for raw in frames_of(stream, FRAME_BYTES):
        waiting.append((len(raw), pool.submit(_deflate, raw)))
        # This limits the memory: some frames of 4 MiB, raw and compressed.
        if len(waiting) > 8:
            size, done = waiting.pop(0)
            yield size, done.result()
    for size, done in waiting:
        yield size, done.result()


def _deflate(raw: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True).compress(raw)


def _is_key(name: str) -> bool:
    return len(name) == 64 and set(name) <= set("0123456789abcdef")


def _checked(key: str) -> str:
    if not _is_key(key):
        raise StateError(f"{key!r} is no key; a key has 64 hexadecimal digits")
    return key


class Verdict(NamedTuple):
    """The fate of the packs of a store; each list is sorted."""

    removed: tuple[str, ...]
    """Packs that were condemned a grace ago, and that nothing has named since."""
    condemned: tuple[str, ...]
    """Packs that nothing names, and that were not written just now."""
    pardoned: tuple[str, ...]
    """Marks of packs that are named, or are gone."""


class Pruned(NamedTuple):
    """The result of a run, or what it would be."""

    snapshots: tuple[str, ...]
    verdict: Verdict
    freed_bytes: int


def judged(
    packs: Mapping[str, int],
    marks: Mapping[str, int],
    named: AbstractSet[str],
    *,
    now_ns: int,
    grace_ns: int,
) -> Verdict:
    """Decide about every pack.

    Args:
        packs: Time at which each was written, nanoseconds since 1970.
        marks: Time at which each condemned pack was condemned.
        named: Packs that a manifest names.
        now_ns: The present time.
        grace_ns: Least age of a pack or a mark.

    Returns:
        The verdict. No named pack is removed or condemned, and a pack is removed only if it
        was condemned a grace before.
    """
    latest = now_ns - grace_ns
    orphans = packs.keys() - named
    return Verdict(
        tuple(sorted(p for p in orphans & marks.keys() if marks[p] <= latest)),
        tuple(sorted(p for p in orphans - marks.keys() if packs[p] <= latest)),
        tuple(sorted(p for p in marks if p in named or p not in packs)),
    )


def prune_store(
    repository: Repository,
    keys: Iterable[str] = (),
    *,
    grace_s: float,
    now_ns: int,
    act: bool = True,
) -> Pruned:
    """Remove snapshots, condemn packs that nothing names, remove packs that were condemned a grace ago.

    A grace is longer than any save takes to publish, and longer than clocks differ. Without ``act``, the
    changes are only listed.

    Raises:
        StateError: A manifest cannot be read, so the packs that it names are unknown, and no pack is removed.
    """
    store, gone = repository.store, tuple(sorted(keys))
    # First: if the run is killed after this, no manifest names the packs, and the next run takes them.
    if act:
        for key in gone:
            _remove(store.remove, f"{MANIFESTS}/{key}")
    # List packs before the manifests: a pack that arrives between the two is not judged, whoever names it.
    packs, marks = repository.listed(PACKS), repository.listed(CONDEMNED)
    written = {name: entry.mtime_ns for name, entry in packs.items()}
    named: set[str] = set()
    seen: set[str] = set() if act else set(gone)
    # Look twice, to include manifests that were published during the first look.
    for _ in range(2):
        fresh = set(repository.all_keys()) - seen
        seen |= fresh
        named |= _named_by(repository, fresh)
    verdict = judged(
        written,
        {name: entry.mtime_ns for name, entry in marks.items()},
        named,
        now_ns=now_ns,
        grace_ns=int(grace_s * 1e9),
    )
    if act:
        for pack in verdict.removed:
            _remove(store.remove, f"{PACKS}/{pack}")
        # After the packs, so that a run that is killed in between finds its marks again.
        for pack in (*verdict.removed, *verdict.pardoned):
            _remove(store.remove, f"{CONDEMNED}/{pack}")
        for pack in verdict.condemned:
            store.publish(f"{CONDEMNED}/{pack}", b"")
    return Pruned(gone, verdict, sum(packs[pack].size_bytes for pack in verdict.removed))


def _named_by(repository: Repository, keys: Iterable[str]) -> set[str]:
    def packs_of(key: str) -> tuple[str, ...]:
        try:
            manifest = repository.manifest(key)
        except (IntegrityError, StateError) as error:
            raise StateError(
                f"snapshot {key} cannot be read, so nobody knows which packs it names and none is "
                f"removed: {error}; save it again, or remove it: omniload env prune -o STORE {key}"
            ) from error
        return manifest.head.packs if manifest else ()  # gone since it was listed

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="omniload-env") as pool:
        return {pack for packs in pool.map(packs_of, keys) for pack in packs}


def _remove(remove: Callable[[str], None], path: str) -> None:
    with suppress(FileNotFoundError):  # another run was faster
        remove(path)
