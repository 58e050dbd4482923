"""A disk in memory for a planner's journal: it tears the last write when a planner dies, and knows who may write."""

import io
import random
from dataclasses import dataclass, field

from omniload.base.errors import StateError
from omniload.mix.journal.storage import JournalStorage

__all__ = ["Disk", "PlannerKilledError", "Writer"]


class PlannerKilledError(BaseException):
    """The planner's process has ended at this point."""


@dataclass(slots=True)
class Disk:
    """The data that survives a planner."""

    chance: random.Random
    content: bytearray | None = None
    claims: int = 0
    """Claims so far; the writer of the last one owns the journal.

    A claim is a number, because references between disk and writer would form a cycle for the garbage collector.
    """
    tears_next: bool = False
    """Whether the writer dies during the next write."""
    torn: int = 0
    """Writes of which only a part was written."""
    cut_untold: bool = False
    """Whether the writer died after it had taken steps back, but before any role was notified."""
    torn_between_records: int = 0
    """The number of these tears that left whole records in the torn part."""


@dataclass(slots=True, eq=False)
class Writer(JournalStorage):
    """One planner's access to the disk."""

    disk: Disk
    _claim: int | None = field(default=None, init=False)
    _closed: bool = field(default=False, init=False)

    def __str__(self) -> str:
        return "the journal in memory"

    @property
    def keeps_all(self) -> bool:
        return True

    def claim(self) -> None:
        self.disk.claims += 1
        self._claim = self.disk.claims

    def exists(self) -> bool:
        return self.disk.content is not None

    def opened(self) -> io.BytesIO:
        if self.disk.content is None:
            raise FileNotFoundError
        return io.BytesIO(bytes(self.disk.content))

    def begin(self, content: bytes) -> None:
        self.require_claim()
        self.disk.content = bytearray(content)

    def go_on(self, kept_bytes: int, end: bytes = b"") -> None:
        self.require_claim()
        assert self.disk.content is not None
        del self.disk.content[kept_bytes:]
        self.disk.content[kept_bytes - 1 : kept_bytes] = b"\n"

    def cut(self, kept_bytes: int) -> None:
        self.require_claim()
        assert self.disk.content is not None
        dies, self.disk.tears_next = self.disk.tears_next, False
        if not dies or self.disk.chance.random() < 0.5:
            del self.disk.content[kept_bytes:]
            self.disk.cut_untold = dies
        if dies:
            self.disk.torn += 1
            raise PlannerKilledError

    def append(self, content: bytes) -> None:
        self.require_claim()
        assert self.disk.content is not None
        if self.disk.tears_next:
            part = content[: self.disk.chance.randrange(len(content))]
            self.disk.content += part
            self.disk.tears_next = False
            self.disk.torn += 1
            self.disk.torn_between_records += b"\n" in part
            raise PlannerKilledError
        self.disk.content += content

    def shorten(self, lines):
        raise AssertionError("everything is kept here")

    def move_aside(self) -> str:
        raise AssertionError("there is one run")

    def close(self) -> None:
        self._closed = True

    def require_claim(self) -> None:
        if self._claim != self.disk.claims:
            raise StateError("another planner has taken the journal")
