"""A directory of copies that all processes of a node share: docs/design/samples/0036-shard-cache.md.

Bytes and maps of copies have the format of ``fusefs.cache.disk_format``. A byte is used because its checksum is right,
not because it exists. A process that takes room or removes a copy holds the lock of the account; readers hold no lock.
"""

import fcntl
import os
import stat
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from fusefs.cache.disk_directory import CopyFiles, CopyFolder
from fusefs.cache.disk_format import (
    COPIES,
    HEADER_BYTES,
    CopyVersion,
    decode_map,
    footprint,
    map_bytes,
)
from omniload.base.clock import Clock, SystemClock
from omniload.base.errors import ConfigError
from omniload.base.linux.file_lock import locked
from omniload.base.writing import FULL, write_whole
from omniload.source.stores import accounts
from omniload.source.stores.accounts import Leaving
from omniload.source.stores.blocks import (
    BLOCK_BYTES,
    CLAIMED,
    extent_of,
    how_many_fit,
    room_for,
    room_of,
    runs_of,
)

__all__ = ["SharedDirectory"]

_MARKER = "omniload-shard-cache.json"
_MARK = b'{"omniload_shard_cache":1}\n'
_ACCOUNT, _USERS, _ORDER = "account", "users", "order"
_DRAFT = f".{_MARKER}."
"""Prefix of the name of an incomplete marker, whose writer may be killed."""
_LOW = 0.95
"""Share of the limit that is left after copies are removed."""
_AT_ONCE = 64
"""Most copies that are removed at once, unless more must be."""
_PATIENCE_S, _PAUSE_S = 2.0, 0.002
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


_Made = TypeVar("_Made")


class _OutOfOrderError(Exception):
    """Room is needed, but the order in which copies leave is unknown."""


