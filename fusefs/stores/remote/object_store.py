"""Stores in which a put replaces a file atomically: S3, GCS, Azure."""

import errno
import uuid
from contextlib import suppress

from typing_extensions import override

from fusefs.stores.deadlines import allowing, renew
from fusefs.stores.protocol import (
    TEMPORARY,
    Before,
    Entry,
    Preferred,
    RenameBegunError,
    Store,
    stored_name,
)
from fusefs.stores.remote.backend import BackendStore
from fusefs.stores.remote.client import Backend, FileClient, NameClient
from omniload.base.errors import OmniloadError, UnavailableError

__all__ = ["ObjectStore"]

MiB = 1 << 20
# A request to such a store takes some milliseconds (and costs money) whatever its length, and one object is
# read and uploaded in as many concurrent parts as several objects are.
_OF_OBJECT_STORES = Preferred(
    stripe_count=1, longest_read=16 * MiB, read_ahead=64 * MiB, read_block=4 * MiB
)
_MOST_PUT_BYTES = 4 * MiB
"""Most bytes that clients send in one request, when a stream is closed."""


class ObjectStore(BackendStore):
    """A store on an object store: a put is atomic; a rename is a copy, and for a directory a copy of each file."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend, sends_at_close=True)
        self._root: Entry | None = None
        """Entry of the root, once found in a form that can never change."""

    @property
    @override
    def preferred(self) -> Preferred:
        return _OF_OBJECT_STORES

    @override
    def _find(self, path: str) -> Entry | None:
        if path:
            return self._files.find(path)
        # A mount's kernel asks for the root each second. A bucket's entry never changes if it has no time, and any
        # other call shows whether the bucket still answers.
        if (found := self._root) is None:
            found = self._files.find(path)
            if found is not None and found.is_directory and not found.mtime_ns:
                self._root = found
        return found

    @override
    def _is_file(self, path: str) -> bool:
        return self._files.is_file(path)

    @override
    def publish(
        self, path: str, data: bytes, before: Before | None = None, mode: int | None = None
    ) -> Entry | None:
        found = self._find(path)
        if found is not None and found.is_directory:
            raise IsADirectoryError(errno.EISDIR, "a directory is there", path)
        if before is not None:
            before(found)
        self._write(path, data)
        return None

    @override
    def _write(self, path: str, data: bytes) -> None:
        if len(data) > _MOST_PUT_BYTES:
            self._put_apart(path, data)
            return
        writer = self._files.open_new(path)
        writer.write(data)
        # Do not abort after a failure. To abort removes the object at the path, which is still the old file, or already
        # this one, if only the answer to the put was lost.
        writer.close()

    def _put_apart(self, path: str, data: bytes) -> None:
        """Put data that is sent in parts under another name first: closing a broken upload publishes its parts."""
        temporary = f"{TEMPORARY}/{uuid.uuid4().hex}"
        super()._write(temporary, data)
        try:
            with allowing(len(data)):
                self._names.move(temporary, path)
        except BaseException:
            with suppress(OSError, OmniloadError):
                self._names.remove(temporary)
            raise

    @override
    def _take_place(self, source: str, target: str, there: Entry | None) -> None:
        self._move_all(source, target)

    @override
    def go_on_renaming(self, source: str, target: str) -> None:
        # Otherwise the rename is already complete, though its answer was lost.
        if self._find(source) is not None or self._find(target) is None:
            self._move_all(source, target)

    def _move_all(self, source: str, target: str) -> None:
        try:
            _move(self, self._files, self._names, source, target)
        except UnavailableError as error:
            raise RenameBegunError(str(error)) from error


def _move(store: Store, files: FileClient, names: NameClient, source: str, target: str) -> None:
    """Copy and remove a file, or a whole directory."""
    moved = store.stat(source)
    if not moved.is_directory:
        with allowing(moved.size_bytes):
            names.move(source, target)
        renew()  # possibly one of many
        return
    found = files.listing(source)
    held = [stored_name(e.name, where=f"a name in the listing of {source!r}") for e in found]
    names.make_directory(target)
    for name in held:
        _move(store, files, names, f"{source}/{name}", f"{target}/{name}")
    names.remove_directory(source)
