"""The directory of a disk cache: locked by one process, which creates, finds and removes the files of copies."""

import contextlib
import errno
import fcntl
import os
import shutil
import stat as stat_bits
import uuid
from collections.abc import Iterator
from pathlib import Path

from fusefs.cache.disk_format import (
    COPIES,
    HEADER_BYTES,
    LEAVING,
    MARKER,
    CopyVersion,
    check_marker,
    encode_marker,
    entry_bytes,
    entry_of,
    footprint,
    header_of,
    map_bytes,
    num_units_of,
    size_in_map,
)
from omniload.base.errors import ConfigError, StateError

__all__ = ["CopyFiles", "CopyFolder", "DiskDirectory", "Stamp"]

Stamp = tuple[int, int, int]


class CopyFiles:
    """Open descriptors of one copy. The opener is their first user; the last user closes them.

    Not safe in threads by itself: its cache counts users under a lock.
    """

    def __init__(self, data: int, table: int) -> None:
        self._data = data
        self._table = table
        self._users = 1

    def acquire(self) -> None:
        """Count a user."""
        self._users += 1

    def release(self) -> None:
        """Count one user less; the last one closes the descriptors."""
        self._users -= 1
        if not self._users:
            os.close(self._data)
            os.close(self._table)

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Return bytes of the copy, fewer at its end."""
        data = os.pread(self._data, size_bytes, offset)
        # The kernel limits one read to 2 GiB and may return less near that.
        while data and len(data) < size_bytes:
            more = os.pread(self._data, size_bytes - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Write bytes of the copy."""
        view = memoryview(data)
        while view:
            done = os.pwrite(self._data, view, offset)
            view, offset = view[done:], offset + done

    def take(self, offset: int, size_bytes: int) -> None:
        """Allocate the disk's blocks of a range before a write.

        Raises:
            OSError: The disk is full, or worse; a part may have been allocated.
        """
        os.posix_fallocate(self._data, offset, size_bytes)

    def taken_bytes(self) -> int:
        """Return the bytes that the data takes on the disk now, according to the disk."""
        return os.fstat(self._data).st_blocks * 512

    def mark(self, unit: int, checksum: int) -> None:
        """Store the checksum of a unit in the map; 0 marks a missing unit."""
        os.pwrite(self._table, entry_bytes(checksum), entry_of(unit))

    def reopened(self) -> int:
        """Open the data for reading only, with an open file description of its own."""
        # Do not dup, which would share the position and the right to write.
        return os.open(f"/proc/self/fd/{self._data}", os.O_RDONLY | os.O_CLOEXEC)

    def stamp(self) -> Stamp:
        """Return a stamp that changes when anybody writes to the copy's data."""
        found = os.fstat(self._data)
        return found.st_ino, found.st_size, found.st_mtime_ns


