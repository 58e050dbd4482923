"""A reader of a part of a source in a thread of its own: decoding and tokenising let go of the interpreter."""

from collections.abc import Callable

from typing_extensions import override

from omniload.base.concurrency.threads import DaemonPool
from omniload.mix.fingerprint import SourceFacts
from omniload.source.parts.divided import PartRead, PartReader
from omniload.source.parts.share import Part
from omniload.source.source import RecordSource

__all__ = ["ThreadReader"]

_LEAVE_S = 1.0
"""A read that takes longer is left alone: nobody hears of it."""


class ThreadReader(PartReader):
    """Opens the source once more, and reads its part of it."""

    def __init__(self, open_source: Callable[[Part], RecordSource], part: Part) -> None:
        self._part = part
        self._thread = DaemonPool(1, "omniload-part-reader")
        self._opening = self._thread.submit(lambda: open_source(part))

    @override
    def facts(self) -> SourceFacts | None:
        return self._opening.result().facts if self._opening.done() else None

    @override
    def read(self, start: int, stop: int, without: tuple[int, ...] = ()) -> Callable[[], PartRead]:
        return self._thread.submit(
            lambda: PartRead.of(self._opening.result(), start, stop, self._part, without)
        ).result

    @override
    def close(self) -> None:
        self._thread.close(_LEAVE_S)
