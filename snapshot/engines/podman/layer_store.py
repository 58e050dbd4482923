"""An additional layer store for Podman and CRI-O: a folder in which every image of a registry can be looked up.

Numbers of inodes::

    1                     the root
    1<<62 | R             a reference, the R-th that was found
    S<<32                 a layer's directory, the S-th that was found under a reference
    S<<32 | N             file N of that layer; 1 is ``diff`` itself
    S<<32 | 0xFFFFFFFF    ``info``
    S<<32 | 0xFFFFFFFE    ``blob``

The tree of an unused layer is freed.
"""

import base64
import errno
import os
import stat as stat_bits
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, ClassVar

from typing_extensions import override

from fusefs.bridge.api.blocking import BlockingFileSystem, Threaded
from fusefs.bridge.api.protocol import ROOT_INODE, Data, Entry, Named, Opened, Space
from fusefs.bridge.api.waiting import in_thread
from omniload.base.log import get_logger
from snapshot.engines.podman.images import (
    FILES,
    ServedImage,
    ServedImages,
    digest_of_name,
    info_of,
    reference_of,
)
from snapshot.engines.podman.uses import LayerUses
from snapshot.image.view.view import FOREVER_S, ImageView
from snapshot.oci.reference import Reference

__all__ = ["LayerStore", "LayerStoreFileSystem", "ShownLayer"]

_log = get_logger(__name__)

_REFERENCE = 1 << 62
_NUMBER = 0xFFFFFFFF
_INFO, _BLOB, _DIFF = 0xFFFFFFFF, 0xFFFFFFFE, 1
# Outside the range of inodes: only whole layers have handles that differ from their inodes.
_HANDLE = 1 << 61


@dataclass(slots=True, eq=False)
class ShownLayer:
    """A layer under one reference."""

    number: int
    reference: Reference
    digest: str
    served: ServedImage
    place: int
    view: ImageView | None = None
    """Files of the layer; None while nobody uses them."""

    @property
    def base(self) -> int:
        """Inode of its directory."""
        return self.number << 32

    @property
    def info(self) -> bytes:
        """Facts about the layer that the engine reads."""
        image = self.served.image
        index = self.served.indexes[self.place]
        assert index is not None, "only layers that can be read in parts are shown"
        layer, diff_id = image.layers[self.place], image.config.rootfs.diff_ids[self.place]
        return info_of(layer, diff_id, index.stream_bytes)


