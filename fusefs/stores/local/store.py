"""A local directory, or anything that the kernel mounts: NFS, Lustre, a disk.

The store shows only regular files and directories. It does not show, follow or replace symbolic links,
pipes and devices in the directory, because a user with write access to the store must not be
able to lead its daemon, which may be root, elsewhere. (Links made through a mount are manifests.)

Files that are written here get the permissions that their file shows in a mount, except permissions
to write. So a user without access to a file through a mount has none here either. Objects are not in the
folders of their file, which therefore do not protect them: but no other user can list them, and their names are random.
"""

import os
import stat as stat_bits
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from typing_extensions import override

from fusefs.base.huge_pages import huge_page_buffer
from fusefs.stores.handle_cache import never_changes
from fusefs.stores.local.beneath import (
    OBJECTS,
    Beneath,
    check_shown,
    entry_of,
    errors_of,
    hidden_mode,
    is_shown,
    mode_of_new,
    umask,
)
from fusefs.stores.local.durability import Settling, sync_all, sync_directory
from fusefs.stores.protocol import (
    RESERVED,
    TEMPORARY,
    Before,
    Entry,
    ObjectWriter,
    Store,
    Usage,
    check_whole,
    parent_of,
)
from omniload.base.errors import UnavailableError

__all__ = ["LocalStore"]

_PRIVATE = 0o600
_TO_READ, _TO_SEARCH = 0o044, 0o055
"""Permission bits that others may have on a file and on a directory; only the daemon may write here."""


