"""What an image is read from and pushed to, and what every such store promises alike.

Errors are part of the protocol, as they are for the stores of ``fusefs``:

- ``FileNotFoundError`` only where the store positively says that it has no such thing;
- ``UnavailableError`` for outages and time-outs: it may be retried, here or at a mirror;
- ``IntegrityError`` for bytes that are not those asked for: too few, or of another digest;
- ``ConfigError`` where credentials are refused.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from omniload.base.errors import IntegrityError
from snapshot.oci.digest import hasher_of
from snapshot.oci.manifest import Descriptor

__all__ = [
    "ImageStore",
    "Opened",
    "StoredManifest",
    "checked_chunks",
    "small_blob",
    "wanted_by_manifest",
]

Opened = Callable[[], BinaryIO]
"""Opens the bytes of a blob from their start; called once for each attempt to push them."""

MAX_SMALL_BLOB_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class StoredManifest:
    """A manifest or index as stored; ``data`` has ``digest``, it was compared."""

    data: bytes
    media_type: str
    digest: str


class ImageStore(Protocol):
    """One repository of a registry, or a layout directory. Safe in threads."""

    @property
    def location(self) -> str:
        """Where it is, for people and messages."""
        ...

    def manifest(self, name: str) -> StoredManifest:
        """Return the manifest of a tag or digest.

        Raises:
            FileNotFoundError: There is none.
            IntegrityError: It is larger than a manifest may be, or has another digest.
        """
        ...

    def blob_range(self, digest: str, offset: int, size_bytes: int) -> bytes:
        """Return exactly ``size_bytes`` of a blob from ``offset``; their digest is the caller's to check.

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
        """Store a blob, unless it is there; it is visible whole or not at all.

        Raises:
            IntegrityError: What ``opened`` gives is not what ``blob`` says.
        """
        ...

    def push_manifest(self, data: bytes, media_type: str, tag: str | None = None) -> str:
        """Store a manifest under its digest, and under ``tag`` over what had it; return the digest."""
        ...

    def close(self) -> None:
        """Let go of connections."""
        ...


def checked_chunks(blob: Descriptor, chunks: Iterator[bytes], *, name: str) -> Iterator[bytes]:
    """Pass chunks on, and raise at the end, or as soon as they are too many, if they are not ``blob``.

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


@contextmanager
def wanted_by_manifest() -> Iterator[None]:
    """Tell a blob that is missing as what it is to whoever has its manifest: an image that is not whole.

    Raises:
        IntegrityError: A store inside says that it has no such blob.
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
        IntegrityError: It is larger than 64 MiB, or not what the descriptor says, or missing.
    """
    if blob.size > MAX_SMALL_BLOB_BYTES:
        raise IntegrityError(
            f"{store.location}: blob {blob.digest} of type {blob.media_type} has {blob.size} "
            f"bytes, more than the {MAX_SMALL_BLOB_BYTES} read at once"
        )
    with wanted_by_manifest():
        return b"".join(store.blob_chunks(blob))
