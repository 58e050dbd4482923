"""Blobs and metadata of EROFS mounts in the cache folder of a node.

::

    CACHE/erofs/v2/layers/HEX.LAYOUT     blob of a layer, complete, named by the layer's digest
    CACHE/erofs/v2/images/HEX            metadata of an image, named by the digests of its layers
    CACHE/erofs/v2/filling/HEX.RANDOM    blob being filled by one mount, sparse

The same layer indexed in another way (its table of contents, another's index) has its files
in another order. So a blob's name tells its layout too, and metadata names the layouts it needs.

A blob gets its name under ``layers`` only when every byte of it was compared with a digest,
written and synced. Until then it belongs to one mount alone. The folder is its owner's only:
the kernel reads these files and compares nothing any more.
"""

import hashlib
import os
import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from omniload.base.errors import StateError
from omniload.base.log import get_logger
from snapshot.image.erofs_blobs import BlobLayout
from snapshot.image.erofs_format import BLOCK_BYTES, HEAD_BYTES, device_slots
from snapshot.image.erofs_writer import MetadataPlan, write_metadata
from snapshot.image.layer_index import LayerIndex
from snapshot.image.precontent_kernel import is_unused
from snapshot.private_folder import private_folder

__all__ = ["BlobCache", "Filling"]

_log = get_logger(__name__)

_VERSION = "v2"
_MAX_PATH_BYTES = 255
"""Of a path that the kernel takes as an option."""


@dataclass(slots=True)
class Filling:
    """A blob that one mount fills."""

    path: Path
    descriptor: int
    """Opened before anybody watched the file, so that writing to it asks nobody."""
    whole: Path
    """Its name once it is kept."""

    def close(self) -> None:
        """Let go of it; a file that has not been kept is removed."""
        os.close(self.descriptor)
        self.path.unlink(missing_ok=True)


class BlobCache:
    """The folder.

    Raises:
        StateError: Its path is too long for the kernel.
    """

    def __init__(self, cache: str | Path) -> None:
        self._root = Path(cache) / "erofs" / _VERSION
        for name in ("layers", "images", "filling"):
            (private_folder(self._root) / name).mkdir(exist_ok=True)
        longest = len(os.fsencode(self._root)) + len("/layers/") + 64 + 33
        if longest > _MAX_PATH_BYTES:
            raise StateError(
                f"paths in {str(self._root)!r} have up to {longest} bytes, the kernel takes "
                f"{_MAX_PATH_BYTES}; give a shorter cache folder"
            )

    @staticmethod
    def may_have(cache: str | Path, indexes: Iterable[LayerIndex]) -> bool:
        """Tell, cheaply and without making a folder, whether all layers with data may be whole here."""
        layers = Path(cache) / "erofs" / _VERSION / "layers"
        try:
            here = {name.partition(".")[0] for name in os.listdir(layers)}  # noqa: PTH208 -- names
        except FileNotFoundError:
            here = set()
        return here.issuperset(_hex(index.blob_digest) for index in _with_data(indexes))

    def whole(self, indexes: Sequence[LayerIndex]) -> tuple[Path, list[Path]] | None:
        """Return metadata and blobs of an image, if all are here; nothing is laid out for it."""
        path = self._image_of(indexes)
        slots, layers = _slots_of(path), _with_data(indexes)
        if slots is None or len(slots) != len(layers):
            return None
        blobs = [
            self._blob_of(index, tag.decode("ascii", "replace"))
            for index, (tag, _) in zip(layers, slots, strict=True)
        ]
        try:
            sizes = [blob.stat().st_size for blob in blobs]
        except FileNotFoundError:
            return None
        return (path, blobs) if sizes == [count * BLOCK_BYTES for _, count in slots] else None

    def complete(self, index: LayerIndex, layout: BlobLayout) -> Path | None:
        """Return the blob of a layer, if it is here whole."""
        path = self._blob_of(index, layout.name)
        with suppress(FileNotFoundError):
            if path.stat().st_size == layout.size_bytes:
                return path
        return None

    def begin(self, index: LayerIndex, layout: BlobLayout) -> Filling:
        """Return a new blob of a layer, all hole."""
        name = f"{_hex(index.blob_digest)}.{secrets.token_hex(8)}"
        path = self._root / "filling" / name
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        filling = Filling(path, descriptor, self._blob_of(index, layout.name))
        try:
            os.truncate(descriptor, layout.size_bytes)
        except OSError as error:
            filling.close()
            raise StateError(
                f"{str(path)!r} cannot be made {layout.size_bytes} bytes long: {error.strerror}; "
                "mount the image through FUSE"
            ) from error
        return filling

    def keep(self, filling: Filling) -> Path:
        """Name a blob that is whole by its layer and layout, durably, for every later mount.

        Raises:
            OSError: The disk did not take all of it; then it must not be read any more.
        """
        os.fsync(filling.descriptor)
        os.fchmod(filling.descriptor, 0o400)
        filling.path.replace(filling.whole)
        _sync_folder(filling.whole.parent)
        return filling.whole

    def metadata(self, plan: MetadataPlan, indexes: Sequence[LayerIndex]) -> Path:
        """Return the metadata of an image, written if it is not here or names other layouts."""
        path = self._image_of(indexes)
        names = [plan.blobs[layer].name.encode() for layer in plan.layers]
        if (slots := _slots_of(path)) is not None and [tag for tag, _ in slots] == names:
            return path
        temporary = self._root / "filling" / f"{path.name}.{secrets.token_hex(8)}"
        try:
            with temporary.open("xb") as file:
                file.writelines(write_metadata(plan, uuid=bytes.fromhex(path.name)[:16]))
                file.flush()
                os.fsync(file.fileno())
                temporary.replace(path)  # while it is open: what nobody has open may be cleared
        finally:
            temporary.unlink(missing_ok=True)
        _sync_folder(path.parent)
        return path

    def clear(self) -> int:
        """Remove blobs whose mount died; return how many."""
        return sum(map(_removed_if_unused, self._leftovers()))

    def _blob_of(self, index: LayerIndex, layout: str) -> Path:
        return self._root / "layers" / f"{_hex(index.blob_digest)}.{layout}"

    def _image_of(self, indexes: Iterable[LayerIndex]) -> Path:
        digest = hashlib.sha256("\n".join(index.blob_digest for index in indexes).encode())
        return self._root / "images" / digest.hexdigest()

    def _leftovers(self) -> Iterable[Path]:
        return list((self._root / "filling").iterdir())


def _slots_of(path: Path) -> tuple[tuple[bytes, int], ...] | None:
    """Return which blobs metadata names, and their blocks; what is no metadata is removed."""
    try:
        with path.open("rb") as file:
            return device_slots(file.read(HEAD_BYTES))
    except FileNotFoundError:
        return None
    except ValueError as error:
        _log.warning("%s is removed and written anew: %s", path, error)
        path.unlink(missing_ok=True)
        return None


def _with_data(indexes: Iterable[LayerIndex]) -> list[LayerIndex]:
    """Return the layers that have a blob."""
    return [
        index
        for index in indexes
        if any(extent.size_bytes for entry in index.entries for extent in entry.extents)
    ]


def _removed_if_unused(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        if is_unused(descriptor):
            path.unlink(missing_ok=True)
            return True
        return False
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hex(digest: str) -> str:
    return digest.removeprefix("sha256:")
