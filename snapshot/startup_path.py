"""The critical path of a start-up: which stage each moment of it belongs to."""

import heapq
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["PathPart", "path_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PathPart:
    """A piece of the critical path."""

    stage: str | None
    """``None`` where no stage ran on any node."""
    begin_ns: int
    end_ns: int


def path_of(
    spans: Mapping[str, Sequence[tuple[int, int]]], begin_ns: int, end_ns: int
) -> tuple[PathPart, ...]:
    """Divide the time from begin to end among stages.

    Each moment goes to the stage, among those that run, that ends first. Of two that end
    at once it goes to the later to begin, which the other one holds.

    Args:
        spans: When each stage runs on any node: begins and ends, apart from each other.
        begin_ns: Where the path begins.
        end_ns: Where it ends; what runs on is cut off.

    Returns:
        Pieces without a hole between them; neighbours differ.
    """
    waiting = sorted(
        (begin, end, stage) for stage, all_of in spans.items() for begin, end in all_of
    )
    inside = {t for span in waiting for t in span[:2] if begin_ns < t < end_ns}
    running: list[tuple[int, int, str]] = []
    parts: list[PathPart] = []
    started = 0
    for begin, end in itertools.pairwise(sorted({begin_ns, end_ns} | inside)):
        while started < len(waiting) and waiting[started][0] <= begin:
            span_begin, span_end, stage = waiting[started]
            heapq.heappush(running, (span_end, -span_begin, stage))
            started += 1
        while running and running[0][0] <= begin:
            heapq.heappop(running)
        parts.append(PathPart(stage=running[0][2] if running else None, begin_ns=begin, end_ns=end))
    return tuple(_joined(parts))


def _joined(parts: Iterable[PathPart]) -> Iterable[PathPart]:
    """Make one piece of neighbours of the same stage."""
    for stage, same in itertools.groupby(parts, key=lambda part: part.stage):
        pieces = list(same)
        yield PathPart(stage=stage, begin_ns=pieces[0].begin_ns, end_ns=pieces[-1].end_ns)
