"""What planning takes at the size that is asked for: the planner itself, with loaders that answer at once."""

import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import islice
from pathlib import Path

import numpy as np

from omniload.actors.journal import Kept, keep, open_journal
from omniload.actors.opening import runtime_of
from omniload.actors.roles.planner_metrics import measure as count_plans
from omniload.machine.messages import (
    PlannerCommand,
    PlannerEvent,
    PublishPlans,
    ReadAhead,
    SamplesReported,
    Started,
    StepTaken,
)
from omniload.machine.planner import Planner
from omniload.mix.journal.file import Journal
from omniload.plan.records import StepPlan
from omniload.simulation.hollow import HollowSource
from omniload.simulation.job import Job, a_planner_of, constructors_of
from omniload.simulation.profile import PlannerCosts, Profile

__all__ = ["measure_planner"]

_WARM_UP = 2
"""Windows planned while sources are first read."""
_PASSES, _MOST_S = 3, 4.0
"""How often the same windows are planned, and how long they may take before the last time."""
_MOST_PARTS = 16
"""Constructors whose parts are timed."""


class _Timed:
    """Processor seconds by what they were spent on, in the order of the events."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def add(self, what: str, seconds: float) -> None:
        """Count one."""
        self.seconds.setdefault(what, []).append(seconds)


def _mean_of(passes: Sequence[_Timed], what: str) -> float:
    """Return what one took on average, of each the median of the passes; 0 where there was none.

    Planning is the same each time, down to the event: what differs is what the machine and the interpreter did
    meanwhile, such as a collection of garbage.
    """
    found = np.asarray([timed.seconds.get(what, []) for timed in passes])
    return float(np.median(found, axis=0).mean()) if found.size else 0.0


def measure_planner(
    job: Job, profile: Profile, windows: int, advance: Callable[[int], object]
) -> PlannerCosts:
    """Plan some windows for real, several times where that is soon done; ``advance`` is called after each, once."""
    spec, began_s = job.spec, time.perf_counter()
    passes = [_planned(job, profile, windows, advance)]
    while len(passes) < _PASSES and time.perf_counter() - began_s < _MOST_S:
        passes.append(_planned(job, profile, windows, id))
    return PlannerCosts(
        ranks=spec.tree.size_of("dp"),
        sources=len(spec.mix.names),
        tokens=spec.mix.batch.tokens,
        report_s=_mean_of(passes, "report"),
        taken_s=_mean_of(passes, "taken"),
        step_s=_mean_of(passes, "step"),
        part_s=_mean_of(passes, "part"),
    )


def _planned(job: Job, profile: Profile, windows: int, advance: Callable[[int], object]) -> _Timed:
    planner, timed = a_planner_of(job, profile, None), _Timed()
    sources = [HollowSource(s, costs) for s, costs in enumerate(job.costs(profile))]
    # On Ray there is one in any case: a planner that takes the place of a lost one reads it.
    has_journal = runtime_of(job.spec) == "ray" or job.spec.run_dir is not None
    with tempfile.TemporaryDirectory() if has_journal else nullcontext() as folder:
        journal = open_journal(Path(folder), planner, durable=False) if folder else None
        run = _Run(planner, sources, journal, job, timed)
        for _ in islice(run.windows(), windows + _WARM_UP):
            advance(1)
        if journal is not None:
            journal.close()
    return timed


class _Run:
    """A planner and what answers it."""

    def __init__(
        self,
        planner: Planner,
        sources: Sequence[HollowSource],
        journal: Journal | None,
        job: Job,
        timed: _Timed,
    ) -> None:
        self._planner, self._sources, self._journal = planner, sources, journal
        self._timed, self._names = timed, job.spec.mix.names
        self._parts = [ranks for _, ranks in constructors_of(job)]
        self._num_ranks = job.spec.tree.size_of("dp")

    def windows(self) -> Iterator[None]:
        """Plan on; yield after each window."""
        events: deque[PlannerEvent] = deque([Started()])
        number = 0
        while events:
            event = events.popleft()
            began_s = time.process_time()
            commands = self._planner.handle(event)
            published = [each for each in commands if isinstance(each, PublishPlans)]
            plans = [plan for each in published for plan in each.plans]
            self._keep(commands, plans)
            seconds = time.process_time() - began_s
            for command in commands:
                if isinstance(command, ReadAhead):
                    source = self._sources[command.source]
                    table = source.table(command.start, command.stop)
                    events.append(SamplesReported(source=command.source, table=table))
            is_counted = number >= _WARM_UP
            if is_counted:
                self._count(event, seconds, len(plans))
            for each in published:
                number += 1
                if is_counted:
                    self._time_parts(each.plans)
                events.extend(
                    StepTaken(step=each.plans[-1].step, dp_rank=rank)
                    for rank in range(self._num_ranks)
                )
                yield

    def _keep(self, commands: Sequence[PlannerCommand], plans: Sequence[StepPlan]) -> None:
        """Do what the planner's shell does beside telling others."""
        kept = [command for command in commands if isinstance(command, Kept)]
        if self._journal is not None and kept:
            keep(self._journal, kept)
        if plans:
            count_plans(plans, self._names)

    def _count(self, event: PlannerEvent, seconds: float, steps: int) -> None:
        if steps:
            # What the event itself takes is little beside a step, and counted with it.
            self._timed.add("step", seconds / steps)
        elif isinstance(event, SamplesReported | StepTaken):
            self._timed.add("taken" if isinstance(event, StepTaken) else "report", seconds)

    def _time_parts(self, plans: Sequence[StepPlan]) -> None:
        parts = self._parts[:_MOST_PARTS]
        began_s = time.process_time()
        for dp_ranks in parts:
            for plan in plans:
                plan.part_of(dp_ranks)
        self._timed.add("part", (time.process_time() - began_s) / (len(parts) * len(plans)))
