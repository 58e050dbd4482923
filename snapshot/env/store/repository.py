"""Snapshots on a store: where manifests and packs lie, and in which order they are written.

::

    omniload-env/1/manifests/<key>        published last: all it names is there before it
    omniload-env/1/packs/<32 digits>      random names, written once: half a pack is an orphan
    omniload-env/1/condemned/<pack>       no longer named, will be removed; see pruning
"""

import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import zstandard

from omniload.base.errors import IntegrityError, StateError
from snapshot.env.format.manifest import Manifest, decode_manifest, encode_manifest
from snapshot.env.format.packs import (
    FOOTER_BYTES,
    FRAME_BYTES,
    HEADER,
    Content,
    Frame,
    PackIndex,
    decode_footer,
    decode_index,
    encode_tail,
    frames_of,
)

if TYPE_CHECKING:
    from fusefs.stores.protocol import Store

__all__ = ["CONDEMNED", "MANIFESTS", "PACKS", "ROOT", "Found", "Repository"]

ROOT = "omniload-env/1"
MANIFESTS, PACKS, CONDEMNED = f"{ROOT}/manifests", f"{ROOT}/packs", f"{ROOT}/condemned"
_TAIL_BYTES = 256 << 10
"""Read at the end of a pack at first: mostly footer and index in one go."""
_NEWEST = 256
"""Packs that are looked into for contents that are there already."""


class Found(NamedTuple):
    """A content that is in the store already."""

    pack: str
    content: Content


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
        """Return the manifest of a key, or ``None`` where there is none."""
        path = f"{MANIFESTS}/{_checked(key)}"
        try:
            return self.store.read(path, 0, self.store.stat(path).size_bytes)
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
        if present is not None and all(map(self._index_if_whole, present.head.packs)):
            return False
        if lost := self.condemned() & set(manifest.head.packs):
            raise StateError(
                f"pack {min(lost)!r} was condemned while this snapshot was saved; save it again"
            )
        path = f"{MANIFESTS}/{_checked(manifest.head.key)}"
        self.store.publish(path, encode_manifest(manifest))
        return True

    def known_contents(self, wanted: Iterable[bytes], threads: int = 8) -> dict[bytes, Found]:
        """Return which of the ``wanted`` digests lie in packs of the store, and where."""
        try:
            entries = [e for e in self.store.listing(PACKS) if not e.is_directory]
        except FileNotFoundError:
            return {}
        condemned = self.condemned()
        entries = [e for e in entries if e.name not in condemned]
        names = [e.name for e in sorted(entries, key=lambda e: -e.mtime_ns)[:_NEWEST]]
        needed, found = set(wanted), dict[bytes, Found]()
        with ThreadPoolExecutor(threads, thread_name_prefix="omniload-env") as pool:
            for name, index in zip(names, pool.map(self._index_if_whole, names), strict=True):
                for content in index.contents if index else ():
                    if content.digest in needed:
                        found.setdefault(content.digest, Found(name, content))
        return found

    def condemned(self) -> set[str]:
        """Return the packs that will be removed: nothing may rely on them any more."""
        try:
            return {entry.name for entry in self.store.listing(CONDEMNED)}
        except FileNotFoundError:
            return set()

    def index(self, pack: str) -> PackIndex:
        """Read the index of a pack.

        Raises:
            IntegrityError: The pack is not whole.
        """
        path = f"{PACKS}/{pack}"
        size = self.store.stat(path).size_bytes
        if size < len(HEADER) + FOOTER_BYTES:
            raise IntegrityError(f"pack {pack!r} has {size} bytes; it was cut short")
        tail_at = max(0, size - _TAIL_BYTES)
        tail = self.store.read(path, tail_at, size - tail_at)
        footer = decode_footer(tail[-FOOTER_BYTES:], name=pack)
        end = size - FOOTER_BYTES
        if footer.index_offset + footer.index_stored_bytes != end:
            raise IntegrityError(f"pack {pack!r}: the index does not end where the footer begins")
        if footer.index_offset >= tail_at:
            stored = tail[footer.index_offset - tail_at : -FOOTER_BYTES]
        else:
            stored = self.store.read(path, footer.index_offset, footer.index_stored_bytes)
        return decode_index(stored, footer, name=pack)

    def _index_if_whole(self, pack: str) -> PackIndex | None:
        try:
            return self.index(pack)
        except (IntegrityError, FileNotFoundError):
            return None  # a saver died over it, or still writes it

    def write_pack(
        self,
        contents: Iterable[tuple[bytes, int]],
        pieces: Callable[[bytes], Iterator[bytes]],
        *,
        level: int,
        pool: ThreadPoolExecutor,
    ) -> tuple[str, PackIndex, int]:
        """Write one pack; frames are compressed beside each other and written in order.

        Args:
            contents: Digest and size of each, in the order they shall lie.
            pieces: Bytes of a content by its digest; it checks them itself.
            level: Of zstd.
            pool: Where frames are compressed.

        Returns:
            Name, index and stored bytes of the pack.
        """
        name, at, listed = uuid.uuid4().hex, 0, []
        for digest, size in contents:
            listed.append(Content(digest, at, size))
            at += size
        stream = (piece for content in listed for piece in pieces(content.digest))
        writer = self.store.create(f"{PACKS}/{name}")
        try:
            writer.write(HEADER)
            offset, frames = len(HEADER), list[Frame]()
            for raw_bytes, stored in _compressed(stream, level, pool):
                frames.append(Frame(offset, len(stored), raw_bytes))
                writer.write(stored)
                offset += len(stored)
            index = PackIndex(tuple(frames), tuple(listed))
            tail = encode_tail(index, offset)
            writer.write(tail)
            writer.close()
        except BaseException:
            writer.abort()
            raise
        return name, index, offset + len(tail)

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
