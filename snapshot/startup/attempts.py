"""Stages of a start-up: events of many nodes joined into seconds, stragglers and bytes.

Between two barriers a job waits for the node that comes to the second last. What a start-up
took is therefore divided along those nodes, and the parts add up to the whole.

Times of different nodes come from different clocks. What the files prove of their disagreement
is shown; no time is changed for it.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from omniload.base.errors import StateError
from snapshot.startup.events import TIERS, StageEvent
from snapshot.startup.path import (
    FIRST_STEP,
    SCHEDULER_STAGES,
    PathPart,
    critical_path,
    is_meeting,
)
from snapshot.startup.reading import Run, runs_of, spans_of

__all__ = [
    "BETWEEN",
    "Attempt",
    "ClockDoubt",
    "NodeStage",
    "Stage",
    "attempts_of",
    "natural",
]

BETWEEN = "(between stages)"
"""Name for the time in which no stage runs on the node that the others wait for."""

_MOST_STAGES = 256
_NS = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStage:
    """One stage on one node, carried out by one or more processes, once or more often."""

    node: str
    begin_ns: int
    end_ns: int | None
    """``None`` while one of its runs has no end."""
    seconds: float | None
    """Time in which at least one of its runs was going; ``None`` where unfinished."""
    runs: tuple[Run, ...]
    bytes: Mapping[str, int]
    """Bytes moved, by tier; of runs that ended."""
    facts: Mapping[str, str]

    @property
    def error(self) -> str | None:
        """What a run failed with."""
        return self.facts.get("error")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage over the nodes of an attempt."""

    name: str
    nodes: tuple[NodeStage, ...]
    median_s: float | None
    """Over the nodes that ended it, as ``max_s``; ``None`` where none did."""
    max_s: float | None
    straggler_ratio: float | None
    """``max_s / median_s``; ``None`` where either is missing or the median is 0."""
    slowest: str | None
    lost_s: float
    """``max_s - median_s``: what the slowest node may cost the job; 0 where none ended."""
    path_s: float
    """Part of the critical path."""
    bytes: Mapping[str, int]

    @property
    def unfinished(self) -> tuple[str, ...]:
        """Nodes that began it and never ended it."""
        return tuple(each.node for each in self.nodes if each.end_ns is None)

    @property
    def failed(self) -> tuple[str, ...]:
        """Nodes whose stage ended with an error."""
        return tuple(each.node for each in self.nodes if each.error is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockDoubt:
    """Two nodes whose clocks cannot both be right."""

    stage: str
    """All nodes are in it together at some moment."""
    left: str
    """Left it, by its own clock, ..."""
    entered: str
    """... before this node entered it."""
    at_least_s: float
    """How far the clocks are apart at the least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of a job."""

    job: str
    number: int
    begin_ns: int
    """First moment of any stage."""
    end_ns: int
    """Last end of the first step; the last line where it was not reached."""
    stages: tuple[Stage, ...]
    """In the order in which the nodes, by their median, begin them."""
    path: tuple[PathPart, ...]
    """From begin to end without a hole."""
    between_s: float
    """Part of the critical path in which no stage runs on the node that the others wait for."""
    reached: bool
    """Whether all nodes that began the first step ended it, at least one."""
    bytes: Mapping[str, int]
    doubt: ClockDoubt | None
    strays: int
    """Ends without a begin, which are left out."""
    backward: int
    """Runs that end before they begin, counted as nothing: the clock was set back."""

    @property
    def seconds(self) -> float:
        """The critical path: the parts of all stages and what lies between."""
        return (self.end_ns - self.begin_ns) / _NS

    @property
    def num_held(self) -> int:
        """Nodes that were held: those with a stage that is not the scheduler's."""
        own = [stage for stage in self.stages if stage.name not in SCHEDULER_STAGES]
        return len({each.node for stage in own for each in stage.nodes})

    @property
    def nodes(self) -> tuple[str, ...]:
        """All nodes, the writer of the queue too, numbers in names in their order."""
        return tuple(sorted({n.node for stage in self.stages for n in stage.nodes}, key=natural))

    @property
    def worst(self) -> Stage | None:
        """The stage whose slowest node lost most seconds, meetings left out.

        The first node at a meeting spends longest in it, waiting for the others.
        """
        own = [s for s in self.stages if s.max_s is not None and not is_meeting(s.name)]
        return max(own, key=lambda stage: stage.lost_s, default=None)


def attempts_of(events: Iterable[StageEvent]) -> tuple[Attempt, ...]:
    """Join events into attempts, in order of job and number.

    Args:
        events: Of any jobs, attempts and nodes; those of a file in the order of its lines.

    Raises:
        StateError: An attempt has more than 256 stages.
    """
    of_attempt: defaultdict[tuple[str, int], list[StageEvent]] = defaultdict(list)
    for event in events:
        of_attempt[event.job, event.attempt].append(event)
    return tuple(
        _attempt(key, of_attempt[key])
        for key in sorted(of_attempt, key=lambda key: (natural(key[0]), key[1]))
    )


def natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """Return a key that sorts ``n2`` before ``n10``."""
    parts = re.split(r"(\d+)", name, flags=re.ASCII)
    # Longer numbers are no numbers: int() of thousands of digits takes long or fails.
    return tuple(
        (0, int(part)) if part.isascii() and part.isdigit() and len(part) < 19 else (1, part)
        for part in parts
    )


def _attempt(key: tuple[str, int], events: Sequence[StageEvent]) -> Attempt:
    joined = runs_of(events)
    last_ns = max(event.time_ns for event in events)
    nodes_of: defaultdict[str, list[NodeStage]] = defaultdict(list)
    for (node, name), found in joined.runs.items():
        nodes_of[name].append(_node_stage(node, found))
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
    runs = {name: {n.node: n.runs for n in nodes} for name, nodes in nodes_of.items()}
    path = critical_path(runs, begin_ns, end_ns, last_ns, reached=reached)
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
        doubt=_doubt(nodes_of),
        strays=joined.strays,
        backward=joined.backward,
    )


