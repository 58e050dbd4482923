"""Snapshots on a store: where manifests and packs lie, and in which order they are written.

::

    omniload-env/1/manifests/<key>        published last: all it names is there before it
    omniload-env/1/packs/<32 digits>      random names, written once: half a pack is an orphan
    omniload-env/1/condemned/<pack>       no longer named, will be removed; see pruning
"""

import threading
import uuid
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import zstandard

from omniload.base.errors import IntegrityError, StateError
from snapshot.env.format.manifest import (
    Manifest,
    check_header,
    decode_manifest,
    encode_manifest,
)
from snapshot.env.format.packs import FRAME_BYTES, HEADER, Frame, frames_of

if TYPE_CHECKING:
    from fusefs.stores.protocol import Store

__all__ = ["CONDEMNED", "MANIFESTS", "PACKS", "ROOT", "Found", "Repository"]

ROOT = "omniload-env/1"
MANIFESTS, PACKS, CONDEMNED = f"{ROOT}/manifests", f"{ROOT}/packs", f"{ROOT}/condemned"
_BEGIN_BYTES = 4 << 20
"""Of a manifest, read before its size is believed; most are shorter."""
_NEWEST = 16
"""Snapshots that are looked into for contents that are there already."""


class Found(NamedTuple):
    """A content that is in the store already."""

    pack: str
    frames: tuple[Frame, ...]
    """All of the pack."""
    offset: int
    """In the raw pack."""
    size_bytes: int


class Repository:
    """The snapshots of a store."""

    def __init__(self, store: "Store") -> None:
        self.store = store
        self.bytes_read = 0
        """Stored bytes of packs that were read."""
        self._lock = threading.Lock()

    def all_keys(self) -> list[str]:
        """Return the keys of all snapshots, the newest first."""
        try:
            entries = self.store.listing(MANIFESTS)
        except FileNotFoundError:
            return []
        keys = [e for e in entries if not e.is_directory and _is_key(e.name)]
        return [e.name for e in sorted(keys, key=lambda e: -e.mtime_ns)]

    def full_key(self, start: str) -> str:
        """Return the one key that begins with ``start``.

        Raises:
            StateError: None does, or several do.
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
        """Return the manifest of a key, or ``None`` where there is none.

        Raises:
            IntegrityError, StateError: It does not begin as one does.
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
        """Return the manifest of a key, or ``None`` where there is none.

        Raises:
            IntegrityError: It is damaged, or says that it is another key's.
        """
        data = self.manifest_bytes(key)
        if data is None:
            return None
        manifest = decode_manifest(data, name=key)
        if manifest.head.key != key:
            raise IntegrityError(f"manifest {key!r} says that its key is {manifest.head.key!r}")
        return manifest

    def publish(self, manifest: Manifest) -> bool:
        """Put a manifest there unless a sound one of its key is; return whether it was put.

        The first one stays, so that every node that starts a job gets the same bytes; but
        one that is damaged, or whose packs are gone, makes room: saving again mends it. Of
        two savers that publish in the same instant the last one stays; both are whole.

        Raises:
            StateError: It relies on a pack that was condemned meanwhile.
        """
        try:
            present = self.manifest(manifest.head.key)
        except IntegrityError:
            present = None
        if present is not None and all(map(self._is_whole, present.head.packs, present.frames)):
            return False
        if lost := self.condemned() & set(manifest.head.packs):
            raise StateError(
                f"pack {min(lost)!r} was condemned while this snapshot was saved; save it again"
            )
        path = f"{MANIFESTS}/{_checked(manifest.head.key)}"
        self.store.publish(path, encode_manifest(manifest))
        return True

    def known_contents(self, wanted: Iterable[bytes], threads: int = 8) -> dict[bytes, Found]:
        """Return which of the ``wanted`` digests lie in packs of the newest snapshots, and where."""
        keys = self.all_keys()[:_NEWEST]
        needed, found = set(wanted), dict[bytes, Found]()
        condemned = self.condemned()
        with ThreadPoolExecutor(threads, thread_name_prefix="omniload-env") as pool:
            for manifest in filter(None, pool.map(self._readable, keys)):
                packs = list(zip(manifest.head.packs, manifest.frames, strict=True))
                relied = [p not in condemned and self._is_whole(p, frames) for p, frames in packs]
                for digest in needed & manifest.contents.keys():
                    number, offset, size = manifest.contents[digest]
                    if size and relied[number]:
                        found.setdefault(digest, Found(*packs[number], offset, size))
        return found

    def condemned(self) -> set[str]:
        """Return the packs that will be removed: nothing may rely on them any more."""
        try:
            return {entry.name for entry in self.store.listing(CONDEMNED)}
        except FileNotFoundError:
            return set()

    def _readable(self, key: str) -> Manifest | None:
        try:
            return self.manifest(key)
        except (IntegrityError, StateError):
            return None  # whoever restores it is told

    def _is_whole(self, pack: str, frames: Sequence[Frame]) -> bool:
        """Return whether a pack is there as far as the last of its frames."""
        end = frames[-1].offset + frames[-1].stored_bytes
        try:
            return self.store.stat(f"{PACKS}/{pack}").size_bytes >= end
        except FileNotFoundError:
            return False

    def write_pack(
        self, pieces: Iterator[bytes], *, level: int, pool: ThreadPoolExecutor
    ) -> tuple[str, tuple[Frame, ...], int]:
        """Write one pack; frames are compressed beside each other and written in order.

        Args:
            pieces: Contents back to back.
            level: Of zstd.
            pool: Where frames are compressed.

        Returns:
            Name, frames and stored bytes of the pack.
        """
        name, offset, frames = uuid.uuid4().hex, len(HEADER), list[Frame]()
        writer = self.store.create(f"{PACKS}/{name}")
        try:
            writer.write(HEADER)
            for raw_bytes, stored in _compressed(pieces, level, pool):
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


def _compressed(
    stream: Iterator[bytes], level: int, pool: ThreadPoolExecutor
) -> Iterator[tuple[int, bytes]]:
    """Compress frames ahead of their writer, a bounded number of them."""
    waiting: list[tuple[int, Future[bytes]]] = []
    for raw in frames_of(stream, FRAME_BYTES):
        waiting.append((len(raw), pool.submit(_deflate, raw, level)))
        if len(waiting) > 8:
            size, done = waiting.pop(0)
            yield size, done.result()
    for size, done in waiting:
        yield size, done.result()


def _deflate(raw: bytes, level: int) -> bytes:
    return zstandard.ZstdCompressor(level=level, write_content_size=True).compress(raw)


def _is_key(name: str) -> bool:
    return len(name) == 64 and set(name) <= set("0123456789abcdef")


def _checked(key: str) -> str:
    if not _is_key(key):
        raise StateError(f"{key!r} is no key; a key has 64 hexadecimal digits")
    return key
