"""The store that an image is read from and pushed to, its guarantees, and several stores as one.

Errors are part of the protocol, as they are for the stores of ``fusefs``:

- ``FileNotFoundError`` only if the store positively says that it has no such thing;
- ``UnavailableError`` for outages and time-outs: it may be retried, here or at a mirror;
- ``IntegrityError`` for bytes that are not those asked for: too few, or of another digest;
- ``ConfigError`` if credentials are refused.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO, Protocol, TypeVar

from typing_extensions import override

from omniload.base.clock import Clock, SystemClock
from omniload.base.errors import IntegrityError, UnavailableError
from omniload.base.log import get_logger
from snapshot.oci.digest import hasher_of
from snapshot.oci.manifest import Descriptor

__all__ = [
    "ImageStore",
    "MirroredStore",
    "Opened",
    "StoredManifest",
    "after",
    "checked_chunks",
    "small_blob",
    "wanted_by_manifest",
]

Opened = Callable[[], BinaryIO]
"""Opens the bytes of a blob from their start; called once for each attempt to push them."""

MAX_SMALL_BLOB_BYTES = 64 << 20
_log = get_logger(__name__)
_NEXT = (FileNotFoundError, UnavailableError, IntegrityError)
"""Errors after which the next store is asked; also a wrong digest, because the next may hold right bytes."""

# Seconds for which a mirror that did not answer is asked last, because each block would wait for it.
AWAY_S = 60.0

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class StoredManifest:
    """A manifest or index as stored; ``data`` was compared with ``digest``."""

    data: bytes
    media_type: str
    digest: str


class ImageStore(Protocol):
    """One repository of a registry, or a layout directory. Safe in threads."""

    @property
    def location(self) -> str:
        """Location of the store, for people and messages."""
        ...

    def manifest(self, name: str) -> StoredManifest:
        """Return the manifest of a tag or digest.

        Raises:
            FileNotFoundError: There is none.
            IntegrityError: It is larger than a manifest may be, or has another digest.
        """
        ...

    def blob_range(self, digest: str, offset: int, size_bytes: int) -> bytes:
        """Return exactly ``size_bytes`` of a blob from ``offset``; the caller must check their digest.

        Raises:
            FileNotFoundError: There is no such blob.
            IntegrityError: The blob holds fewer bytes there.
        """
        ...

    def blob_chunks(self, blob: Descriptor) -> Iterator[bytes]:
        """Yield a whole blob in pieces.

        Raises:
            FileNotFoundError: There is no such blob.
            IntegrityError: At the end: size or digest differ. Use nothing before the end.
        """
        ...

    def has_blob(self, digest: str) -> bool:
        """Return whether the store has a blob."""
        ...

    def push_blob(self, blob: Descriptor, opened: Opened) -> None:
        """Store a blob, unless it is there; it becomes visible atomically.

        Raises:
            IntegrityError: The bytes of ``opened`` do not match ``blob``.
        """
        ...

    def push_manifest(self, data: bytes, media_type: str, tag: str) -> str:
        """Store a manifest under its digest, and under ``tag``, replacing the tag's former one; return the digest."""
        ...

    def close(self) -> None:
        """Close the connections."""
        ...


def checked_chunks(blob: Descriptor, chunks: Iterator[bytes], *, name: str) -> Iterator[bytes]:
    """Pass chunks on, and raise at the end, or as soon as they are too many, if they do not match ``blob``.

    Raises:
        IntegrityError: Size or digest differ.
    """
    hasher, seen = hasher_of(blob.digest), 0
    for chunk in chunks:
        seen += len(chunk)
        if seen > blob.size:
            raise IntegrityError(
                f"{name}: blob {blob.digest} is longer than the {blob.size} bytes its manifest says"
            )
        hasher.update(chunk)
        yield chunk
    found = f"{hasher.name}:{hasher.hexdigest()}"
    if seen != blob.size or found != blob.digest:
        raise IntegrityError(
            f"{name}: blob {blob.digest} of {blob.size} bytes came as {seen} bytes with digest "
            f"{found}; what stores or carries it has altered it"
        )