class CopyFolder:
    """The files of copies below a root: created, opened and found. Its owner decides on order and room."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def data_path(self, name: str) -> Path:
        """Return the path of the data of a copy."""
        return self._root / COPIES / name[:2] / f"{name}.data"

    def map_path(self, name: str) -> Path:
        """Return the path of the map of a copy."""
        return self._root / COPIES / name[:2] / f"{name}.map"

    def _found(self) -> Iterator[tuple[str, int]]:
        """Yield the copies, least recently used first, with their bytes on the disk; incomplete pairs are removed."""
        whole = []
        for name, found in self._look():
            if found is None:
                self.data_path(name).unlink(missing_ok=True)
                self.map_path(name).unlink(missing_ok=True)
            else:
                whole.append((found[0], name, found[1]))
        for _, name, size_bytes in sorted(whole):
            yield name, size_bytes

    def _look(self) -> Iterator[tuple[str, tuple[int, int] | None]]:
        """Yield the copies, each with the result of ``_looked_at``."""
        # Use strings and descriptors, not Paths, because there may be thousands.
        copies = os.fspath(self._root / COPIES)
        # Look at folders alone: other entries, such as the remains of a file in use on NFS, are not ours.
        for folder in [each.path for each in os.scandir(copies) if each.is_dir()]:
            for name in {os.path.splitext(each)[0] for each in os.listdir(folder)}:  # noqa: PTH122, PTH208
                yield name, self._look_at(name)

    def _look_at(self, name: str) -> tuple[int, int] | None:
        at = f"{os.fspath(self._root / COPIES)}/{name[:2]}/{name}"
        return self._looked_at(f"{at}.data", f"{at}.map", name)

    def _looked_at(self, data_path: str, map_path: str, name: str) -> tuple[int, int] | None:
        """Return the last use of a copy in ns, and its bytes on the disk; ``None`` if a file is missing or broken."""
        try:
            data, table = os.stat(data_path), os.open(map_path, os.O_RDONLY | os.O_CLOEXEC)  # noqa: PTH116
        except FileNotFoundError:
            return None
        try:
            found, head = os.fstat(table), os.pread(table, HEADER_BYTES, 0)
            if size_in_map(head, found.st_size, name) != data.st_size:
                return None
            # The map's time is set at each open, so the order of use outlives the process.
            return found.st_mtime_ns, self._taken_by(data, table, num_units_of(found.st_size))
        finally:
            os.close(table)

    def _taken_by(self, data: os.stat_result, table: int, num_units: int) -> int:
        """Return the bytes that a copy takes on the disk; ``table`` is its open map."""
        del table
        # Count blocks instead of the size, because a copy is sparse.
        return data.st_blocks * 512 + footprint(num_units)

    def make(self, version: CopyVersion) -> CopyFiles:
        """Create the files of an empty copy.

        Raises:
            OSError: The disk is full, or worse; no file is left behind.
        """
        name = version.name
        data_path, map_path = self.data_path(name), self.map_path(name)
        data_path.parent.mkdir(exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        descriptors: list[int] = []
        try:
            for path, size in (
                (data_path, version.size_bytes),
                (map_path, map_bytes(version.num_units)),
            ):
                # Create a new file: to truncate a file that somebody still has open would truncate it for them.
                path.unlink(missing_ok=True)
                descriptors.append(os.open(path, flags, 0o600))
                os.ftruncate(descriptors[-1], size)
            os.pwrite(descriptors[1], header_of(version), 0)
        except OSError:
            for descriptor in descriptors:
                os.close(descriptor)
            data_path.unlink(missing_ok=True)
            map_path.unlink(missing_ok=True)
            raise
        return CopyFiles(descriptors[0], descriptors[1])

    def open(self, version: CopyVersion) -> tuple[CopyFiles, bytes] | None:
        """Open the files of a copy and return its map; None if there is no copy of this size."""
        name = version.name
        with contextlib.ExitStack() as opened:
            descriptors = []
            for path in (self.data_path(name), self.map_path(name)):
                try:
                    descriptors.append(os.open(path, os.O_RDWR))
                except OSError:
                    return None
                opened.callback(os.close, descriptors[-1])
            try:
                if os.fstat(descriptors[0]).st_size != version.size_bytes:
                    return None
                # Read one byte more, to detect a map that is too long.
                found = os.pread(descriptors[1], map_bytes(version.num_units) + 1, 0)
                os.utime(descriptors[1])  # time of the last use, for the next process
            except OSError:
                return None  # a failing disk costs the copy, but not the open of the file
            opened.pop_all()
        return CopyFiles(descriptors[0], descriptors[1]), found


class DiskDirectory(CopyFolder):
    """One directory for one process: a second process is refused, because each would keep its own account.

    The lock is the kernel's (``flock``), so a killed process does not leave it behind.

    Raises:
        ConfigError: The directory cannot be made or written, or holds something else.
        StateError: Another process uses it, or it is of another version.
    """

    def __init__(self, path: str) -> None:
        super().__init__(Path(path))
        try:
            # Copies do not carry the modes of their files, so no other user may look in.
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Files are removed here without asking, so the directory may hold nothing but a cache of ours.
            if not (self._root / MARKER).exists() and any(self._root.iterdir()):
                raise ConfigError(
                    f"disk cache {path!r} holds something else; give an empty or new directory"
                )
            _check_owner(path, self._root.stat())
            # A user who could write here earlier may have left a link to one of our files, or a pipe.
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            self._marker = os.open(self._root / MARKER, flags, 0o600)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise ConfigError(
                    f"disk cache {path!r}: {MARKER} is a symbolic link, which no cache of ours is; remove it"
                ) from error
            raise ConfigError(f"disk cache {path!r}: {error.strerror or error}") from error
        try:
            self._take(path)
        except BaseException:
            os.close(self._marker)
            raise

    def _take(self, path: str) -> None:
        try:
            # flock, not a number in a file, because the kernel releases it with the process, however that ends.
            fcntl.flock(self._marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in {errno.EAGAIN, errno.EACCES}:
                raise ConfigError(f"disk cache {path!r} takes no lock: {error}") from error
            raise StateError(
                f"disk cache {path!r} is used by another process; "
                "give each mount and each process a directory of its own"
            ) from None
        try:
            _check_owner(f"{path}/{MARKER}", marker := os.fstat(self._marker))
            if not stat_bits.S_ISREG(marker.st_mode):
                raise ConfigError(f"disk cache {path!r}: {MARKER} is no file; remove it")
            found = os.pread(self._marker, 4096, 0)
            if found:
                check_marker(found, path)
            else:
                # The directory is new, or its maker was killed here: nothing else was made yet.
                os.pwrite(self._marker, encode_marker(), 0)
            # Remove what a killed process did not remove.
            shutil.rmtree(self._root / LEAVING, ignore_errors=True)
            for folder in (COPIES, LEAVING):
                (self._root / folder).mkdir(exist_ok=True)
        except OSError as error:
            raise ConfigError(f"disk cache {path!r}: {error.strerror or error}") from error

    def close(self) -> None:
        """Release the directory for the next process."""
        os.close(self._marker)

    def found(self) -> list[tuple[str, int]]:
        """Return the copies in the directory, least recently used first, and their bytes on the disk.

        Anything that is not a complete pair of files, such as the rest of a crash, is removed.

        Raises:
            ConfigError: The directory cannot be read; its lock is released.
        """
        try:
            return list(self._found())
        except OSError as error:
            # Otherwise this process keeps the lock, and its next attempt would take it for that of another process.
            self.close()
            raise ConfigError(
                f"disk cache {str(self._root)!r} cannot be read: {error}; give another directory"
            ) from error

    def set_aside(self, name: str) -> list[Path]:
        """Move the files of a copy away at once; return the files that are still to be removed."""
        aside = []
        for path in (self.map_path(name), self.data_path(name)):
            target = self._root / LEAVING / uuid.uuid4().hex
            with contextlib.suppress(OSError):
                # Rename instead of removing, because the lock is held here, and freeing a large file's blocks takes a
                # while.
                path.rename(target)
                aside.append(target)
        return aside


def _check_owner(path: str, found: os.stat_result) -> None:
    """Refuse a directory of another user, or one that every user may write, because its copies would be trusted.

    Raises:
        ConfigError: It is such a directory.
    """
    if found.st_uid != os.geteuid():
        raise ConfigError(
            f"disk cache {path!r} belongs to user {found.st_uid}, and this process is user {os.geteuid()}; "
            "give a directory of your own"
        )
    if found.st_mode & stat_bits.S_IWOTH:
        mode = stat_bits.S_IMODE(found.st_mode)
        raise ConfigError(
            f"disk cache {path!r} has mode {mode:o}, so every user may write there; chmod o-w it, or give another"
        )
