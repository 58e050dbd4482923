"""The critical path of a start-up: the stage and the node to which each moment of it belongs.

Between two barriers a job waits for one node, the one that reaches the second barrier last::

    n1  image ▇▇▇ environment ▇▇▇▇ process_group ░░░░░░░░▇ checkpoint_load ▇▇▇▇▇▇▇▇▇ first_step ▇
    n2  image ▇▇ environment ▇▇▇▇▇▇▇▇▇▇▇▇▇ process_group ▇ checkpoint_load ▇▇▇ first_step ░░░░░░▇
                 ◀──────── along n2 ─────────────────────◀──────── along n1 ─────────────────────

So the path is walked from its end backwards along one node. At each meeting it turns to
the node that entered the meeting last. Work of a node off the path costs the job nothing.
"""

import heapq
import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from snapshot.startup.reading import Run, spans_of

__all__ = ["FIRST_STEP", "SCHEDULER_STAGES", "PathPart", "critical_path", "is_meeting", "path_of"]

SCHEDULER_STAGES = ("queue", "allocation")
"""Stages before a node is held."""
FIRST_STEP = "first_step"
"""Stage whose end ends a start-up."""

Span = tuple[int, int]
"""Begin and end in nanoseconds."""
Stages = Mapping[str, Sequence[Span]]
"""Spans of the stages of one node, in order and disjoint; a meeting begins when the node's last process enters."""
_Meeting = tuple[str, int]
"""Name of its stage, and its number on a node counted from the end, because the last try counts."""


class PathPart(NamedTuple):
    """A piece of the critical path."""

    stage: str | None
    """Stage; ``None`` if no stage ran on the node."""
    node: str
    begin_ns: int
    end_ns: int


def is_meeting(stage: str) -> bool:
    """Return whether all nodes are in a stage at some moment.

    These stages are ``process_group``, ``first_step``, and every stage whose name ends with ``barrier``.
    """
    # Each includes the wait for the last node, so the path may turn to another node there.
    return stage in ("process_group", FIRST_STEP) or stage.endswith("barrier")


def critical_path(
    runs: Mapping[tuple[str, str], Sequence[Run]],
    begin_ns: int,
    end_ns: int,
    last_ns: int,
    *,
    reached: bool,
) -> tuple[PathPart, ...]:
    """Walk back from the node that ended last.

    Args:
        runs: Runs of each node and stage, in order of their begin, at least one each.
        begin_ns: Begin of the path.
        end_ns: End of the path.
        last_ns: End of runs that have none.
        reached: Whether the first step ends the path; else the last line of any node does.

    Returns:
        Same as ``path_of``.
    """
    nodes: defaultdict[str, dict[str, list[Span]]] = defaultdict(dict)
    for (node, stage), found in runs.items():
        # Until its last process enters, a node counts as in the stage of that process.
        spans = _entered if is_meeting(stage) else spans_of
        nodes[node][stage] = spans(found, last_ns)
    if not nodes:
        return ()
    ended = [
        (spans[-1], stage, node)
        for node, stages in nodes.items()
        for stage, spans in stages.items()
    ]
    queues = [(end, node) for (_, end), stage, node in ended if stage in SCHEDULER_STAGES]
    if reached:
        _, last = max((end, node) for (_, end), stage, node in ended if stage == FIRST_STEP)
    else:
        # Take the node that was busy last. A meeting does not count, because the node itself would wait there. Among
        # equals, take the node whose stage lasted longest, and then decide by name, so that the order of the files does
        # not matter.
        *_, last = max((end, not is_meeting(stage), -b, node) for (b, end), stage, node in ended)
    return path_of(nodes, last, begin_ns, end_ns, queue=max(queues, default=(0, ""))[1])


def _entered(runs: Sequence[Run], last_ns: int) -> list[Span]:
    """Return the spans of a meeting, each from where the last run of it began."""
    begins = [run.begin_ns for run in runs]
    return [(begins[bisect_right(begins, end) - 1], end) for _, end in spans_of(runs, last_ns)]


