"""A directory in the OCI image layout, compatible with ``skopeo``, ``umoci`` and ``buildah``.

::

    oci-layout               {"imageLayoutVersion": "1.0.0"}
    index.json               descriptors of manifests; a tag is an annotation
    blobs/sha256/4f53...     manifests, configurations and layers
"""

import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson
from typing_extensions import override

from omniload.base.errors import ConfigError, IntegrityError
from omniload.base.linux.file_lock import locked
from omniload.base.reading import kind_of, read_kept_file
from omniload.base.writing import write_whole
from snapshot.oci.digest import check_digest, digest_of, verified
from snapshot.oci.manifest import (
    INDEX_TYPE,
    MAX_MANIFEST_BYTES,
    Descriptor,
    Index,
    encode,
    parse_manifest,
)
from snapshot.oci.reference import check_tag
from snapshot.oci.store import ImageStore, Opened, StoredManifest, checked_chunks

__all__ = ["OciLayout"]

TAG = "org.opencontainers.image.ref.name"
_CHUNK_BYTES = 1 << 20


class OciLayout(ImageStore):
    """Images in a local directory.

    Raises:
        ConfigError: ``root`` is no layout of a supported version.
    """

    def __init__(self, root: str | Path) -> None:
        self._root = Path(root)
        try:
            version = orjson.loads(self._kept("oci-layout"))["imageLayoutVersion"]
        except (OSError, ValueError, KeyError, TypeError, IntegrityError) as error:
            raise ConfigError(
                f"{str(root)!r} is no OCI layout: {error}; give the folder that holds oci-layout"
            ) from error
        if version != "1.0.0":
            raise ConfigError(f"{str(root)!r} has layout version {version!r}, 1.0.0 is read")

    @classmethod
    def create(cls, root: str | Path) -> "OciLayout":
        """Open the layout at ``root``; make an empty one if there is nothing.

        Raises:
            ConfigError: Something else is there.
        """
        path = Path(root)
        path.mkdir(parents=True, exist_ok=True)
        if not any(path.iterdir()):
            (path / "blobs" / "sha256").mkdir(parents=True)
            _publish(path / "index.json", encode(Index(schema_version=2, manifests=())))
            # Last, so that after a kill the directory is not yet a layout for any tool.
            _publish(path / "oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
        return cls(path)

    @property
    @override
    def location(self) -> str:
        return f"oci:{self._root}"

    @override
    def manifest(self, name: str) -> StoredManifest:
        digest, media_type = name, ""
        if not name.startswith(("sha256:", "sha512:")):
            found = self._tagged(name)
            digest, media_type = found.digest, found.media_type
        with self._open(digest) as file:
            data = os.read(file, MAX_MANIFEST_BYTES + 1)
        verified(data, digest, name=f"{self.location}: manifest {name}")
        kind = parse_manifest(data, media_type, name=f"{self.location}: {name}").media_type
        return StoredManifest(data, kind or media_type, digest)

    @override
    def blob_range(self, digest: str, offset: int, size_bytes: int) -> bytes:
        parts, wanted = [], size_bytes
        with self._open(digest) as file:
            # The kernel limits one read to 2 GiB and may return less near that.
            while wanted and (part := os.pread(file, wanted, offset + size_bytes - wanted)):
                parts.append(part)
                wanted -= len(part)
        if wanted:
            raise IntegrityError(
                f"{self.location}: blob {digest} gives {size_bytes - wanted} of the {size_bytes} "
                f"bytes wanted at offset {offset}; it was cut short"
            )
        return b"".join(parts)

    @override
    def blob_chunks(self, blob: Descriptor) -> Iterator[bytes]:
        # Compare even a file of this machine, because other tools write there, too.
        with self._open(blob.digest) as file:
            chunks = iter(lambda: os.read(file, _CHUNK_BYTES), b"")
            yield from checked_chunks(blob, chunks, name=self.location)

    @override
    def has_blob(self, digest: str) -> bool:
        return self._path(digest).is_file()

    @override
    def push_blob(self, blob: Descriptor, opened: Opened) -> None:
        target = self._path(blob.digest)
        if target.is_file():
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        # A unique name, so that two concurrent pushes of one blob do not write into one file.
        temporary = target.with_name(f".{uuid.uuid4().hex}")
        try:
            with opened() as source, temporary.open("xb") as file:
                chunks = iter(lambda: source.read(_CHUNK_BYTES), b"")
                for chunk in checked_chunks(blob, chunks, name=self.location):
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    @override
    def push_manifest(self, data: bytes, media_type: str, tag: str) -> str:
        parse_manifest(data, media_type, name=f"{self.location}: new manifest")
        digest = digest_of(data)
        target = self._path(digest)
        # The bytes first, because the index must not name a missing blob.
        if not target.is_file():
            _publish(target, data)
        added = Descriptor(
            media_type=media_type,
            digest=digest,
            size=len(data),
            annotations={TAG: check_tag(tag)},
        )
        with locked(self._root):  # of two writers at once, each would lose the other's tag
            kept = [e for e in self._index().manifests if e.annotations.get(TAG) != tag]
            new = Index(schema_version=2, media_type=INDEX_TYPE, manifests=(*kept, added))
            _publish(self._root / "index.json", encode(new))
        return digest

    @override
    def close(self) -> None:
        pass

    def tags(self) -> tuple[str, ...]:
        """Return the names of the images in the layout."""
        # Signatures and other artifacts are in the same index, but are no images to choose from.
        images = (entry for entry in self._index().manifests if entry.artifact_type is None)
        names = (entry.annotations.get(TAG) for entry in images)
        return tuple(name for name in names if name is not None)

    def _tagged(self, tag: str) -> Descriptor:
        entries = self._index().manifests
        found = [entry for entry in entries if entry.annotations.get(TAG) == tag]
        if not found:
            raise FileNotFoundError(f"{self.location} has no {tag!r}, only {list(self.tags())}")
        return found[-1]  # tools that append leave older entries of a tag before it

    def _index(self) -> Index:
        data = self._kept("index.json")
        parsed = parse_manifest(data, INDEX_TYPE, name=f"{self.location}: index.json")
        if not isinstance(parsed, Index):
            raise IntegrityError(f"{self.location}: index.json is not an index; restore it")
        return parsed

    def _kept(self, name: str) -> bytes:
        return read_kept_file(
            self._root / name, most_bytes=MAX_MANIFEST_BYTES, what=f"an {name} of a layout"
        )

    def _path(self, digest: str) -> Path:
        algorithm, _, value = check_digest(digest).partition(":")
        return self._root / "blobs" / algorithm / value

    @contextmanager
    def _open(self, digest: str) -> Iterator[int]:
        try:
            # Without O_NONBLOCK, opening a pipe waits for a writer.
            file = os.open(self._path(digest), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise FileNotFoundError(f"{self.location} has no blob {digest}") from None
        try:
            mode = os.fstat(file).st_mode
            if not stat.S_ISREG(mode):
                raise IntegrityError(
                    f"{self.location}: blob {digest} is {kind_of(mode)}; restore it"
                )
            yield file
        finally:
            os.close(file)


def _publish(target: Path, data: bytes) -> None:
    """Put a file at ``target`` durably and atomically, replacing a file that may be there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, data, durable=True)
