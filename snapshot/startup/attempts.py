"""Stages of a start-up: events of many nodes joined into seconds, stragglers and bytes; comparison of two starts.

Between two barriers a job waits for the node that reaches the second barrier last. So the time of a start-up
is divided along these nodes, and the parts add up to the whole.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from omniload.base.errors import StateError
from snapshot.startup.events import TIERS, StageEvent
from snapshot.startup.path import FIRST_STEP, SCHEDULER_STAGES, PathPart, critical_path
from snapshot.startup.reading import Run, runs_of, spans_of

__all__ = [
    "BETWEEN",
    "Attempt",
    "Difference",
    "NodeStage",
    "Stage",
    "StageDifference",
    "attempts_of",
    "difference_of",
    "in_order",
]

BETWEEN = "(between stages)"
"""Name of the time in which no stage runs on the node that the others wait for."""

_MOST_STAGES = 256
_NS = 1e9
_SAME_S = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStage:
    """One stage on one node, run by one or more processes, once or several times."""

    node: str
    begin_ns: int
    end_ns: int | None
    """End of the stage; ``None`` while one of its runs has no end."""
    seconds: float | None
    """Seconds in which at least one of its runs was under way; ``None`` if unfinished."""
    runs: tuple[Run, ...]

    @property
    def error(self) -> str | None:
        """Error of the stage, the last one if several runs failed."""
        errors = (run.facts.get("error") for run in reversed(self.runs))
        return next(filter(None, errors), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage over the nodes of an attempt; figures are over the nodes that ended it."""

    name: str
    nodes: tuple[NodeStage, ...]
    slowest: str | None
    """Slowest node; like the next two fields, ``None`` if no node ended the stage."""
    max_s: float | None
    median_s: float | None
    path_s: float
    """Seconds on the critical path."""
    bytes: Mapping[str, int]
    """Bytes moved, by tier."""

    @property
    def unfinished(self) -> tuple[str, ...]:
        """Nodes that began the stage and never ended it."""
        return tuple(each.node for each in self.nodes if each.end_ns is None)

    @property
    def failed(self) -> tuple[str, ...]:
        """Nodes whose stage ended with an error."""
        return tuple(each.node for each in self.nodes if each.error is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of a job."""

    job: str
    number: int
    begin_ns: int
    """First moment of any stage."""
    end_ns: int
    """Last end of the first step; the last line if the first step was not reached."""
    stages: tuple[Stage, ...]
    """Stages in the order in which the nodes, by their median, begin them."""
    path: tuple[PathPart, ...]
    """Parts of the critical path from begin to end, without gaps."""
    between_s: float
    """Seconds of the critical path in which no stage runs on the node that the others wait for."""
    reached: bool
    """Whether all nodes that began the first step ended it, and at least one did."""
    bytes: Mapping[str, int]
    strays: int
    """Number of ends without a begin, which are left out."""
    backward: int
    """Number of runs that end before they begin, counted as 0 s: the clock was set back."""

    @property
    def seconds(self) -> float:
        """Seconds of the critical path: the parts of all stages and the gaps between them."""
        return (self.end_ns - self.begin_ns) / _NS

    @property
    def num_held(self) -> int:
        """Number of nodes that were held: nodes with a stage that is not the scheduler's."""
        own = [stage for stage in self.stages if stage.name not in SCHEDULER_STAGES]
        return len({each.node for stage in own for each in stage.nodes})

    @property
    def nodes(self) -> tuple[str, ...]:
        """All nodes, including the writer of the queue, n2 before n10."""
        return tuple(sorted({n.node for stage in self.stages for n in stage.nodes}, key=in_order))


def attempts_of(events: Iterable[StageEvent]) -> tuple[Attempt, ...]:
    """Join events into attempts, in order of job and number.

    Args:
        events: Events of any jobs, attempts and nodes; events of one file in the order of its lines.

    Raises:
        StateError: An attempt has more than 256 stages.
    """
    of_attempt: defaultdict[tuple[str, int], list[StageEvent]] = defaultdict(list)
    for event in events:
        of_attempt[event.job, event.attempt].append(event)
    return tuple(
        _attempt(key, of_attempt[key])
        for key in sorted(of_attempt, key=lambda key: (in_order(key[0]), key[1]))
    )


def in_order(name: str) -> tuple[int, str]:
    """Return a key that sorts ``n2`` before ``n10``."""
    # Sort by length first, because names of one kind differ in a number at their end.
    return len(name), name


def _attempt(key: tuple[str, int], events: Sequence[StageEvent]) -> Attempt:
    joined = runs_of(events)
    # Times come from the clocks of many nodes. If the files prove that the clocks disagree, this is reported, but
    # no time is changed for it, because no file says which clock is wrong.
    last_ns = max(event.time_ns for event in events)
    nodes_of: defaultdict[str, list[NodeStage]] = defaultdict(list)
    for (node, name), found in joined.runs.items():
        nodes_of[name].append(_node_stage(node, found))
    # Names that contain a number, such as that of a step, would make a table of thousands of lines.
    if len(nodes_of) > _MOST_STAGES:
        raise StateError(
            f"attempt {key[1]} of job {key[0]!r} has {len(nodes_of)} stages, more than "
            f"{_MOST_STAGES}; give parts of a stage the same name on every node"
        )
    begins = [node.begin_ns for nodes in nodes_of.values() for node in nodes]
    steps = nodes_of.get(FIRST_STEP, [])
    ends = [node.end_ns for node in steps if node.end_ns is not None]
    reached = bool(steps) and len(ends) == len(steps)
    begin_ns, end_ns = min(begins, default=last_ns), max(ends) if reached else last_ns
    path = critical_path(joined.runs, begin_ns, end_ns, last_ns, reached=reached)
    ordered = sorted(nodes_of, key=lambda name: (median(n.begin_ns for n in nodes_of[name]), name))
    stages = tuple(_stage(name, nodes_of[name], _path_s(path, name)) for name in ordered)
    return Attempt(
        job=key[0],
        number=key[1],
        begin_ns=begin_ns,
        end_ns=end_ns,
        stages=stages,
        path=path,
        between_s=_path_s(path, None),
        reached=reached,
        bytes=_sum_bytes(stage.bytes for stage in stages),
        strays=joined.strays,
        backward=joined.backward,
    )


def _node_stage(node: str, runs: Sequence[Run]) -> NodeStage:
    ends = [run.end_ns for run in runs if run.end_ns is not None]
    finished = len(ends) == len(runs)
    return NodeStage(
        node=node,
        begin_ns=min(run.begin_ns for run in runs),
        end_ns=max(ends) if finished else None,
        seconds=sum(end - begin for begin, end in spans_of(runs)) / _NS if finished else None,
        runs=tuple(runs),
    )


def _stage(name: str, nodes: Sequence[NodeStage], path_s: float) -> Stage:
    nodes = sorted(nodes, key=lambda each: in_order(each.node))
    took = {each.node: each.seconds for each in nodes if each.seconds is not None}
    slowest = max(took, key=lambda node: took[node], default=None)
    return Stage(
        name=name,
        nodes=tuple(nodes),
        slowest=slowest,
        max_s=None if slowest is None else took[slowest],
        # The median, because one straggler among a thousand nodes would shift the mean by its loss.
        median_s=median(took.values()) if took else None,
        path_s=path_s,
        bytes=_sum_bytes(run.bytes for each in nodes for run in each.runs),
    )


def _path_s(path: Iterable[PathPart], stage: str | None) -> float:
    return sum(part.end_ns - part.begin_ns for part in path if part.stage == stage) / _NS


def _sum_bytes(of_parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return bytes by tier, nearest first, without tiers that gave none."""
    total: dict[str, int] = defaultdict(int)
    for part in of_parts:
        for tier, size in part.items():
            total[tier] += size
    return {tier: total[tier] for tier in TIERS if total[tier]}


@dataclass(frozen=True, slots=True)
class StageDifference:
    """Time of one stage, or of the gap between stages, on the critical path of two starts; 0 s if it is not there."""

    name: str
    path_before_s: float
    path_after_s: float
    changed_bytes: Mapping[str, int]
    """Bytes after minus before, by tier, if they differ."""

    @property
    def path_s(self) -> float:
        """Seconds that the stage adds to the critical path: after minus before."""
        return self.path_after_s - self.path_before_s


@dataclass(frozen=True, slots=True)
class Difference:
    """The changes from one start to another."""

    before: Attempt
    after: Attempt
    stages: tuple[StageDifference, ...]
    """Stages of both starts, in the order of ``after``; last the gaps between stages."""

    @property
    def seconds(self) -> float:
        """Seconds after minus before, which is the sum over the stages."""
        return self.after.seconds - self.before.seconds

    @property
    def ratio(self) -> float | None:
        """Seconds after divided by seconds before."""
        return self.after.seconds / self.before.seconds if self.before.seconds else None

    @property
    def explaining(self) -> StageDifference | None:
        """Stage that explains most of the change of the total; ``None`` for a change within a millisecond."""
        if abs(self.seconds) < _SAME_S:  # any stage would exceed a difference of nothing
            return None
        sign = 1 if self.seconds > 0 else -1
        return max(self.stages, key=lambda each: sign * each.path_s)

    @property
    def explained(self) -> float | None:
        """Share of the difference that this stage makes; above 1 if others changed in the opposite direction."""
        stage = self.explaining
        return None if stage is None else stage.path_s / self.seconds


def difference_of(before: Attempt, after: Attempt) -> Difference:
    """Compare two starts stage by stage."""
    old, new = ({stage.name: stage for stage in each.stages} for each in (before, after))
    stages = []
    for name in {**new, **old}:
        was, now = old.get(name), new.get(name)
        moved = _changed(was.bytes if was else {}, now.bytes if now else {})
        seconds = (was.path_s if was else 0.0, now.path_s if now else 0.0)
        stages.append(StageDifference(name, *seconds, moved))
    between = StageDifference(BETWEEN, before.between_s, after.between_s, {})
    return Difference(before, after, (*stages, between))


def _changed(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    more = {tier: after.get(tier, 0) - before.get(tier, 0) for tier in TIERS}
    return {tier: size for tier, size in more.items() if size}