def path_of(
    nodes: Mapping[str, Stages], last: str, begin_ns: int, end_ns: int, *, queue: str = ""
) -> tuple[PathPart, ...]:
    """Divide the time from begin to end among stages of the nodes that the others waited for.

    On a node, each moment belongs to the running stage that ends first. Of two
    stages that end at once, it belongs to the one that began later, which the other one contains.

    Args:
        nodes: Stages of each node, by name.
        last: The node that ended last; the walk begins there.
        begin_ns: Begin of the path.
        end_ns: End of the path; later parts of stages are cut off.
        queue: Node whose scheduler stages come before the first stage of the node where the walk ends.

    Returns:
        Pieces without a gap between them; neighbours differ. The pieces between two meetings are of
        one node, so a stage has no more time there than the longest time of any node in it.
    """
    meetings = {name: _meetings_of(node) for name, node in nodes.items()}
    came_last: dict[_Meeting, tuple[int, str]] = {}
    for name, entered in meetings.items():
        for entered_ns, meeting in entered:
            if meeting not in came_last or (entered_ns, name) > came_last[meeting]:
                came_last[meeting] = entered_ns, name
    left: dict[str, list[PathPart]] = {}
    passed: set[_Meeting] = set()
    node, at_ns = last, end_ns
    walked: list[PathPart] = []
    while at_ns > begin_ns:
        # The walk only goes back, so it never meets a later event again.
        ahead = meetings[node]
        while ahead and (ahead[-1][0] >= at_ns or ahead[-1][1] in passed):
            ahead.pop()
        since_ns, following = begin_ns, node
        if ahead:
            meeting = ahead.pop()[1]
            passed.add(meeting)
            came_ns, following = came_last[meeting]
            since_ns = max(begin_ns, min(came_ns, at_ns))
        if node not in left:
            left[node] = list(_divided(node, nodes[node], begin_ns, end_ns))
        walked += _taken_back(left[node], since_ns, at_ns)
        node, at_ns = following, since_ns
    walked.reverse()
    if queue and walked and walked[0].stage is None:
        own = nodes[walked[0].node]
        before = {name: spans for name, spans in nodes[queue].items() if name not in own}
        walked[:1] = _divided(queue, before, begin_ns, walked[0].end_ns)
    return tuple(_joined(walked))


def _meetings_of(node: Stages) -> list[tuple[int, _Meeting]]:
    """Return the time when a node entered each meeting, in order."""
    return sorted(
        (entered_ns, (name, len(spans) - number))
        for name, spans in node.items()
        if is_meeting(name)
        for number, (entered_ns, _) in enumerate(spans)
    )


def _taken_back(parts: list[PathPart], since_ns: int, at_ns: int) -> Iterator[PathPart]:
    """Remove the parts between two moments from the end of a node's parts, the last first; later parts are dropped."""
    while parts and parts[-1].end_ns > since_ns:
        part = parts.pop()
        if part.begin_ns < at_ns:
            begin_ns, end_ns = max(part.begin_ns, since_ns), min(part.end_ns, at_ns)
            yield part._replace(begin_ns=begin_ns, end_ns=end_ns)
        if part.begin_ns < since_ns:
            parts.append(part._replace(end_ns=since_ns))  # the walk may come back to this node


def _divided(node: str, stages: Stages, begin_ns: int, end_ns: int) -> Iterator[PathPart]:
    """Yield the stage of each moment of a node, in order; adjacent pieces of one stage are joined."""
    waiting = sorted((*span, stage) for stage, spans in stages.items() for span in spans)
    inside = {t for span in waiting for t in span[:2] if begin_ns < t < end_ns}
    running: list[tuple[int, int, str]] = []
    pieces: list[PathPart] = []
    started = 0
    for begin, end in itertools.pairwise(sorted({begin_ns, end_ns} | inside)):
        while started < len(waiting) and waiting[started][0] <= begin:
            span_begin, span_end, stage = waiting[started]
            heapq.heappush(running, (span_end, -span_begin, stage))
            started += 1
        while running and running[0][0] <= begin:
            heapq.heappop(running)
        pieces.append(PathPart(running[0][2] if running else None, node, begin, end))
    return _joined(pieces)


def _joined(parts: Iterable[PathPart]) -> Iterator[PathPart]:
    """Join adjacent pieces of the same stage and node."""
    for _, same in itertools.groupby(parts, key=lambda part: part[:2]):
        first, *others = same
        yield first._replace(end_ns=others[-1].end_ns) if others else first
