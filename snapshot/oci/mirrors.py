"""Mirrors: other stores that may hold the same images, nearer or still up."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from typing_extensions import override

from omniload.base.errors import IntegrityError, UnavailableError
from omniload.base.log import get_logger
from snapshot.oci.manifest import Descriptor
from snapshot.oci.store import ImageStore, Opened, StoredManifest

__all__ = ["MirroredStore"]

_log = get_logger(__name__)
_NEXT = (FileNotFoundError, UnavailableError, IntegrityError)
"""What makes the next store worth asking; a wrong digest too, since the next may hold right bytes."""

Result = TypeVar("Result")


class MirroredStore(ImageStore):
    """Reads from mirrors in order and at last from the origin; writes to the origin alone.

    Tags are asked of the origin first, since a mirror may lag behind it, and of the
    mirrors only while the origin does not answer.
    """

    def __init__(self, origin: ImageStore, mirrors: Sequence[ImageStore]) -> None:
        self._origin = origin
        self._mirrors = tuple(mirrors)

    @property
    @override
    def location(self) -> str:
        return self._origin.location

    @override
    def manifest(self, name: str) -> StoredManifest:
        by_digest = name.startswith(("sha256:", "sha512:"))
        order = (*self._mirrors, self._origin) if by_digest else (self._origin, *self._mirrors)
        return _first(order, lambda store: store.manifest(name), only_outages=not by_digest)

    @override
    def blob_range(self, digest: str, offset: int, size_bytes: int) -> bytes:
        order = (*self._mirrors, self._origin)
        return _first(order, lambda store: store.blob_range(digest, offset, size_bytes))

    @override
    def blob_chunks(self, blob: Descriptor) -> Iterator[bytes]:
        """Yield a blob from one store: after the first piece there is no other to turn to."""
        for store in self._mirrors:
            try:
                if store.has_blob(blob.digest):
                    return store.blob_chunks(blob)
            except UnavailableError as error:
                _log.warning("mirror %s: %s; the next is asked", store.location, error)
        return self._origin.blob_chunks(blob)

    @override
    def has_blob(self, digest: str) -> bool:
        return self._origin.has_blob(digest)

    @override
    def push_blob(self, blob: Descriptor, opened: Opened) -> None:
        self._origin.push_blob(blob, opened)

    @override
    def push_manifest(self, data: bytes, media_type: str, tag: str | None = None) -> str:
        return self._origin.push_manifest(data, media_type, tag)

    @override
    def referrers(self, digest: str, artifact_type: str | None = None) -> tuple[Descriptor, ...]:
        return self._origin.referrers(digest, artifact_type)

    @override
    def close(self) -> None:
        for store in (*self._mirrors, self._origin):
            store.close()


def _first(
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
            _log.warning("%s: %s; the next store is asked", store.location, error)
    return read(stores[-1])
