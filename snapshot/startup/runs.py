"""Begins and ends paired into runs of a stage on a node."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from snapshot.startup.events import StageEvent

__all__ = ["Joined", "Run", "entered_of", "runs_of", "spans_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A stage carried out once by one process."""

    begin_ns: int
    end_ns: int | None
    """``None`` where no end was written: it runs on, or its process was killed."""
    bytes: Mapping[str, int] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)


class Joined(NamedTuple):
    """The runs of one attempt, and what of its lines is none."""

    runs: dict[tuple[str, str], list[Run]]
    """By node and stage, at least one each, in order of their begin."""
    strays: int
    """Ends that no begin came before."""
    backward: int
    """Runs whose end was before their begin; they end when they begin."""


def runs_of(events: Iterable[StageEvent]) -> Joined:
    """Pair the events of one attempt.

    Events with a ``run`` are paired by it, in the order they are given: it is written by
    one process into one file. Events without are paired first to first in the order of
    their times, which leaves the time in which any run was going the same however they
    belong together.
    """
    grouped: defaultdict[tuple[str, str, str], list[StageEvent]] = defaultdict(list)
    for event in events:
        grouped[event.node, event.stage, event.run].append(event)
    runs: defaultdict[tuple[str, str], list[Run]] = defaultdict(list)
    strays = backward = 0
    for (node, stage, run), lines in grouped.items():
        if not run:
            # At the same moment a begin comes first: a stage may take no time.
            lines.sort(key=lambda line: (line.time_ns, line.event))
        paired, unpaired, turned = _paired(lines)
        if paired:
            runs[node, stage] += paired
        strays += unpaired
        backward += turned
    for each in runs.values():
        each.sort(key=lambda run: run.begin_ns)
    return Joined(dict(runs), strays, backward)


def _paired(lines: Iterable[StageEvent]) -> tuple[list[Run], int, int]:
    """Return the runs, the ends without a begin, and the runs that end before they begin."""
    begins: list[int] = []
    ended = strays = backward = 0
    runs: list[Run] = []
    for line in lines:
        time_ns = line.time_ns
        if line.event == "begin":
            begins.append(time_ns)
            continue
        if ended == len(begins):
            strays += 1
            continue
        begin_ns, ended = begins[ended], ended + 1
        backward += time_ns < begin_ns
        runs.append(
            Run(
                begin_ns=begin_ns,
                end_ns=max(begin_ns, time_ns),
                bytes=line.bytes,
                facts=line.facts,
            )
        )
    runs += (Run(begin_ns=begin_ns, end_ns=None) for begin_ns in begins[ended:])
    return runs, strays, backward


def spans_of(runs: Iterable[Run], last_ns: int | None = None) -> list[tuple[int, int]]:
    """Return when at least one run was going: begins and ends, in order, apart from each other.

    Args:
        runs: In any order.
        last_ns: End to take for runs without one; ``None`` leaves them out.
    """
    ended = ((run.begin_ns, last_ns if run.end_ns is None else run.end_ns) for run in runs)
    spans: list[tuple[int, int]] = []
    for begin, end in sorted((begin, end) for begin, end in ended if end is not None):
        if spans and begin <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(spans[-1][1], end)
        else:
            spans.append((begin, end))
    return spans


def entered_of(runs: Sequence[Run], last_ns: int) -> list[tuple[int, int]]:
    """Return the spans of a meeting, each from where the last run of it began.

    Args:
        runs: In order of their begin.
        last_ns: End of runs without one.
    """
    begins = [run.begin_ns for run in runs]
    spans = spans_of(runs, last_ns)
    return [(begins[bisect_right(begins, end) - 1], end) for _, end in spans]