def _node_stage(node: str, runs: Sequence[Run]) -> NodeStage:
    ends = [run.end_ns for run in runs if run.end_ns is not None]
    finished = len(ends) == len(runs)
    facts = {name: text for run in runs for name, text in run.facts.items()}
    return NodeStage(
        node=node,
        begin_ns=min(run.begin_ns for run in runs),
        end_ns=max(ends) if finished else None,
        seconds=sum(end - begin for begin, end in spans_of(runs)) / _NS if finished else None,
        runs=tuple(runs),
        bytes=_sum_bytes(run.bytes for run in runs),
        facts=facts,
    )


def _stage(name: str, nodes: Sequence[NodeStage], path_s: float) -> Stage:
    nodes = sorted(nodes, key=lambda each: natural(each.node))
    took = {each.node: each.seconds for each in nodes if each.seconds is not None}
    slowest = max(took, key=lambda node: took[node], default=None)
    most = None if slowest is None else took[slowest]
    middle = median(took.values()) if took else None
    return Stage(
        name=name,
        nodes=tuple(nodes),
        median_s=middle,
        max_s=most,
        straggler_ratio=most / middle if most is not None and middle else None,
        lost_s=0.0 if most is None or middle is None else most - middle,
        slowest=slowest,
        path_s=path_s,
        bytes=_sum_bytes(each.bytes for each in nodes),
    )


def _path_s(path: Iterable[PathPart], stage: str | None) -> float:
    return sum(part.end_ns - part.begin_ns for part in path if part.stage == stage) / _NS


def _doubt(nodes_of: Mapping[str, Sequence[NodeStage]]) -> ClockDoubt | None:
    """Find the meeting that clocks contradict most: left by one node before another entered."""
    found = None
    for name in sorted(filter(is_meeting, nodes_of), reverse=True):
        ended = [(n.end_ns, n.node) for n in nodes_of[name] if n.end_ns is not None]
        if not ended:
            continue
        left_ns, left = min(ended)
        entered_ns, entered = max((n.begin_ns, n.node) for n in nodes_of[name])
        apart_s = (entered_ns - left_ns) / _NS
        if apart_s > 0 and (found is None or apart_s > found.at_least_s):
            found = ClockDoubt(stage=name, left=left, entered=entered, at_least_s=apart_s)
    return found


def _sum_bytes(of_parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return bytes by tier, nearest first, without tiers that gave nothing."""
    total: dict[str, int] = defaultdict(int)
    for part in of_parts:
        for tier, size in part.items():
            total[tier] += size
    return {tier: total[tier] for tier in TIERS if total[tier]}
