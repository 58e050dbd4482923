"""A directory of copies that all processes of a node share, under one cap: docs/design/samples/0036-shard-cache.md.

The bytes and maps of copies are those of ``fusefs.cache.disk_format``: a byte is used where its checksum says so, and
not because it lies there. Whoever takes room or removes a copy holds the lock of the account; whoever reads holds
nothing.
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
"""What the name of a marker begins with that is not whole yet; whoever makes it may be killed."""
_LOW = 0.95
"""Share of the cap that is left once copies have to leave."""
_AT_ONCE = 64
"""Copies that leave at once, where more need not."""
_PATIENCE_S, _PAUSE_S = 2.0, 0.002
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


_Made = TypeVar("_Made")


class _OutOfOrderError(Exception):
    """Room is wanted, and no copy is known that may leave."""


class SharedDirectory(CopyFolder):
    """Copies below a root, whose cap holds over all processes that use it. Safe in threads, and across forks.

    A copy that a living process uses leaves for no other: of a reading in order over more than fits, least recently
    used would put out each block before it comes again, where a cache that has filled up serves what it holds. Of the
    copies that nobody uses the least recently used leaves first.

    Args:
        root: The directory; nothing is made before ``prepare``.
        limit_bytes: The cap, of what copies take on the disk.
        clock: For the patience with a lock.
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
        """Refuse a directory that others may write, or that holds something else: files in it are removed unasked.

        Raises:
            ConfigError: It is one.
            OSError: It cannot be looked at; ``FileNotFoundError`` where it is not there.
        """
        status = self.root.stat()
        found = set(os.listdir(self.root))  # noqa: PTH208 -- names alone
        # Told by its marker, which comes first: another process may have made it since the names were read.
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
        """Make the directory or find it, take up its account, and bring it under the cap.

        Raises:
            ConfigError: As ``require_ours``.
            OSError: It cannot be made or read.
        """
        # Copies bear no modes of their files: nobody else may look in.
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.require_ours()
        # An empty one is what a power cut leaves of it.
        if not (self.root / _MARKER).exists() or not (self.root / _MARKER).stat().st_size:
            write_whole(self.root / _MARKER, _MARK, mode=0o600)
        for folder in (COPIES, _USERS):
            (self.root / folder).mkdir(mode=0o700, exist_ok=True)
        (self.root / _ORDER).touch(0o600)  # a full disk may not give it later
        with self._locked() as account:
            self._begin_use()
            if not accounts.is_believed(account):
                accounts.note(account, self._counted())
                accounts.believe(account)
            # Nothing is taken here, and yet: what dead ones left in users is removed.
            accounts.in_use(self.root / _USERS)
        # What living processes use stays, though another had a higher limit.
        self._in_order(self._below_the_cap)

    def use(self, names: Iterable[str]) -> None:
        """Note that this process, with all that it forks, uses copies; others see it from ``say_use`` on."""
        for name in names:
            if name not in self._names:
                self._names.add(name)
                self._unsaid.append(name)

    @property
    def has_unsaid(self) -> bool:
        """Whether a name was noted that others do not see yet."""
        return bool(self._unsaid)

    def say_use(self) -> None:
        """Have others see what this process uses; it stays while this process, or one that it forked, lives.

        Raises:
            OSError: It cannot be written, or another process holds the lock for too long; it is said later.
        """
        with self._locked():
            self._say_use()

    def take_up(
        self, version: CopyVersion, blocks: Sequence[int]
    ) -> tuple[CopyFiles, Sequence[int]] | None:
        """Take room for blocks of a copy, as many of the first ones as fit.

        Room is taken on the disk itself and claimed in the map, so that what a killed process had taken is found by
        whoever counts, on file systems too that give no room ahead.

        Returns:
            The files, for the caller to write, mark and retire, and the blocks that have room there; ``None`` for none.

        Raises:
            OSError: The disk refuses, or another process holds the lock for too long. Of a disk that is full copies
                that nobody uses have left, for the next who asks.
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
            # Ahead of what is taken: ended in between, the account says too much and never too little.
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
                # What a disk that refuses has given before is its as well.
                accounts.note(account, used + new + max(claimed, files.taken_bytes() - before))
            undoing.pop_all()
            return files, fitting

    def held_bytes(self) -> int:
        """Return what the account says is taken; 0 where there is none."""
        with suppress(OSError), (self.root / _ACCOUNT).open("rb") as account:
            return accounts.noted(account.fileno()) or 0
        return 0

    def bytes_of(self, version: CopyVersion) -> int:
        """Return what a copy takes on the disk; 0 where there is none."""
        with suppress(OSError):
            return self.data_path(version.name).stat().st_blocks * 512
        return 0

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Hold the account, of which nobody is waited for long: whoever holds it may be stopped.

        A description of its own each time: one that a fork shares would let both in.

        Raises:
            OSError: It is held for longer, or cannot be opened.
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
        """Hold a file, open, for as long as nobody else does; ``None`` where somebody has it."""
        with ExitStack() as lock:
            found: int | None = None
            with suppress(BlockingIOError):
                found = lock.enter_context(locked(self.root / name, waits=False, writable=True))
            yield found

    def _sound(self, version: CopyVersion) -> tuple[CopyFiles, NDArray[np.uint64]] | None:
        """Return the files and checksums of a copy; one whose map is damaged is removed, and there is none."""
        if (opened := self.open(version)) is None:
            return None
        if (sums_U := decode_map(opened[1], version)) is not None:
            return opened[0], sums_U
        opened[0].release()
        # It stays in the account, as what a killed process had taken does, until all copies are looked at.
        self._remove(version.name)
        return None

    def _in_order(self, attempt: Callable[[bool], _Made]) -> _Made:
        """Carry out what may need room; it is told whether all copies were looked at for it, once it found none."""
        with suppress(_OutOfOrderError):
            return attempt(False)
        self._put_in_order()
        return attempt(True)

    def _put_in_order(self) -> None:
        """Find in which order copies leave, without the lock: of a hundred thousand it takes seconds."""
        with self._held(_ORDER) as order:
            if order is None:
                return  # to another process
            with self._locked() as account:
                before, stamp = accounts.noted(account), os.fstat(order).st_mtime_ns
            looked = dict(self._look())
            whole = sorted((found[0], name, found[1]) for name, found in looked.items() if found)
            with self._locked() as account:
                for name in [name for name, found in looked.items() if found is None]:
                    # It may have been in the making.
                    if self._look_at(name) is None:
                        self._remove(name)
                now = accounts.noted(account)
                # Nothing leaves while the order is held: what an account of before says more is said too much.
                if before is not None and now is not None and stamp == os.fstat(order).st_mtime_ns:
                    accounts.note(account, now - max(0, before - sum(size for _, _, size in whole)))
            self._leaving.find((name, used_ns) for used_ns, name, _ in whole)

    def _below_the_cap(self, looked: bool) -> None:
        with self._locked() as account:
            self._with_room(account, 0, "", looked=looked)

    def _with_room(self, account: int, wanted: int, name: str, *, looked: bool) -> int:
        """Make room for a copy, as far as others may leave, or ask for a look at all; return what is taken then."""
        used = accounts.noted(account)
        if used is None:
            accounts.note(account, used := self._counted())
        if used + wanted > self.limit_bytes:
            # More than is wanted, so that room is not made for each block.
            need = self.limit_bytes - wanted
            target = min(need, int(_LOW * self.limit_bytes))
            used = self._without(account, range(target, need), used, name)
            if used + wanted > self.limit_bytes and not looked:
                raise _OutOfOrderError
        return used

    def _give_way(self, wanted: int, name: str) -> None:
        """Make room on a disk that is full below the cap: others fill it as well."""

        def give(looked: bool) -> None:
            with self._locked() as account:
                used = accounts.noted(account) or 0
                target = int(_LOW * used) - wanted
                targets = range(target, used - wanted)
                if self._without(account, targets, used, name) > targets.stop and not looked:
                    raise _OutOfOrderError

        self._in_order(give)

    def _without(self, account: int, targets: range, used: int, name: str) -> int:
        """Remove copies that nobody uses, but for one, until ``targets`` are met; return what is taken then.

        Their end has to be; their start only by copies that leave at once.
        """
        in_use = {*accounts.in_use(self.root / _USERS), name}
        with self._held(_ORDER) as order:
            known, removed = iter(()) if order is None else self._leaving.take(), 0
            # In parts: whoever waits for the lock is not to wait for a twentieth of all copies to be removed.
            while used > (targets.start if removed < _AT_ONCE else targets.stop):
                leaves, used_ns = next(known, ("", 0))
                if not leaves:
                    break
                found = None if leaves in in_use else self._look_at(leaves)
                if found is not None and found[0] == used_ns:  # else it was used since
                    self._remove(leaves)
                    used, removed = used - found[1], removed + 1
        accounts.note(account, used)
        return used

    def _begin_use(self) -> None:
        """Make the file that says what this process uses; the lock on it ends with the last who has it open."""
        if self._end_use is not None:
            if self._user_path.exists():
                return
            # Gone with the directory, which was made anew.
            self._end_use()
            self._end_use, self._unsaid = None, list(self._names)
        self._user_path = self.root / _USERS / uuid.uuid4().hex
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._user = os.open(self._user_path, flags, 0o600)
        # Closed and not unlocked: what was forked goes on using it.
        self._end_use = weakref.finalize(self, os.close, self._user)
        fcntl.flock(self._user, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _say_use(self) -> None:
        """Write the names that others do not see yet; the lock is held, so those of a fork come one after the other."""
        self._begin_use()
        saying = list(self._unsaid)
        held = memoryview(b"".join(map(bytes.fromhex, saying)))
        # Over what a full disk has cut short: names lie where a multiple of their bytes is.
        at = os.fstat(self._user).st_size // accounts.NAME_BYTES * accounts.NAME_BYTES
        while held:
            done = os.pwrite(self._user, held, at)
            held, at = held[done:], at + done
        del self._unsaid[: len(saying)]

    def _counted(self) -> int:
        # Told to whoever looks at this moment: what an account of before said is no measure any more.
        os.utime(self.root / _ORDER)
        return sum(size for _, size in self._found())

    @override
    def _taken_by(self, data: os.stat_result, table: int, num_units: int) -> int:
        # Where room is given ahead the disk says it; elsewhere the map does, and the disk once it was written to.
        found = os.pread(table, map_bytes(num_units) - HEADER_BYTES, HEADER_BYTES)
        whole = len(found) == map_bytes(num_units) - HEADER_BYTES > 0
        claimed = room_of(data.st_size, np.frombuffer(found, "<u8")) if whole else 0
        return max(data.st_blocks * 512, claimed) + footprint(num_units)

    def _remove(self, name: str) -> None:
        for path in (self.map_path(name), self.data_path(name)):
            path.unlink(missing_ok=True)
