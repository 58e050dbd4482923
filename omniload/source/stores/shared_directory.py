"""A directory of copies that all processes of a node share, under one cap; told in ``docs/design/0036-shard-cache.md``.

The bytes and maps of copies are those of ``fusefs.cache.disk_format``: a byte is used where its checksum says so, and
not because it lies there. Whoever takes room or removes a copy holds the lock of the account; whoever reads holds
nothing.
"""

import fcntl
import os
import re
import stat
import struct
import uuid
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from fusefs.cache.disk_directory import CopyFiles, CopyFolder
from fusefs.cache.disk_format import COPIES, CopyVersion, decode_map, footprint, room_for
from omniload.base.clock import Clock, SystemClock
from omniload.base.errors import ConfigError
from omniload.base.linux.file_lock import locked
from omniload.base.writing import write_whole
from omniload.source.stores.blocks import extent_of, runs_of, span_of

__all__ = ["SharedDirectory"]

_MARKER = "omniload-shard-cache.json"
_MARK = b'{"omniload_shard_cache":1}\n'
_ACCOUNT, _USERS = "account", "users"
_DRAFT = f".{_MARKER}."
"""What the name of a marker begins with that is not whole yet; whoever makes it may be killed."""
_SUM = struct.Struct("<QQ")  # bytes that are taken, and the same with every bit turned over
_EVERY_BIT = (1 << 64) - 1
_PATIENCE_S, _PAUSE_S = 2.0, 0.002
_NAME_BYTES = 16
_USER_NAME = re.compile("[0-9a-f]{32}")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


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
        self._user = -1

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
        with self._locked() as account:
            self._begin_use()
            used = self._counted()
            if used > self.limit_bytes:
                used = self._without(self._unused_first(), used, self.limit_bytes)
            _note(account, used)

    def use(self, names: Iterable[str]) -> None:
        """Say that this process, with all that it forks, uses copies; they stay while one of these lives.

        Raises:
            OSError: It cannot be written.
        """
        if self._user >= 0 and (held := b"".join(map(bytes.fromhex, names))):
            os.write(self._user, held)

    def take_up(
        self, version: CopyVersion, blocks: Sequence[int]
    ) -> tuple[CopyFiles, Sequence[int]] | None:
        """Take room for blocks of a copy, as many of the first ones as fit.

        Room is taken on the disk itself, so that what a killed process had taken is found by whoever counts.

        Returns:
            The files, for the caller to write, mark and retire, and the blocks that have room there; ``None`` for none.

        Raises:
            OSError: The disk refuses, or another process holds the lock for too long.
        """
        with self._locked() as account, ExitStack() as undoing:
            opened = self._sound(version, account)
            taken = 0 if opened is not None else footprint(version.num_units)
            if opened is not None:
                undoing.callback(opened.retire)
            sizes = [room_for(*span_of(version, block)) for block in blocks]
            used = self._with_room(account, taken + sum(sizes), version.name)
            fitting = _fitting(sizes, self.limit_bytes - used - taken)
            # Ahead of what is taken: ended in between, the account says too much and never too little.
            _note(account, used + (taken + sum(sizes[:fitting]) if fitting else 0))
            if not fitting:
                return None
            files = self.make(version) if opened is None else opened
            if opened is None:
                undoing.callback(files.retire)
            try:
                for run in runs_of(blocks[:fitting]):
                    start, stop = extent_of(version, run)
                    taken += files.take(start, stop - start)
            finally:
                _note(account, used + taken)
            undoing.pop_all()
            return files, blocks[:fitting]

    def held_bytes(self) -> int:
        """Return what the account says is taken; 0 where there is none."""
        with suppress(OSError), (self.root / _ACCOUNT).open("rb") as account:
            return _noted(account.fileno()) or 0
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
        with ExitStack() as lock:
            while (account := self._taken(lock)) is None:
                if self._clock.now_s() >= end_s:
                    raise TimeoutError(
                        f"{self.root / _ACCOUNT}: locked by another process for {_PATIENCE_S:g} s"
                    )
                self._clock.sleep(_PAUSE_S)
            yield account

    def _taken(self, lock: ExitStack) -> int | None:
        with suppress(BlockingIOError):
            return lock.enter_context(locked(self.root / _ACCOUNT, waits=False, writable=True))
        return None

    def _sound(self, version: CopyVersion, account: int) -> CopyFiles | None:
        """Return the files of a copy; one whose map is damaged is removed, and there is none."""
        opened = self.open(version)
        if opened is None or decode_map(opened[1], version) is not None:
            return None if opened is None else opened[0]
        opened[0].retire()
        self._remove(version.name)
        _note(account, self._counted())
        return None

    def _with_room(self, account: int, wanted: int, name: str) -> int:
        """Make room for a copy, as far as others may leave; return what is taken then."""
        used = _noted(account)
        if used is None or used + wanted > self.limit_bytes:
            # Counted anew: an account that a killed process left behind says too much.
            used = self._counted()
        if used + wanted > self.limit_bytes:
            in_use = {*self._in_use(), name}
            leaving = [each for each in self._found() if each[0] not in in_use]
            used = self._without(leaving, used, self.limit_bytes - wanted)
        return used

    def _begin_use(self) -> None:
        """Make the file that says what this process uses; the lock on it ends with the last who has it open."""
        if self._user >= 0:
            return
        path = self.root / _USERS / uuid.uuid4().hex
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._user = os.open(path, flags, 0o600)
        # Closed and not unlocked: what was forked goes on using it.
        weakref.finalize(self, os.close, self._user)
        fcntl.flock(self._user, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _in_use(self) -> set[str]:
        """Return the copies that living processes use; what dead ones left is removed."""
        names: set[str] = set()
        for path in (self.root / _USERS).iterdir():
            if not _USER_NAME.fullmatch(path.name):
                continue
            with path.open("rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    held = file.read().hex()
                    step = 2 * _NAME_BYTES
                    names |= {held[at : at + step] for at in range(0, len(held), step)}
                else:
                    path.unlink(missing_ok=True)
        return names

    def _counted(self) -> int:
        return sum(size for _, size in self._found())

    def _unused_first(self) -> list[tuple[str, int]]:
        in_use = self._in_use()
        # Sorting keeps what is least recently used ahead.
        return sorted(self._found(), key=lambda each: each[0] in in_use)

    def _without(self, leaving: Sequence[tuple[str, int]], used: int, target: int) -> int:
        """Remove copies until no more than ``target`` bytes are taken; return what is."""
        for name, size in leaving:
            if used <= target:
                break
            self._remove(name)
            used -= size
        return used

    def _remove(self, name: str) -> None:
        for path in (self.map_path(name), self.data_path(name)):
            path.unlink(missing_ok=True)


def _fitting(sizes: Sequence[int], free: int) -> int:
    """Return how many of the first sizes fit together."""
    for count, size in enumerate(sizes):
        free -= size
        if free < 0:
            return count
    return len(sizes)


def _note(account: int, used: int) -> None:
    os.pwrite(account, _SUM.pack(used, used ^ _EVERY_BIT), 0)


def _noted(account: int) -> int | None:
    """Return what an account says; ``None`` where it says nothing that can be believed."""
    found = os.pread(account, _SUM.size, 0)
    if len(found) != _SUM.size:
        return None
    used, turned = _SUM.unpack(found)
    return int(used) if used == turned ^ _EVERY_BIT else None