def after(skip_bytes: int, chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the bytes of chunks after the first ``skip_bytes``."""
    for chunk in chunks:
        if kept := chunk[skip_bytes:]:
            yield kept
        skip_bytes = max(skip_bytes - len(chunk), 0)


@contextmanager
def wanted_by_manifest() -> Iterator[None]:
    """Raise the right error for a missing blob whose manifest is known: the image is incomplete.

    Raises:
        IntegrityError: A store inside the block says that it has no such blob.
    """
    try:
        yield
    except FileNotFoundError as error:
        if error.errno is not None:  # a file of this machine
            raise
        raise IntegrityError(
            f"{error}, and the image's manifest names it; push the image again"
        ) from error


def small_blob(store: ImageStore, blob: Descriptor) -> bytes:
    """Return a whole blob that is small by nature, such as a configuration or a table of contents.

    Raises:
        IntegrityError: It is larger than 64 MiB, or does not match the descriptor, or is missing.
    """
    if blob.size > MAX_SMALL_BLOB_BYTES:
        raise IntegrityError(
            f"{store.location}: blob {blob.digest} of type {blob.media_type} has {blob.size} "
            f"bytes, more than the {MAX_SMALL_BLOB_BYTES} read at once"
        )
    with wanted_by_manifest():
        return b"".join(store.blob_chunks(blob))


class MirroredStore(ImageStore):
    """Reads from mirrors in order and finally from the origin; writes only to the origin."""

    def __init__(
        self, origin: ImageStore, mirrors: Sequence[ImageStore], clock: Clock | None = None
    ) -> None:
        self._origin = origin
        self._mirrors = tuple(mirrors)
        self._clock = clock or SystemClock()
        self._back_at_s: dict[int, float] = {}

    @property
    @override
    def location(self) -> str:
        return self._origin.location

    @override
    def manifest(self, name: str) -> StoredManifest:
        # For tags the origin is asked first, because a mirror may lag behind it, and the mirrors only if the origin
        # does not answer.
        by_digest = name.startswith(("sha256:", "sha512:"))
        order = self._order() if by_digest else (self._origin, *self._mirrors)
        return self._first(order, lambda store: store.manifest(name), only_outages=not by_digest)

    @override
    def blob_range(self, digest: str, offset: int, size_bytes: int) -> bytes:
        return self._first(
            self._order(), lambda store: store.blob_range(digest, offset, size_bytes)
        )

    @override
    def blob_chunks(self, blob: Descriptor) -> Iterator[bytes]:
        """Yield a blob; if a store breaks off, the next one continues from there."""
        # Check the whole, because nobody checked the bytes that a store gave before it broke off.
        return checked_chunks(blob, self._chunks(blob), name=self.location)

    def _chunks(self, blob: Descriptor) -> Iterator[bytes]:
        order, at = self._order(), 0
        for number, store in enumerate(order, 1):
            try:
                for chunk in after(at, store.blob_chunks(blob)):
                    at += len(chunk)
                    yield chunk
            except _NEXT as error:
                # Wrong bytes that were passed on cannot be taken back.
                wrong = isinstance(error, IntegrityError) and at > 0
                if number == len(order) or wrong or self._is_final(store, error):
                    raise
                self._passed_over(store, error)
            else:
                return

    @override
    def has_blob(self, digest: str) -> bool:
        return self._origin.has_blob(digest)

    @override
    def push_blob(self, blob: Descriptor, opened: Opened) -> None:
        self._origin.push_blob(blob, opened)

    @override
    def push_manifest(self, data: bytes, media_type: str, tag: str) -> str:
        return self._origin.push_manifest(data, media_type, tag)

    @override
    def close(self) -> None:
        for store in (*self._mirrors, self._origin):
            store.close()

    def _order(self) -> tuple[ImageStore, ...]:
        """Return mirrors, then the origin; last, mirrors that did not answer a moment ago."""
        now_s = self._clock.now_s()
        away = [m for m in self._mirrors if self._back_at_s.get(id(m), now_s) > now_s]
        # Last, but not left out, because the origin may be the one that is gone.
        return (*(m for m in self._mirrors if m not in away), self._origin, *away)

    def _is_final(self, store: ImageStore, error: Exception) -> bool:
        """Return whether the origin itself says that there is no such thing."""
        return store is self._origin and isinstance(error, FileNotFoundError)

    def _passed_over(self, store: ImageStore, error: Exception) -> None:
        _log.warning("%s: %s; the next store is asked", store.location, error)
        if isinstance(error, UnavailableError):
            self._back_at_s[id(store)] = self._clock.now_s() + AWAY_S

    def _first(
        self,
        stores: Sequence[ImageStore],
        read: Callable[[ImageStore], Result],
        *,
        only_outages: bool = False,
    ) -> Result:
        turned_from = (UnavailableError,) if only_outages else _NEXT
        for store in stores[:-1]:
            try:
                return read(store)
            except turned_from as error:
                if self._is_final(store, error):
                    raise
                self._passed_over(store, error)
        return read(stores[-1])
