"""A local directory, or anything the kernel mounts: NFS, Lustre, a disk.

Only regular files and directories of it are shown. Symbolic links that lie in it are neither shown nor
followed nor replaced, and nor are pipes and devices: whoever can write into the store must not be
able to lead its daemon, which may be root, elsewhere. (Links made through a mount are manifests.)
"""

import errno
import os
import stat as stat_bits
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from typing_extensions import override

from fusefs.mapped import mapped
from fusefs.stores.beneath import Beneath
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
from omniload.base.errors import UnavailableError

__all__ = ["LocalStore"]

_OUTAGE = frozenset({errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EAGAIN})
"""What a kernel file system says when what is behind it does not answer."""


class LocalStore(Store):
    """A directory, held open by its descriptor.

    Args:
        root: The directory.
        walks: As for ``Beneath``.

    Raises:
        ConfigError: ``root`` is not a directory.
    """

    def __init__(self, root: str | Path, *, walks: bool | None = None) -> None:
        self._at = Beneath(root, walks=walks)

    @property
    @override
    def location(self) -> str:
        return self._at.path.as_uri()

    @override
    def stat(self, path: str) -> Entry:
        with _errors(path):
            return _entry(path, self._at.stat(path))

    @override
    def listing(self, path: str) -> list[Entry]:
        entries = []
        with _errors(path):
            directory = self._at.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                with os.scandir(directory) as found:
                    for item in found:
                        # Removed between scan and stat: it is gone, which is what a listing should say.
                        with suppress(FileNotFoundError):
                            said = item.stat(follow_symlinks=False)
                            if _is_shown(said):
                                entries.append(_entry(item.name, said))
            finally:
                os.close(directory)
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
        with _errors(path):
            # Nobody writes to a pipe that was put in a file's place: its opening must not wait.
            file = self._at.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
            try:
                _check_shown(path, os.fstat(file))
                yield file
            finally:
                os.close(file)

    @override
    def create(self, path: str) -> ObjectWriter:
        with _errors(path):
            return _LocalWriter(self._open_new(path), self._at, path)

    @override
    def publish(self, path: str, data: bytes, before: Before | None = None) -> None:
        temporary = f"{TEMPORARY}/{uuid.uuid4().hex}"
        try:
            with _errors(path):
                writer = _LocalWriter(self._open_new(temporary), self._at, temporary)
                writer.write(data)
                writer.close()
                self._make_parents(path)
            if before is not None:
                before(self._entry_or_none(path))
            with _errors(path):
                self._move(temporary, path)
                _sync_directory(self._at, parent_of(path))
        except BaseException:
            with suppress(OSError):
                self._unlink(temporary)
            raise

    @override
    def rename(self, source: str, target: str) -> None:
        with _errors(source):
            self._make_parents(target)
            self._move(source, target)
            _sync_directory(self._at, parent_of(target))
            if parent_of(source) != parent_of(target):
                _sync_directory(self._at, parent_of(source))

    def _move(self, source: str, target: str) -> None:
        with self._at.parent(source) as (old, name), self._at.parent(target) as (new, new_name):
            os.rename(name, new_name, src_dir_fd=old, dst_dir_fd=new)

    @override
    def remove(self, path: str) -> None:
        with _errors(path):
            self._unlink(path)

    def _unlink(self, path: str) -> None:
        with self._at.parent(path) as (above, name):
            os.unlink(name, dir_fd=above)

    @override
    def make_directory(self, path: str) -> None:
        with _errors(path):
            self._make_parents(path)
            self._mkdir(path)

    def _mkdir(self, path: str) -> None:
        with self._at.parent(path) as (above, name):
            os.mkdir(name, dir_fd=above)
        _sync_directory(self._at, parent_of(path))

    @override
    def remove_directory(self, path: str) -> None:
        with _errors(path), self._at.parent(path) as (above, name):
            os.rmdir(name, dir_fd=above)

    @override
    def usage(self) -> Usage | None:
        with _errors(""):
            found = self._at.space()
        return Usage(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)

    @override
    def close(self) -> None:
        """Do nothing: the directory is let go with this object, when no call is under way any more."""

    def _entry_or_none(self, path: str) -> Entry | None:
        try:
            return self.stat(path)
        except FileNotFoundError:
            return None

    def _open_new(self, path: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            return self._at.open(path, flags, 0o644)
        except FileNotFoundError:
            self._make_parents(path)
            return self._at.open(path, flags, 0o644)

    def _make_parents(self, path: str) -> None:
        """Make missing parents, each of them durable."""
        above = parent_of(path)
        if not above:
            return
        try:
            os.close(self._at.open(above, os.O_PATH | os.O_DIRECTORY))
        except FileNotFoundError:
            self._make_parents(above)
            with suppress(FileExistsError):
                self._mkdir(above)


class _LocalWriter(ObjectWriter):
    def __init__(self, file: int, at: Beneath, path: str) -> None:
        self._file, self._at, self._path = file, at, path

    @override
    def write(self, data: bytes | bytearray | memoryview) -> None:
        with _errors(self._path):
            view = memoryview(data)
            while view:
                view = view[os.write(self._file, view) :]

    @override
    def close(self) -> None:
        file, self._file = self._file, -1
        with _errors(self._path):
            try:
                os.fsync(file)
            finally:
                os.close(file)
            _sync_directory(self._at, parent_of(self._path))

    @override
    def abort(self) -> None:
        with suppress(OSError):
            if self._file >= 0:
                os.close(self._file)
            with self._at.parent(self._path) as (above, name):
                os.unlink(name, dir_fd=above)


def _is_shown(found: os.stat_result) -> bool:
    return stat_bits.S_ISREG(found.st_mode) or stat_bits.S_ISDIR(found.st_mode)


def _check_shown(path: str, found: os.stat_result) -> None:
    if stat_bits.S_ISLNK(found.st_mode):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
    if not _is_shown(found):
        raise PermissionError(
            errno.EPERM, "is neither file nor directory; remove it from the store itself", path
        )


def _entry(path: str, found: os.stat_result) -> Entry:
    _check_shown(path, found)
    is_directory = stat_bits.S_ISDIR(found.st_mode)
    size = 0 if is_directory else found.st_size
    mode = stat_bits.S_IMODE(found.st_mode)
    return Entry(name_of(path), is_directory, size, found.st_mtime_ns, mode)


def _sync_directory(at: Beneath, path: str) -> None:
    """Make names in a directory durable: a rename is not until its directory is."""
    directory = at.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


@contextmanager
def _errors(path: str) -> Iterator[None]:
    """Have errors of the kernel be those of the protocol, with the path of the store in them."""
    try:
        yield
    except OSError as error:
        if error.errno in _OUTAGE:
            raise UnavailableError(f"{path!r}: the file system below answers: {error}") from error
        if error.errno == errno.ELOOP:
            raise OSError(
                errno.ELOOP,
                "a symbolic link of the store itself stands there or above, and is never followed; "
                "mount --bind shows a directory in two places",
                path,
            ) from error
        if error.errno is not None and error.filename != path:
            # Else it names the last component, or none.
            raise OSError(error.errno, error.strerror, path) from error
        raise
