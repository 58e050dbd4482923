"""The machine between readers that the kernel holds and the bytes they wait for.

The kernel asks before it reads a file of ours (``FAN_PRE_ACCESS``) and waits for the answer.
A file is filled by whole pages, each written once with all its bytes, so a page is either
right or absent, and an access is allowed exactly when all its pages are right. Whatever
goes wrong ends in a refusal, never in an answer that lets a hole be read.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "PAGE_BYTES",
    "AccessAsked",
    "AllowAccess",
    "CompleteFile",
    "DenyAccess",
    "FillRange",
    "Filler",
    "RangeFailed",
    "RangeFilled",
    "RangesAtHand",
    "Stopped",
]

PAGE_BYTES = 4096
_BEHIND_BYTES = 1 << 20
"""Largest range filled at once behind the readers' backs: what one of them may wait for it."""
_ABSENT, _COMING, _HERE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class AccessAsked:
    """Somebody is about to read; the kernel holds the read until it is answered."""

    token: int
    file: int
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class RangesAtHand:
    """Ranges of a file that can be filled without waiting for anybody."""

    file: int
    ranges: tuple[tuple[int, int], ...]
    """Offset and size of each; what of them is no whole page is passed over."""


@dataclass(frozen=True, slots=True)
class RangeFilled:
    """A range that was to be filled is in the file."""

    file: int
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class RangeFailed:
    """A range that was to be filled cannot be had, or not be written."""

    file: int
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Stopped:
    """Nothing is filled any more."""


@dataclass(frozen=True, slots=True)
class FillRange:
    """Fetch the bytes of a range, write them, and report."""

    file: int
    offset: int
    size_bytes: int
    is_urgent: bool
    """A reader waits for it."""


@dataclass(frozen=True, slots=True)
class AllowAccess:
    """Let a read go on: all its bytes are there."""

    token: int


@dataclass(frozen=True, slots=True)
class DenyAccess:
    """End a read with an error."""

    token: int


@dataclass(frozen=True, slots=True)
class CompleteFile:
    """A file needs nobody any more."""

    file: int


Event = AccessAsked | RangesAtHand | RangeFilled | RangeFailed | Stopped
Command = FillRange | AllowAccess | DenyAccess | CompleteFile


