"""The critical path of a start-up: which stage, on which node, each moment of it belongs to.

Between two barriers a job waits for one node, the one that comes to the second last::

    n1  image ▇▇▇ environment ▇▇▇▇ process_group ░░░░░░░░▇ checkpoint_load ▇▇▇▇▇▇▇▇▇ first_step ▇
    n2  image ▇▇ environment ▇▇▇▇▇▇▇▇▇▇▇▇▇ process_group ▇ checkpoint_load ▇▇▇ first_step ░░░░░░▇
                 ◀──────── along n2 ─────────────────────◀──────── along n1 ─────────────────────

So the path is walked from its end backwards along one node, and at each meeting it turns to
the node that entered it last. What a node does beside the path costs the job nothing.
"""

import heapq
import itertools
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from snapshot.startup.reading import Run, entered_of, spans_of

__all__ = [
    "FIRST_STEP",
    "SCHEDULER_STAGES",
    "PathPart",
    "critical_path",
    "is_meeting",
    "path_of",
]

SCHEDULER_STAGES = ("queue", "allocation")
"""Stages before a node is held."""
FIRST_STEP = "first_step"
"""The stage whose end ends a start-up."""

Span = tuple[int, int]
"""Begin and end, nanoseconds."""
Stages = Mapping[str, Sequence[Span]]
"""When the stages of one node run, each in order and apart; meetings from where the node's last process entered."""
_Meeting = tuple[str, int]
"""Name of its stage, and its number on a node counted from the last: the last try is the one that counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathPart:
    """A piece of the critical path."""

    stage: str | None
    """``None`` where no stage ran on the node."""
    node: str
    begin_ns: int
    end_ns: int


def is_meeting(stage: str) -> bool:
    """Return whether all nodes are in a stage at some moment: it holds the wait for the last to come.

    Such are ``process_group``, ``first_step``, and whatever is called a barrier.
    """
    return stage in ("process_group", FIRST_STEP) or stage.endswith("barrier")


def critical_path(
    runs: Mapping[str, Mapping[str, Sequence[Run]]],
    begin_ns: int,
    end_ns: int,
    last_ns: int,
    *,
    reached: bool,
) -> tuple[PathPart, ...]:
    """Walk back from the node that ended last.

    Args:
        runs: Of each stage on each node, in order of their begin, at least one.
        begin_ns: Where the path begins.
        end_ns: Where it ends.
        last_ns: End of runs without one.
        reached: The first step ends the path; else the last line of any node does.

    Returns:
        As ``path_of``.
    """
    nodes: defaultdict[str, dict[str, list[Span]]] = defaultdict(dict)
    for name, of_node in runs.items():
        # Until its last process is there, a node is where that process still is.
        spans = entered_of if is_meeting(name) else spans_of
        for node, given in of_node.items():
            nodes[node][name] = spans(given, last_ns)
    if not nodes:
        return ()
    queued = {
        node: nodes[node][name][-1][1] for name in SCHEDULER_STAGES for node in runs.get(name, ())
    }
    queue = max(queued, key=lambda node: (queued[node], node), default="")
    last = _last_node(nodes, FIRST_STEP if reached else None)
    return path_of(nodes, last, begin_ns, end_ns, queue=queue)


def _last_node(nodes: Mapping[str, Stages], step: str | None) -> str:
    """Return the node that the end was waited for.

    Args:
        nodes: By name.
        step: The stage that ends the start; ``None`` where it was not reached. Then it is the
            node that was busy last, in no meeting, where it would wait itself, and of those
            the one that was longest at what it did.
    """

    def lateness(node: str) -> tuple[int, bool, int, str]:
        return max(
            (ends[-1][1], not is_meeting(name), -ends[-1][0], node)
            for name, ends in nodes[node].items()
        )

    if step is not None:
        return max(
            (node for node in nodes if step in nodes[node]),
            key=lambda node: (nodes[node][step][-1][1], node),
        )
    return max(nodes, key=lateness)


def path_of(
    nodes: Mapping[str, Stages], last: str, begin_ns: int, end_ns: int, *, queue: str = ""
) -> tuple[PathPart, ...]:
    """Divide the time from begin to end among stages of the nodes that the others waited for.

    On a node, each moment goes to the stage, among those that run, that ends first. Of two
    that end at once it goes to the later to begin, which the other one holds.

    Args:
        nodes: By name.
        last: The node that ended last; the walk begins there.
        begin_ns: Where the path begins.
        end_ns: Where it ends; what runs on is cut off.
        queue: Whose stages come before the first stage of the node where the walk ends.

    Returns:
        Pieces without a hole between them; neighbours differ. Between two meetings they are of
        one node, so no stage has more of them there than the longest that a node spent in it.
    """
    came_last = _came_last(nodes)
    open_ = {name: _meetings_of(node) for name, node in nodes.items()}
    lines: dict[str, _Timeline] = {}
    passed: set[_Meeting] = set()
    node, at_ns = last, end_ns
    walked: list[list[PathPart]] = []
    while at_ns > begin_ns:
        ahead = open_[node]
        # The walk goes back only: what lies after this moment is never met again.
        while ahead and (ahead[-1][0] >= at_ns or ahead[-1][1] in passed):
            ahead.pop()
        since_ns, following = begin_ns, node
        if ahead:
            meeting = ahead.pop()[1]
            passed.add(meeting)
            came_ns, following = came_last[meeting]
            since_ns = max(begin_ns, min(came_ns, at_ns))
        if node not in lines:
            lines[node] = _Timeline.of(node, nodes[node], begin_ns, end_ns)
        walked.append(lines[node].between(since_ns, at_ns))
        if since_ns == begin_ns:
            break
        node, at_ns = following, since_ns
    parts = [part for piece in reversed(walked) for part in piece]
    if queue and parts and parts[0].stage is None:
        own = nodes[parts[0].node]
        before = {name: spans for name, spans in nodes[queue].items() if name not in own}
        parts[:1] = _Timeline.of(queue, before, begin_ns, parts[0].end_ns).parts
    return tuple(_joined(parts))


def _meetings_of(node: Stages) -> list[tuple[int, _Meeting]]:
    """Return when a node entered each meeting, in order."""
    return sorted(
        (entered_ns, (name, len(spans) - number))
        for name, spans in node.items()
        if is_meeting(name)
        for number, (entered_ns, _) in enumerate(spans)
    )


def _came_last(nodes: Mapping[str, Stages]) -> dict[_Meeting, tuple[int, str]]:
    """Return when each meeting was complete, and which node entered it last."""
    found: dict[_Meeting, tuple[int, str]] = {}
    for name, node in nodes.items():
        for entered_ns, meeting in _meetings_of(node):
            if meeting not in found or (entered_ns, name) > found[meeting]:
                found[meeting] = entered_ns, name
    return found


@dataclass(frozen=True, slots=True)
class _Timeline:
    """Which stage each moment of one node belongs to."""

    parts: list[PathPart]
    begins_ns: list[int]

    @classmethod
    def of(cls, node: str, stages: Stages, begin_ns: int, end_ns: int) -> "_Timeline":
        parts = list(_joined(_divided(node, stages, begin_ns, end_ns)))
        return cls(parts, [part.begin_ns for part in parts])

    def between(self, begin_ns: int, end_ns: int) -> list[PathPart]:
        """Return the pieces from one moment to another, cut there."""
        first = max(bisect_right(self.begins_ns, begin_ns) - 1, 0)
        after = bisect_left(self.begins_ns, end_ns)
        return [
            PathPart(
                stage=part.stage,
                node=part.node,
                begin_ns=max(part.begin_ns, begin_ns),
                end_ns=min(part.end_ns, end_ns),
            )
            for part in self.parts[first:after]
        ]


def _divided(node: str, stages: Stages, begin_ns: int, end_ns: int) -> Iterator[PathPart]:
    """Yield whose each moment of a node is, in order."""
    waiting = sorted(
        (begin, end, stage) for stage, all_of in stages.items() for begin, end in all_of
    )
    inside = {t for span in waiting for t in span[:2] if begin_ns < t < end_ns}
    running: list[tuple[int, int, str]] = []
    started = 0
    for begin, end in itertools.pairwise(sorted({begin_ns, end_ns} | inside)):
        while started < len(waiting) and waiting[started][0] <= begin:
            span_begin, span_end, stage = waiting[started]
            heapq.heappush(running, (span_end, -span_begin, stage))
            started += 1
        while running and running[0][0] <= begin:
            heapq.heappop(running)
        stage_now = running[0][2] if running else None
        yield PathPart(stage=stage_now, node=node, begin_ns=begin, end_ns=end)


def _joined(parts: Iterable[PathPart]) -> Iterator[PathPart]:
    """Make one piece of neighbours of the same stage and node."""
    for (stage, node), same in itertools.groupby(parts, key=lambda part: (part.stage, part.node)):
        pieces = list(same)
        yield PathPart(
            stage=stage, node=node, begin_ns=pieces[0].begin_ns, end_ns=pieces[-1].end_ns
        )