class LayerStore(BlockingFileSystem):
    """Answers requests about images and their layers.

    Only ``registries`` are asked, all if the list is empty. Whole layers that the engine wants are
    in ``scratch`` until they are closed.
    """

    inline: ClassVar[frozenset[str]] = frozenset(["statfs", "release"])

    def __init__(
        self,
        images: ServedImages,
        view_of: Callable[[ServedImage, int], ImageView],
        uses: LayerUses,
        *,
        registries: Sequence[str] = (),
        scratch: str | None = None,
    ) -> None:
        self._images, self._view_of, self._uses = images, view_of, uses
        self._registries, self._scratch = frozenset(registries), scratch
        self._references: dict[int, Reference] = {}
        self._numbers: dict[str, int] = {}
        self._layers: dict[int, ShownLayer] = {}
        self._places: dict[tuple[int, str], ShownLayer] = {}
        self._blobs: dict[int, BinaryIO] = {}
        self._next_handle = _HANDLE
        self._lock = threading.Lock()
        self._building = threading.Lock()

    def is_cached(self, inode: int) -> bool:
        """Return whether calls about an inode never wait, because it is of a tree in memory."""
        shown = self._layers.get(inode >> 32)
        return shown is not None and shown.view is not None and 0 < inode & _NUMBER < _BLOB

    @override
    def lookup(self, parent: int, name: bytes) -> Entry:
        if parent == ROOT_INODE:
            return self._reference(name)
        if parent & _REFERENCE:
            return _directory(self._layer(parent, name).base)
        shown, number = self._shown(parent)
        if number:
            return _moved(shown, self._view(shown).lookup(number, name))
        if name not in FILES:
            raise _missing()  # including "use", which is created but never exists
        return self.getattr(shown.base | {b"diff": _DIFF, b"info": _INFO, b"blob": _BLOB}[name])

    @override
    def getattr(self, inode: int) -> Entry:
        if inode == ROOT_INODE or inode & _REFERENCE:
            return _directory(inode)
        shown, number = self._shown(inode)
        if number == 0:
            return _directory(inode)
        if number == _INFO:
            return _file(inode, len(shown.info))
        if number == _BLOB:
            return _file(inode, shown.served.image.layers[shown.place].size)
        return _moved(shown, self._view(shown).getattr(number))

    @override
    def listing(self, inode: int) -> Sequence[Named]:
        if inode == ROOT_INODE or inode & _REFERENCE:
            return self._known(inode)
        shown, number = self._shown(inode)
        if number == 0:
            return [Named(name, self.lookup(inode, name)) for name in FILES]
        view = self._view(shown)
        return [Named(n.name, _moved(shown, n.entry)) for n in view.listing(number)]

    @override
    def readlink(self, inode: int) -> bytes:
        shown, number = self._file(inode)
        return self._view(shown).readlink(number)

    @override
    def open(self, inode: int, flags: int) -> Opened:
        shown, number = self._file(inode)
        # A read-only mount would not do, because the engine creates ``use`` in it, to count uses.
        if flags & (os.O_ACCMODE | os.O_TRUNC) != os.O_RDONLY:
            raise OSError(errno.EROFS, "a layer does not change")
        if number == _BLOB:
            return Opened(self._open_blob(shown), keep_cache=True)
        if number == _INFO:
            return Opened(inode, direct_io=True)
        return self._view(shown).open(number, flags)._replace(handle=inode)

    @override
    def release(self, handle: int) -> None:
        with self._lock:
            file = self._blobs.pop(handle, None)
        if file is not None:
            file.close()

    @override
    def try_read(self, handle: int, offset: int, size_bytes: int) -> Data | None:
        if handle & _HANDLE or not self.is_cached(handle):
            return None
        shown, number = self._file(handle)
        return self._view(shown).try_read(number, offset, size_bytes)

    @override
    def read(self, handle: int, offset: int, size_bytes: int) -> Data:
        if handle & _HANDLE:
            return os.pread(self._blobs[handle].fileno(), size_bytes, offset)
        shown, number = self._file(handle)
        if number == _INFO:
            return shown.info[offset : offset + size_bytes]
        return self._view(shown).read(number, offset, size_bytes)

    @override
    def xattrs(self, inode: int) -> Mapping[bytes, bytes]:
        number = inode & _NUMBER
        if inode == ROOT_INODE or inode & _REFERENCE or number in {0, _INFO, _BLOB}:
            return {}  # entries that the store adds have no attributes
        shown, _ = self._shown(inode)
        return self._view(shown).xattrs(number)

    @override
    def statfs(self) -> Space:
        return Space(inodes=len(self._layers))

    def use(self, inode: int) -> None:
        """Count one use more of the layer whose directory an inode is."""
        if inode == ROOT_INODE or inode & _REFERENCE or inode & _NUMBER:
            raise OSError(errno.EROFS, "a layer store does not change")
        shown, _ = self._shown(inode)
        image = shown.served.image.digest
        uses = self._uses.add(shown.reference, shown.digest, image)
        _log.info("%s: layer %s has %d uses", shown.reference, shown.digest, uses)

    def release_layer(self, parent: int, name: bytes) -> None:
        """Count one use less of a reference's layer; the tree of an unused layer is dropped."""
        reference = self._references.get(parent)
        digest = digest_of_name(name)
        if reference is None or digest is None:
            raise OSError(errno.EROFS, "a layer store does not change")
        # This includes a layer that was not looked up since the store was started, because the engine continues its
        # count.
        uses = self._uses.release(reference, digest)
        _log.info("%s: layer %s has %d uses left", reference, digest, uses)
        if uses == 0:
            with self._lock:
                shown = self._places.get((parent, digest))
                if shown is not None:
                    # Numbers depend on the layer alone, so a lookup by an old number builds the tree again.
                    shown.view = None

    def _known(self, inode: int) -> list[Named]:
        """Describe the entries looked up so far: references, or the layers of one."""
        with self._lock:
            references, layers = dict(self._references), list(self._layers.values())
        if inode == ROOT_INODE:
            texts = ((number, str(known).encode()) for number, known in references.items())
            return [Named(base64.b64encode(text), _directory(n)) for n, text in texts]
        here = (shown for shown in layers if str(shown.reference) == str(references[inode]))
        return [Named(shown.digest.encode(), _directory(shown.base)) for shown in here]

    def _reference(self, name: bytes) -> Entry:
        reference = reference_of(name, self._registries)
        if reference is None:
            raise _missing()
        if not self._uses.has(reference) and self._images.of(reference) is None:
            raise _missing()
        with self._lock:
            number = self._numbers.setdefault(str(reference), len(self._numbers) + 1)
            self._references[_REFERENCE | number] = reference
        return _directory(_REFERENCE | number)

    def _layer(self, parent: int, name: bytes) -> ShownLayer:
        reference, digest = self._references.get(parent), digest_of_name(name)
        if reference is None or digest is None:
            raise _missing()
        # Without the lock, because a known layer never disappears.
        if (known := self._places.get((parent, digest))) is not None:
            return known
        served = self._images.holding(reference, digest)
        place = None if served is None else served.place_of(digest)
        if served is None or place is None:
            raise _missing()
        with self._lock:
            # Another lookup may have been first: then its layer counts, and this number stays unused.
            number = len(self._layers) + 1
            made = ShownLayer(number, reference, digest, served, place)
            made = self._places.setdefault((parent, digest), made)
            self._layers[made.number] = made
        return made

    def _view(self, shown: ShownLayer) -> ImageView:
        view = shown.view
        if view is None:
            # Two concurrent lookups would each build the same tree.
            with self._building:
                if shown.view is None:
                    shown.view = self._view_of(shown.served, shown.place)
                return shown.view
        return view

    def _shown(self, inode: int) -> tuple[ShownLayer, int]:
        return self._layers[inode >> 32], inode & _NUMBER

    def _file(self, inode: int) -> tuple[ShownLayer, int]:
        if inode == ROOT_INODE or inode & _REFERENCE or not inode & _NUMBER:
            raise OSError(errno.EISDIR, "a directory of the store")
        return self._shown(inode)

    def _open_blob(self, shown: ShownLayer) -> int:
        """Fetch a whole layer and return a handle."""
        # Use a file without a name: its digest is checked before anybody reads it, and a kill leaves nothing.
        served = shown.served
        file = tempfile.TemporaryFile(prefix="omniload-blob-", dir=self._scratch)  # noqa: SIM115
        try:
            for chunk in served.store.blob_chunks(served.image.layers[shown.place]):
                file.write(chunk)
            file.flush()
        except BaseException:
            file.close()
            raise
        with self._lock:
            self._next_handle += 1
            self._blobs[self._next_handle] = file
            return self._next_handle