@dataclass(slots=True, kw_only=True)
class Filler:
    """Decides what is filled, what may be read, and when a file is complete.

    Each page is filled once, however many ask. What readers wait for goes at once; what is
    at hand goes behind, one range at a time, so that no reader waits for a queue of it.

    Args:
        sizes: Bytes of each file, multiples of the page.
    """

    sizes: Sequence[int]
    _pages: list[NDArray[np.uint8]] = field(init=False)
    _left: list[int] = field(init=False)
    _asked: dict[int, AccessAsked] = field(default_factory=dict)
    _behind: deque[tuple[int, int, int]] = field(default_factory=deque)
    _behind_now: tuple[int, int, int] | None = None
    _stopped: bool = False

    def __post_init__(self) -> None:
        if any(size % PAGE_BYTES for size in self.sizes):
            raise ValueError(f"sizes {list(self.sizes)} are not all multiples of {PAGE_BYTES}")
        self._pages = [np.zeros(size // PAGE_BYTES, np.uint8) for size in self.sizes]
        self._left = [len(pages) for pages in self._pages]

    @property
    def is_asked(self) -> bool:
        """Some access waits."""
        return bool(self._asked)

    def left_bytes(self, file: int) -> int:
        """Return how much of a file is still to be filled."""
        return self._left[file] * PAGE_BYTES

    def holes(self, file: int) -> tuple[tuple[int, int], ...]:
        """Return offset and size of what is not filled."""
        pages = self._pages[file]
        return tuple(
            (first * PAGE_BYTES, (end - first) * PAGE_BYTES)
            for first, end in _runs(pages != _HERE, 0)
        )

    def handle(self, event: Event) -> tuple[Command, ...]:
        """Apply one event and return what must now be done, in order."""
        match event:
            case AccessAsked():
                return tuple(self._ask(event))
            case RangesAtHand(file=file, ranges=ranges):
                for offset, size in ranges:
                    first, end = -(-offset // PAGE_BYTES), (offset + size) // PAGE_BYTES
                    self._behind.append((file, first, min(end, len(self._pages[file]))))
                return tuple(self._next_behind())
            case RangeFilled():
                return tuple(self._filled(event))
            case RangeFailed():
                return tuple(self._failed(event))
            case Stopped():
                self._stopped = True
                self._behind.clear()
                denied = tuple(DenyAccess(token) for token in self._asked)
                self._asked.clear()
                return denied
            case _:
                assert_never(event)

    def _ask(self, access: AccessAsked) -> Iterator[Command]:
        first, end = self._span(access)
        pages = self._pages[access.file]
        if bool((pages[first:end] == _HERE).all()):
            yield AllowAccess(access.token)
        elif self._stopped:
            yield DenyAccess(access.token)
        else:
            self._asked[access.token] = access
            for start, stop in list(_runs(pages[first:end] == _ABSENT, first)):
                yield self._fill(access.file, start, stop, is_urgent=True)

    def _filled(self, event: RangeFilled) -> Iterator[Command]:
        first, end = self._span(event)
        pages = self._pages[event.file][first:end]
        self._left[event.file] -= int((pages != _HERE).sum())
        pages[:] = _HERE
        for token, access in list(self._asked.items()):
            start, stop = self._span(access)
            if access.file == event.file and bool(
                (self._pages[event.file][start:stop] == _HERE).all()
            ):
                del self._asked[token]
                yield AllowAccess(token)
        if len(pages) and not self._left[event.file]:
            yield CompleteFile(event.file)
        yield from self._ended(event.file, first, end)

    def _failed(self, event: RangeFailed) -> Iterator[Command]:
        first, end = self._span(event)
        pages = self._pages[event.file][first:end]
        pages[pages == _COMING] = _ABSENT
        for token, access in list(self._asked.items()):
            start, stop = self._span(access)
            if access.file == event.file and start < end and first < stop:
                del self._asked[token]
                yield DenyAccess(token)
        yield from self._ended(event.file, first, end)

    def _ended(self, file: int, first: int, end: int) -> Iterator[Command]:
        if self._behind_now == (file, first, end):
            self._behind_now = None
        yield from self._next_behind()

    def _next_behind(self) -> Iterator[Command]:
        while self._behind and self._behind_now is None and not self._stopped:
            file, first, end = self._behind.popleft()
            window = min(end, first + _BEHIND_BYTES // PAGE_BYTES)
            absent = self._pages[file][first:window] == _ABSENT
            start, stop = next(_runs(absent, first), (window, window))
            if stop < end:
                self._behind.appendleft((file, stop, end))
            if start == stop:
                continue
            self._behind_now = (file, start, stop)
            yield self._fill(file, start, stop, is_urgent=False)

    def _fill(self, file: int, start: int, stop: int, *, is_urgent: bool) -> FillRange:
        self._pages[file][start:stop] = _COMING
        return FillRange(file, start * PAGE_BYTES, (stop - start) * PAGE_BYTES, is_urgent)

    def _span(self, range_: AccessAsked | RangeFilled | RangeFailed) -> tuple[int, int]:
        """Return the pages, from and to, that a range touches; none past the end of its file."""
        end = -(-(range_.offset + range_.size_bytes) // PAGE_BYTES)
        return range_.offset // PAGE_BYTES, min(end, len(self._pages[range_.file]))


def _runs(wanted: NDArray[np.bool_], first: int) -> Iterator[tuple[int, int]]:
    """Yield the runs of True of a part of the pages, which begins at page ``first``."""
    edges = np.diff(wanted.astype(np.int8), prepend=0, append=0)
    starts, stops = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    for start, stop in zip(starts, stops, strict=True):
        yield first + int(start), first + int(stop)