class LocalStore(Store):
    """A directory, held open by its descriptor.

    Args:
        root: The directory.
        walks: Same as for ``Beneath``.

    Raises:
        ConfigError: ``root`` is not a directory.
    """

    def __init__(self, root: str | Path, *, walks: bool | None = None) -> None:
        self._at = Beneath(root, walks=walks)
        self._settling: Settling | None = None
        self._usual_mode = 0o644 & ~umask()
        self._are_hidden = False
        """Whether objects of older releases were protected, whose folders anybody could list."""

    @property
    @override
    def location(self) -> str:
        return self._at.path.as_uri()

    @property
    @override
    def keeps_modes(self) -> bool:
        return True

    @property
    @override
    def answers_at_once(self) -> bool:
        # A store that makes each file durable as it is published waits for the disk.
        return self._settling is not None and self._at.is_local_disk

    @override
    def stat(self, path: str) -> Entry:
        with errors_of(path):
            return entry_of(path, self._at.stat(path))

    @override
    def listing(self, path: str) -> list[Entry]:
        entries = []
        with errors_of(path):
            directory = self._at.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                with os.scandir(directory) as found:
                    for item in found:
                        # An entry may be removed between scan and stat; then the listing leaves it out.
                        with suppress(FileNotFoundError):
                            said = item.stat(follow_symlinks=False)
                            if is_shown(said):
                                entries.append(entry_of(item.name, said))
            finally:
                os.close(directory)
        return entries

    @override
    def read(self, path: str, offset: int, size_bytes: int) -> bytes:
        with self._reading(path) as file:
            data = os.pread(file, size_bytes, offset)
            # The kernel limits one read to 2 GiB and may return less near that.
            while data and len(data) < size_bytes:
                more = os.pread(file, size_bytes - len(data), offset + len(data))
                if not more:
                    break
                data += more
        return check_whole(data, path, offset, size_bytes)

    @override
    def read_large(self, path: str, offset: int, size_bytes: int) -> memoryview:
        memory, filled = huge_page_buffer(size_bytes), 0
        with self._reading(path) as file:
            while more := os.preadv(file, [memory[filled:]], offset + filled):
                filled += more
        return check_whole(memory[:filled], path, offset, size_bytes)

    @contextmanager
    def _reading(self, path: str) -> Iterator[int]:
        with errors_of(path):
            # A pipe may stand in a file's place without a writer, so opening it must not wait.
            file = self._at.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
            try:
                check_shown(path, os.fstat(file))
                yield file
            finally:
                os.close(file)

    @override
    def create(self, path: str) -> ObjectWriter:
        with errors_of(path):
            return _LocalWriter(self._open_new(path), self._at, path)

    @override
    def publish(
        self, path: str, data: bytes, before: Before | None = None, mode: int | None = None
    ) -> Entry | None:
        temporary = f"{TEMPORARY}/{uuid.uuid4().hex}"
        with errors_of(path):
            file = self._open_new(temporary)
        try:
            with errors_of(path):
                _write(file, data)
                if self._settling is None:
                    os.fsync(file)
                    self._make_parents(path)
            there = None
            if before is not None or self._settling is not None:
                there = self._entry_or_none(path)
            if before is not None:
                before(there)
            with errors_of(path):
                if self._settling is not None and there is not None:
                    # Make the new file durable before it replaces the old one, or a power failure could lose both.
                    self._settling.carry_out(lambda: os.fsync(file))
                # Set the mode before the move, so that a private file is never readable under its name.
                os.fchmod(file, self._mode_of_file(mode))
                self._move_in(temporary, path)
                return entry_of(path, os.fstat(file))
        except BaseException:
            with suppress(OSError):
                self._unlink(temporary)
            raise
        finally:
            os.close(file)

    def _move_in(self, temporary: str, path: str) -> None:
        try:
            self._move(temporary, path)
        except FileNotFoundError:
            self._make_parents(path)
            self._move(temporary, path)
        if self._settling is None:
            sync_directory(self._at, parent_of(path))
        else:
            self._settling.changed()

    @override
    def rename(self, source: str, target: str) -> None:
        with errors_of(source):
            self._make_parents(target)
            if self._settling is None:
                self._move(source, target)
                for above in {parent_of(target), parent_of(source)}:
                    sync_directory(self._at, above)
                return
            moved, there = self.stat(source), self._entry_or_none(target)
            if there is not None and not moved.is_directory:
                self._sync_path(source)  # for the same reason as in ``publish``
            self._move(source, target)
            if moved.is_directory:
                self._settling.directory_named(target)
            self._settling.changed()

    def _move(self, source: str, target: str) -> None:
        with self._at.parent(source) as (old, name), self._at.parent(target) as (new, new_name):
            os.rename(name, new_name, src_dir_fd=old, dst_dir_fd=new)

    @override
    def remove(self, path: str) -> None:
        with errors_of(path):
            self._unlink(path)

    def _unlink(self, path: str) -> None:
        with self._at.parent(path) as (above, name):
            os.unlink(name, dir_fd=above)

    @override
    def make_directory(self, path: str) -> None:
        with errors_of(path):
            self._make_parents(path)
            self._mkdir(path)

    def _mkdir(self, path: str) -> None:
        with self._at.parent(path) as (above, name):
            os.mkdir(name, mode_of_new(path), dir_fd=above)
        # Sync a folder of objects at once: objects are durable when they are closed, and so must be their folders.
        if self._settling is None or path.startswith(RESERVED):
            sync_directory(self._at, parent_of(path))
        else:
            self._settling.directory_named(path)

    @override
    def remove_directory(self, path: str) -> None:
        with errors_of(path), self._at.parent(path) as (above, name):
            os.rmdir(name, dir_fd=above)

    @override
    def usage(self) -> Usage | None:
        with errors_of(""):
            found = self._at.space()
        return Usage(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)

    @override
    def set_mode(self, path: str, mode: int | None) -> None:
        if not path:
            return  # the root belongs to the owner of the store
        with self._reading(path) as file:
            found = os.fstat(file)
            wanted = self._mode_of_file(mode)
            if stat_bits.S_ISDIR(found.st_mode):
                wanted = 0o700 | (0o755 if mode is None else mode) & _TO_SEARCH
            # Skip an unnecessary change, which would be refused for an entry of another user.
            if stat_bits.S_IMODE(found.st_mode) != wanted:
                os.fchmod(file, wanted)

    def _mode_of_file(self, mode: int | None) -> int:
        return self._usual_mode if mode is None else _PRIVATE | mode & _TO_READ

    @override
    def delay_syncs(self) -> None:
        self._settling = Settling(partial(sync_all, self._at))

    @override
    def sync(self, path: str = "") -> None:
        if self._settling is None:
            return
        if not path or not self._settling.is_reached(path):
            self._settling.settle()
            return
        self._sync_path(path)
        self._sync_path(parent_of(path))

    def _sync_path(self, path: str) -> None:
        assert self._settling is not None
        with self._reading(path) as file:
            self._settling.carry_out(lambda: os.fsync(file))

    @override
    def close(self) -> None:
        # The directory closes with this object, when no call runs any more.
        if self._settling is not None:
            self._settling.close()

    def _entry_or_none(self, path: str) -> Entry | None:
        try:
            return self.stat(path)
        except FileNotFoundError:
            return None

    def _open_new(self, path: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        # The final mode of the file is known when it is published.
        is_private = never_changes(path) or path.startswith(TEMPORARY)
        # Objects are not in the folders of their file, which do not protect them.
        mode = _PRIVATE if is_private else 0o644
        if is_private and not self._are_hidden:
            self._are_hidden = True
            self._hide_objects()
        try:
            return self._at.open(path, flags, mode)
        except FileNotFoundError:
            self._make_parents(path)
            return self._at.open(path, flags, mode)

    def _hide_objects(self) -> None:
        """Keep other users from listing the objects, as far as this user may."""
        with suppress(OSError, UnavailableError):
            below = [f"{OBJECTS}/{e.name}" for e in self.listing(OBJECTS) if e.is_directory]
            for path in (OBJECTS, TEMPORARY, *below):
                mode = self.stat(path).mode or 0
                if mode != (hidden := hidden_mode(path, mode)):
                    with self._reading(path) as folder:
                        os.fchmod(folder, hidden)

    def _make_parents(self, path: str) -> None:
        """Create missing parents, each of them durable."""
        above = parent_of(path)
        if not above:
            return
        try:
            os.close(self._at.open(above, os.O_PATH | os.O_DIRECTORY))
        except FileNotFoundError:
            self._make_parents(above)
            # Another thread, or another mount, may create the same parents.
            with suppress(FileExistsError):
                self._mkdir(above)


class _LocalWriter(ObjectWriter):
    def __init__(self, file: int, at: Beneath, path: str) -> None:
        self._file, self._at, self._path = file, at, path

    @override
    def write(self, data: bytes | bytearray | memoryview) -> None:
        with errors_of(self._path):
            _write(self._file, data)

    @override
    def close(self) -> None:
        # Take the number first: an abort after a failed close must not close a file that has reused it.
        file, self._file = self._file, -1
        with errors_of(self._path):
            try:
                os.fsync(file)
            finally:
                os.close(file)
            # Sync the directory as well, because fsync of a file makes no name durable.
            sync_directory(self._at, parent_of(self._path))

    @override
    def abort(self) -> None:
        file, self._file = self._file, -1  # for the same reason as in ``close``
        with suppress(OSError):
            if file >= 0:
                os.close(file)
            with self._at.parent(self._path) as (above, name):
                os.unlink(name, dir_fd=above)


def _write(file: int, data: bytes | bytearray | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