class LayerStoreFileSystem(Threaded):
    """A ``LayerStore`` in the form that bindings want. Look-ups are not counted, because numbers never change."""

    def __init__(self, store: LayerStore, workers: int = 16) -> None:
        super().__init__(store, workers)
        self._store = store

    @override
    async def _call(self, call: Callable[..., Any], *arguments: Any) -> Any:
        # Look-ups in a tree in memory never wait; all other calls may ask a registry.
        if arguments and call.__name__ != "read" and self._store.is_cached(arguments[0]):
            return call(*arguments)
        return await super()._call(call, *arguments)

    @override
    async def create(self, parent: int, name: bytes, mode: int, flags: int) -> tuple[Opened, Entry]:
        if name != b"use":
            raise OSError(errno.EROFS, "a layer store does not change")
        await in_thread(self._pool, self._store.use, parent)
        raise _missing()  # the answer that tells the engine that the use was counted

    @override
    async def rmdir(self, parent: int, name: bytes) -> None:
        await in_thread(self._pool, self._store.release_layer, parent, name)
        raise _missing()  # for the same reason as with ``use``


def _missing() -> OSError:
    return FileNotFoundError(errno.ENOENT, "not there")


def _directory(inode: int) -> Entry:
    """Describe a directory of the store itself."""
    # Only root may pass, because each name that is looked up asks a registry.
    mode = stat_bits.S_IFDIR | 0o500
    return Entry(inode, mode, nlink=2, entry_timeout_s=FOREVER_S, attr_timeout_s=FOREVER_S)


def _file(inode: int, size_bytes: int) -> Entry:
    mode = stat_bits.S_IFREG | 0o400
    return Entry(inode, mode, size_bytes, entry_timeout_s=FOREVER_S, attr_timeout_s=FOREVER_S)


def _moved(shown: ShownLayer, entry: Entry) -> Entry:
    """Return a file of a layer under its number in the store; inode 0 means that it does not exist."""
    return entry._replace(inode=shown.base | entry.inode) if entry.inode else entry
