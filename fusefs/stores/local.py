"""A local directory, or anything the kernel mounts: NFS, Lustre, a disk."""

import errno
import os
import stat as stat_bits
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from typing_extensions import override

from fusefs.mapped import mapped
from fusefs.stores.protocol import (
    TEMPORARY,
    Before,
    Entry,
    ObjectWriter,
    Store,
    Usage,
    check_whole,
    name_of,
    parent_of,
)
from omniload.base.errors import ConfigError, UnavailableError

__all__ = ["LocalStore"]

_OUTAGE = frozenset({errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EAGAIN})
"""What a kernel file system says when what is behind it does not answer."""


class LocalStore(Store):
    """A directory. Only regular files and directories in it are shown.

    Raises:
        ConfigError: ``root`` is not a directory.
    """

    def __init__(self, root: str | Path) -> None:
        self._root = Path(root).resolve()
        if not self._root.is_dir():
            raise ConfigError(f"store {str(root)!r} is not a directory; make it first")

    @property
    @override
    def location(self) -> str:
        return self._root.as_uri()

    @override
    def stat(self, path: str) -> Entry:
        with _outages(path):
            return _entry(name_of(path), self._at(path).lstat())

    @override
    def listing(self, path: str) -> list[Entry]:
        entries = []
        with _outages(path), os.scandir(self._at(path)) as found:
            for item in found:
                # Removed between scan and stat: it is gone, which is what a listing should say.
                with suppress(FileNotFoundError):
                    if item.is_file(follow_symlinks=False) or item.is_dir(follow_symlinks=False):
                        entries.append(_entry(item.name, item.stat(follow_symlinks=False)))
        return entries

    @override
    def read(self, path: str, offset: int, size_bytes: int) -> bytes:
        with self._reading(path) as file:
            data = os.pread(file, size_bytes, offset)
            # The kernel caps one read at 2 GiB and may return less near that.
            while data and len(data) < size_bytes:
                more = os.pread(file, size_bytes - len(data), offset + len(data))
                if not more:
                    break
                data += more
        return check_whole(data, path, offset, size_bytes)

    @override
    def read_large(self, path: str, offset: int, size_bytes: int) -> memoryview:
        memory, filled = mapped(size_bytes), 0
        with self._reading(path) as file:
            while more := os.preadv(file, [memory[filled:]], offset + filled):
                filled += more
        return check_whole(memory[:filled], path, offset, size_bytes)

    @contextmanager
    def _reading(self, path: str) -> Iterator[int]:
        with _outages(path):
            file = os.open(self._at(path), os.O_RDONLY | os.O_NOFOLLOW)
            try:
                yield file
            finally:
                os.close(file)

    @override
    def create(self, path: str) -> ObjectWriter:
        with _outages(path):
            return _LocalWriter(self._open_new(path), self._at(path))

    @override
    def publish(self, path: str, data: bytes, before: Before | None = None) -> None:
        name = f"{TEMPORARY}/{uuid.uuid4().hex}"
        temporary, target = self._at(name), self._at(path)
        try:
            with _outages(path):
                writer = _LocalWriter(self._open_new(name), temporary)
                writer.write(data)
                writer.close()
                self._make_parents(path)
            if before is not None:
                before(self._entry_or_none(path))
            with _outages(path):
                temporary.replace(target)
                _sync_directory(target.parent)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise

    @override
    def rename(self, source: str, target: str) -> None:
        with _outages(source):
            self._make_parents(target)
            self._at(source).rename(self._at(target))
            _sync_directory(self._at(target).parent)
            if parent_of(source) != parent_of(target):
                _sync_directory(self._at(source).parent)

    @override
    def remove(self, path: str) -> None:
        with _outages(path):
            self._at(path).unlink()

    @override
    def make_directory(self, path: str) -> None:
        with _outages(path):
            self._make_parents(path)
            self._at(path).mkdir()
            _sync_directory(self._at(path).parent)

    @override
    def remove_directory(self, path: str) -> None:
        with _outages(path):
            self._at(path).rmdir()

    @override
    def usage(self) -> Usage | None:
        with _outages(""):
            found = os.statvfs(self._root)
        return Usage(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)

    @override
    def close(self) -> None:
        pass

    def _entry_or_none(self, path: str) -> Entry | None:
        try:
            return self.stat(path)
        except FileNotFoundError:
            return None

    def _at(self, path: str) -> Path:
        return self._root / path if path else self._root

    def _open_new(self, path: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            return os.open(self._at(path), flags, 0o644)
        except FileNotFoundError:
            self._make_parents(path)
            return os.open(self._at(path), flags, 0o644)

    def _make_parents(self, path: str) -> None:
        """Make missing parents, each of them durable."""
        above = parent_of(path)
        if above and not self._at(above).is_dir():
            self._make_parents(above)
            self._at(above).mkdir(exist_ok=True)
            _sync_directory(self._at(above).parent)


class _LocalWriter(ObjectWriter):
    def __init__(self, file: int, path: Path) -> None:
        self._file, self._path = file, path

    @override
    def write(self, data: bytes | bytearray | memoryview) -> None:
        with _outages(str(self._path)):
            view = memoryview(data)
            while view:
                view = view[os.write(self._file, view) :]

    @override
    def close(self) -> None:
        file, self._file = self._file, -1
        with _outages(str(self._path)):
            try:
                os.fsync(file)
            finally:
                os.close(file)
            _sync_directory(self._path.parent)

    @override
    def abort(self) -> None:
        with suppress(OSError):
            if self._file >= 0:
                os.close(self._file)
            self._path.unlink()


def _entry(name: str, found: os.stat_result) -> Entry:
    is_directory = stat_bits.S_ISDIR(found.st_mode)
    size = 0 if is_directory else found.st_size
    return Entry(name, is_directory, size, found.st_mtime_ns, stat_bits.S_IMODE(found.st_mode))


def _sync_directory(path: Path) -> None:
    """Make names in a directory durable: a rename is not until its directory is."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


@contextmanager
def _outages(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _OUTAGE:
            raise UnavailableError(f"{path!r}: the file system below answers: {error}") from error
        raise