class SharedDirectory(CopyFolder):
    """Copies below a root, with one size limit for all processes that use it. Thread-safe, also across forks.

    A copy that a living process uses is not removed for another. With sequential reads of more than fits, removing the
    least recently used copy would remove each block before it is read again, while a full cache keeps serving its
    blocks. Of the copies that no process uses, the least recently used is removed first.

    Args:
        root: The directory; nothing is created before ``prepare``.
        limit_bytes: Size limit for the room of copies on the disk.
        clock: Clock for waiting for a lock.
    """

    def __init__(self, root: Path, limit_bytes: int, clock: Clock | None = None) -> None:
        super().__init__(root)
        self.root, self.limit_bytes = root, limit_bytes
        self._clock = clock or SystemClock()
        self._user, self._user_path = -1, root
        self._end_use: Callable[[], object] | None = None
        self._names: set[str] = set()
        self._leaving = Leaving()
        self._unsaid: list[str] = []

    def require_ours(self) -> None:
        """Raise an error for a directory that others may write, or that has other files: its files are removed freely.

        Raises:
            ConfigError: Others may write the directory, or it has other files.
            OSError: The directory cannot be checked; ``FileNotFoundError`` if it does not exist.
        """
        status = self.root.stat()
        found = set(os.listdir(self.root))  # noqa: PTH208 -- names alone
        # Recognised by its marker, which comes first; another process may have made it since the names were read.
        others = {name for name in found if not name.startswith(_DRAFT)}
        if _MARKER not in found and others and not (self.root / _MARKER).exists():
            raise ConfigError(
                f"{self.root} holds something else ({min(others)!r}); give an empty or new directory"
            )
        if status.st_uid != os.geteuid() or status.st_mode & _OTHERS_WRITE:
            raise ConfigError(
                f"{self.root} belongs to user {status.st_uid} with mode {stat.S_IMODE(status.st_mode):o}, so that "
                "another user could have written what lies there; give a directory that its owner alone may write"
            )
        if _MARKER in found and (mark := (self.root / _MARKER).read_bytes()[:4096]) not in {
            _MARK,
            b"",
        }:
            raise ConfigError(
                f"{self.root} is of another version, {mark!r:.60}; remove it, or give another directory"
            )

    def prepare(self) -> None:
        """Make the directory or find it, open its account, and reduce it to the limit.

        Raises:
            ConfigError: As for ``require_ours``.
            OSError: The directory cannot be made or read.
        """
        # Copies do not keep the modes of their files, so other users must have no access.
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.require_ours()
        # A power failure may leave an empty marker.
        if not (self.root / _MARKER).exists() or not (self.root / _MARKER).stat().st_size:
            write_whole(self.root / _MARKER, _MARK, mode=0o600)
        for folder in (COPIES, _USERS):
            (self.root / folder).mkdir(mode=0o700, exist_ok=True)
        (self.root / _ORDER).touch(0o600)  # a full disk may refuse it later
        with self._locked() as account:
            self._begin_use()
            if not accounts.is_believed(account):
                accounts.note(account, self._counted())
                accounts.believe(account)
            # Called only because it removes the files of dead processes.
            accounts.in_use(self.root / _USERS)
        # Copies that living processes use stay, even if another process had a higher limit.
        self._in_order(self._below_the_cap)

    def use(self, names: Iterable[str]) -> None:
        """Note that this process, and every process that it forks, uses copies; others learn this from ``say_use``."""
        for name in names:
            if name not in self._names:
                self._names.add(name)
                self._unsaid.append(name)

    @property
    def has_unsaid(self) -> bool:
        """Whether a name is noted that others do not know yet."""
        return bool(self._unsaid)

    def say_use(self) -> None:
        """Publish the copies that this process uses; valid while this process, or a process that it forked, lives.

        Raises:
            OSError: The file cannot be written, or another process holds the lock for too long; a later call publishes
                it.
        """
        with self._locked():
            self._say_use()

    def take_up(
        self, version: CopyVersion, blocks: Sequence[int]
    ) -> tuple[CopyFiles, Sequence[int]] | None:
        """Take room for blocks of a copy, for as many of the first blocks as fit.

        Room is taken on the disk and recorded in the map. So the count finds the room of a killed process, even on file
        systems that cannot allocate room in advance.

        Returns:
            The files, which the caller writes, marks and retires, and the blocks that have room there; ``None`` for
            none.

        Raises:
            OSError: The disk refuses, or another process holds the lock for too long. If the disk is full, unused
                copies have been removed for the next call.
        """
        try:
            return self._in_order(lambda looked: self._take_up(version, blocks, looked=looked))
        except OSError as error:
            if error.errno in FULL:
                self._give_way(len(blocks) * BLOCK_BYTES, version.name)
            raise

    def _take_up(
        self, version: CopyVersion, blocks: Sequence[int], *, looked: bool
    ) -> tuple[CopyFiles, Sequence[int]] | None:
        with self._locked() as account, ExitStack() as undoing:
            self._say_use()
            opened = self._sound(version)
            new = 0 if opened is not None else footprint(version.num_units)
            if opened is not None:
                undoing.callback(opened[0].release)
            sizes = [room_for(version.size_bytes, block) for block in blocks]
            used = self._with_room(account, new + sum(sizes), version.name, looked=looked)
            fitting = blocks[: how_many_fit(sizes, self.limit_bytes - used - new)]
            # Recorded before room is taken, so that after a crash in between the account is too high, never too low.
            accounts.note(account, used + (new + sum(sizes[: len(fitting)]) if fitting else 0))
            if not fitting:
                return None
            if opened is None:
                opened = self.make(version), np.zeros(version.num_units, np.uint64)
                undoing.callback(opened[0].release)
            files, sums_U = opened
            claimed, before = 0, files.taken_bytes()
            try:
                for run in runs_of(fitting):
                    start, stop = extent_of(version, run)
                    files.take(start, stop - start)
                for block, size in zip(fitting, sizes, strict=False):
                    if not sums_U[block]:
                        files.mark(block, CLAIMED)
                        claimed += size
            finally:
                # Room that a refusing disk gave before also belongs to the copy.
                accounts.note(account, used + new + max(claimed, files.taken_bytes() - before))
            undoing.pop_all()
            return files, fitting

    def held_bytes(self) -> int:
        """Return the used bytes of the account; 0 if there is none."""
        with suppress(OSError), (self.root / _ACCOUNT).open("rb") as account:
            return accounts.noted(account.fileno()) or 0
        return 0

    def bytes_of(self, version: CopyVersion) -> int:
        """Return the room that a copy takes on the disk; 0 if there is none."""
        with suppress(OSError):
            return self.data_path(version.name).stat().st_blocks * 512
        return 0

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Hold the lock of the account. The wait is short, because the process that holds it may be stopped.

        The file is opened each time, because a descriptor that a fork shares would let both processes in.

        Raises:
            OSError: The lock is held for longer, or the file cannot be opened.
        """
        end_s = self._clock.now_s() + _PATIENCE_S
        while True:
            with self._held(_ACCOUNT) as account:
                if account is not None:
                    yield account
                    return
            if self._clock.now_s() >= end_s:
                raise TimeoutError(
                    f"{self.root / _ACCOUNT}: locked by another process for {_PATIENCE_S:g} s"
                )
            self._clock.sleep(_PAUSE_S)

    @contextmanager
    def _held(self, name: str) -> Iterator[int | None]:
        """Hold the lock of a file that is opened here; ``None`` if another process has it."""
        with ExitStack() as lock:
            found: int | None = None
            with suppress(BlockingIOError):
                found = lock.enter_context(locked(self.root / name, waits=False, writable=True))
            yield found

    def _sound(self, version: CopyVersion) -> tuple[CopyFiles, NDArray[np.uint64]] | None:
        """Return the files and checksums of a copy; a copy with a damaged map is removed, and ``None`` is returned."""
        if (opened := self.open(version)) is None:
            return None
        if (sums_U := decode_map(opened[1], version)) is not None:
            return opened[0], sums_U
        opened[0].release()
        # Its room stays in the account, like that of a killed process, until all copies are counted.
        self._remove(version.name)
        return None

    def _in_order(self, attempt: Callable[[bool], _Made]) -> _Made:
        """Run a call that may need room, and, if it finds none, again after a look at all copies."""
        with suppress(_OutOfOrderError):
            return attempt(False)
        self._put_in_order()
        return attempt(True)

    def _put_in_order(self) -> None:
        """Find the order in which copies leave, without the lock, because a hundred thousand copies take seconds."""
        with self._held(_ORDER) as order:
            if order is None:
                return  # another process does it
            with self._locked() as account:
                before, stamp = accounts.noted(account), os.fstat(order).st_mtime_ns
            looked = dict(self._look())
            whole = sorted((found[0], name, found[1]) for name, found in looked.items() if found)
            with self._locked() as account:
                for name in [name for name, found in looked.items() if found is None]:
                    # The copy may have been in the making.
                    if self._look_at(name) is None:
                        self._remove(name)
                now = accounts.noted(account)
                # No copy leaves while the order is locked, so an earlier account above the counted sum was too high.
                if before is not None and now is not None and stamp == os.fstat(order).st_mtime_ns:
                    accounts.note(account, now - max(0, before - sum(size for _, _, size in whole)))
            self._leaving.find((name, used_ns) for used_ns, name, _ in whole)

    def _below_the_cap(self, looked: bool) -> None:
        with self._locked() as account:
            self._with_room(account, 0, "", looked=looked)

    def _with_room(self, account: int, wanted: int, name: str, *, looked: bool) -> int:
        """Make room for a copy, as far as others may leave, or ask for a look at all copies; return the used bytes."""
        used = accounts.noted(account)
        if used is None:
            accounts.note(account, used := self._counted())
        if used + wanted > self.limit_bytes:
            # More than is needed, so that room is not made for each single block.
            need = self.limit_bytes - wanted
            target = min(need, int(_LOW * self.limit_bytes))
            used = self._without(account, range(target, need), used, name)
            if used + wanted > self.limit_bytes and not looked:
                raise _OutOfOrderError
        return used

    def _give_way(self, wanted: int, name: str) -> None:
        """Make room on a disk that is full below the limit, because others fill it as well."""

        def give(looked: bool) -> None:
            with self._locked() as account:
                used = accounts.noted(account) or 0
                target = int(_LOW * used) - wanted
                targets = range(target, used - wanted)
                if self._without(account, targets, used, name) > targets.stop and not looked:
                    raise _OutOfOrderError

        self._in_order(give)

    def _without(self, account: int, targets: range, used: int, name: str) -> int:
        """Remove unused copies, except one, until ``targets`` are met; return the used bytes.

        The end of ``targets`` must be reached; the start is only reached as far as one batch of copies allows.
        """
        in_use = {*accounts.in_use(self.root / _USERS), name}
        with self._held(_ORDER) as order:
            known, removed = iter(()) if order is None else self._leaving.take(), 0
            # In batches, so that a process that waits for the lock does not wait for the removal of a twentieth of all
            # copies.
            while used > (targets.start if removed < _AT_ONCE else targets.stop):
                leaves, used_ns = next(known, ("", 0))
                if not leaves:
                    break
                found = None if leaves in in_use else self._look_at(leaves)
                if found is not None and found[0] == used_ns:  # otherwise it was used meanwhile
                    self._remove(leaves)
                    used, removed = used - found[1], removed + 1
        accounts.note(account, used)
        return used

    def _begin_use(self) -> None:
        """Make the file that lists the copies in use; its lock ends with the last process that has it open."""
        if self._end_use is not None:
            if self._user_path.exists():
                return
            # It vanished with the directory, which was made again.
            self._end_use()
            self._end_use, self._unsaid = None, list(self._names)
        self._user_path = self.root / _USERS / uuid.uuid4().hex
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._user = os.open(self._user_path, flags, 0o600)
        # Closed without unlocking, because forked processes continue to use it.
        self._end_use = weakref.finalize(self, os.close, self._user)
        fcntl.flock(self._user, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _say_use(self) -> None:
        """Write the names that others do not know yet. The lock is held, so that forked processes take turns."""
        self._begin_use()
        saying = list(self._unsaid)
        held = memoryview(b"".join(map(bytes.fromhex, saying)))
        # Overwrites an entry that a full disk cut short, because names begin at multiples of their size.
        at = os.fstat(self._user).st_size // accounts.NAME_BYTES * accounts.NAME_BYTES
        while held:
            done = os.pwrite(self._user, held, at)
            held, at = held[done:], at + done
        del self._unsaid[: len(saying)]

    def _counted(self) -> int:
        # Tells concurrent looks that an earlier account is no longer a valid measure.
        os.utime(self.root / _ORDER)
        return sum(size for _, size in self._found())

    @override
    def _taken_by(self, data: os.stat_result, table: int, num_units: int) -> int:
        # The disk shows allocated room; without allocation, the map shows it, and the disk only after a write.
        found = os.pread(table, map_bytes(num_units) - HEADER_BYTES, HEADER_BYTES)
        whole = len(found) == map_bytes(num_units) - HEADER_BYTES > 0
        claimed = room_of(data.st_size, np.frombuffer(found, "<u8")) if whole else 0
        return max(data.st_blocks * 512, claimed) + footprint(num_units)

    def _remove(self, name: str) -> None:
        for path in (self.map_path(name), self.data_path(name)):
            path.unlink(missing_ok=True)
