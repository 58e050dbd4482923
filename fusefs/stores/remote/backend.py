"""The common part of stores that are built from a client's few calls: ``BackendStore``.

A client library (pyarrow, fsspec) becomes a ``Backend``. The store on top of it
depends on how a file can replace another: by a rename to a name that must be free (HDFS
through Java, sftp), by a rename that replaces atomically (HDFS itself; both in ``rename_store``), or by
a put (S3, GCS, Azure; in ``object_store``).
"""

import errno
from abc import abstractmethod
from collections.abc import Callable

from typing_extensions import override

from fusefs.stores.protocol import (
    RESERVED,
    Abandoned,
    Data,
    Entry,
    ObjectWriter,
    Store,
    Usage,
    check_rename,
    check_whole,
    is_at_or_below,
    name_of,
    not_empty,
    parent_of,
    stored_name,
)
from fusefs.stores.remote.bounded_client import BoundedFiles, BoundedNames
from fusefs.stores.remote.client import Backend, NameClient
from omniload.base.errors import IntegrityError, UnavailableError
from omniload.base.log import get_logger
from omniload.base.lru import Lru

__all__ = ["BackendStore"]

_LOG = get_logger(__name__)
_MOST_COMPLAINED = 1000


class BackendStore(Store):
    """The common part of these stores; subclasses define how a file replaces another."""

    def __init__(self, backend: Backend, *, sends_at_close: bool = False) -> None:
        self._files = BoundedFiles(backend, sends_at_close=sends_at_close)
        self._names: NameClient = BoundedNames(backend, self._files.callers)
        self._complained: Lru[str, None] = Lru(_MOST_COMPLAINED)
        """Directories for which it was logged that entries in them cannot be shown."""

    @property
    @override
    def location(self) -> str:
        return self._files.location

    @property
    @override
    def abandoned(self) -> Abandoned:
        callers = self._files.callers
        return Abandoned(callers.num_abandoned, callers.total_abandoned)

    def _find(self, path: str) -> Entry | None:
        return self._files.find(path)

    @override
    def stat(self, path: str) -> Entry:
        found = self._find(path)
        if found is None:
            above = parent_of(path)
            # The store's own directories are never files, so a look below them needs one request.
            if above and not is_at_or_below(path, RESERVED) and self._is_file(above):
                raise NotADirectoryError(errno.ENOTDIR, "a parent is a file", path)
            raise FileNotFoundError(errno.ENOENT, "nothing there", path)
        return found

    def _is_file(self, path: str) -> bool:
        found = self._find(path)
        return found is not None and not found.is_directory

    @override
    def listing(self, path: str) -> list[Entry]:
        return self._named(self._listed(path), path)

    def _listed(self, path: str) -> list[Entry]:
        # List first, because a listing with entries already proves that the directory exists.
        try:
            found = self._files.listing(path)
        except FileNotFoundError:
            if is_at_or_below(path, RESERVED):
                raise
            self._check_directory(path)
            # the directory was created, or replaced something, in between
            return self._files.listing(path)
        except (OSError, UnavailableError):
            self._check_directory(path)
            raise
        if not found or _may_be_itself(found, path):
            self._check_directory(path)
        return found

    def _named(self, found: list[Entry], path: str) -> list[Entry]:
        """Return the entries with names of their own; keys of an object store like ``a//b`` or ``a/../b`` lack one."""
        named = []
        for entry in found:
            where = f"a name in the listing of {path!r}"
            try:
                stored_name(entry.name, where=where)
            except IntegrityError as error:
                if path not in self._complained:
                    self._complained.put(path, None)
                    _LOG.warning("%s: %s; it is not shown", self.location, error)
            else:
                named.append(entry)
        return named

    def _check_directory(self, path: str) -> None:
        if not self.stat(path).is_directory:
            raise NotADirectoryError(errno.ENOTDIR, "not a directory", path)

    @override
    def read(self, path: str, offset: int, size_bytes: int) -> bytes:
        return self._read(self._files.read, path, offset, size_bytes) if size_bytes else b""

    @override
    def read_large(self, path: str, offset: int, size_bytes: int) -> bytes | memoryview:
        return self._read(self._files.read_large, path, offset, size_bytes)

    def _read(
        self, read: Callable[[str, int, int], Data], path: str, offset: int, size_bytes: int
    ) -> Data:
        try:
            return check_whole(read(path, offset, size_bytes), path, offset, size_bytes)
        except (FileNotFoundError, UnavailableError, IntegrityError):
            # Clients report a directory as missing, broken or empty. And a file that is being replaced is missing until
            # stat has finished the replacement.
            if self.stat(path).is_directory:
                raise IsADirectoryError(errno.EISDIR, "is a directory", path) from None
        return check_whole(read(path, offset, size_bytes), path, offset, size_bytes)

    @override
    def create(self, path: str) -> ObjectWriter:
        # Check first, because clients overwrite existing files silently.
        if self._files.find(path) is not None:
            raise FileExistsError(errno.EEXIST, "objects are written once", path)
        return self._files.open_new(path)

    @override
    def remove(self, path: str) -> None:
        if self.stat(path).is_directory:
            raise IsADirectoryError(errno.EISDIR, "is a directory", path)
        self._names.remove(path)

    @override
    def make_directory(self, path: str) -> None:
        if self._find(path) is not None:
            raise FileExistsError(errno.EEXIST, "something is there", path)
        self._names.make_directory(path)

    @override
    def remove_directory(self, path: str) -> None:
        # Entries whose names cannot be shown exist nevertheless, and some clients remove everything below.
        if self._listed(path):
            raise not_empty(path)
        self._names.remove_directory(path)

    @override
    def usage(self) -> Usage | None:
        return None

    @override
    def close(self) -> None:
        self._files.close()

    @override
    def rename(self, source: str, target: str) -> None:
        if source == target:
            self.stat(source)
            return
        there = self._check_rename(source, target)
        if there is not None and there.is_directory:
            self._names.remove_directory(target)
            there = None
        self._take_place(source, target, there)

    @abstractmethod
    def _take_place(self, source: str, target: str, there: Entry | None) -> None:
        """Rename to a target that the rules allow, which may be a file, but no directory."""

    def _check_rename(self, source: str, target: str) -> Entry | None:
        """Apply the rules of rename; return the entry at the target."""
        if target.startswith(f"{source}/"):
            raise OSError(errno.EINVAL, "a directory cannot go into itself", target)
        moved, there = self.stat(source), self._find(target)
        held = self._files.listing(target) if there is not None and there.is_directory else []
        check_rename(moved, there, held, target)
        return there

    def _write(self, path: str, data: bytes) -> None:
        writer = self._files.open_new(path)
        try:
            writer.write(data)
            writer.close()
        except BaseException:
            writer.abort()
            raise


def _may_be_itself(found: list[Entry], path: str) -> bool:
    """Return whether a listing may be of a file, because some clients list a file as its only content."""
    alone = len(found) == 1 and not found[0].is_directory
    return alone and (not path or found[0].name == name_of(path))
