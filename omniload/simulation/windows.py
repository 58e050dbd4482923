"""Costs of windows of steps, each part by itself in this process: planned at a job's size, built at two sizes.

The planner runs with loaders that answer immediately. Windows are planned, read and fetched for real, as one
constructor does it.

All figures are processor time, so that other work on the machine has little effect.
"""

import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import TypeAlias

import numpy as np

from omniload.actors.heartbeat_board import Figures
from omniload.actors.opening import runtime_of
from omniload.actors.plane import PlaneSpec
from omniload.actors.planner_journal import Kept, keep, open_journal
from omniload.actors.roles.loader import LoaderShell
from omniload.actors.roles.planned_counts import PlannedCounts
from omniload.machine.data_constructor import DataConstructor
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
from omniload.machine.plans.building import BuildSteps, FetchSlices, SlicesFetched
from omniload.mix.columns import ColumnRanges
from omniload.mix.config import MixConfig
from omniload.mix.journal.journal import Journal
from omniload.plan.place_tree import ClientPlaceTree
from omniload.plan.records import StepPlan
from omniload.simulation.hollow import HollowSource
from omniload.simulation.job import Job, a_planner_of, constructors_of
from omniload.simulation.profile import BuildCosts, PlannerCosts, Profile
from omniload.simulation.reading import Shown, line_through, spent_s
from omniload.simulation.rehearsal import Rehearsal
from omniload.simulation.scale import with_tokens

__all__ = ["measure_builds", "measure_planner", "with_planner"]

_PLANNED_TOKENS = 1 << 30
_LEAST_WINDOWS, _MOST_WINDOWS = 4, 24
_WARM_UP = 2
"""Windows planned while sources are first read."""
_PASSES, _MOST_S = 3, 4.0
"""How often the same windows are planned, and the seconds after which they are not planned again."""
_WINDOWS, _WARM_WINDOWS = 8, 1
_BUILT = 3
"""How often each window is built."""
_PARTS = 4
"""Ratio of the tokens of the larger built window to the smaller one."""
_TOKENS_BUILT = 16 << 20
"""Approximate number of tokens that are read to measure building."""


_Timed: TypeAlias = defaultdict[str, list[float]]
"""Processor seconds of each event or step, by the kind of work."""


def _mean_of(passes: Sequence[_Timed], what: str) -> float:
    """Return the mean over events, for each the median of the passes; 0 if there was none.

    Planning is the same in each pass, down to the event. The passes differ only by the machine and the interpreter,
    such as by a collection of garbage.
    """
    found = np.asarray([timed.get(what, []) for timed in passes])
    return float(np.median(found, axis=0).mean()) if found.size else 0.0


def measure_planner(
    job: Job, profile: Profile, windows: int, advance: Callable[[int], object]
) -> PlannerCosts:
    """Plan some windows for real, several times if that is fast; ``advance`` is called once per window."""
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


def with_planner(profile: Profile, job: Job, shown: Shown) -> Profile:
    """Return the profile with the costs of planning at the job's size."""
    mix, ranks = job.spec.mix, job.spec.tree.size_of("dp")
    if profile.planner_of(ranks=ranks, sources=len(mix.names), tokens=mix.batch.tokens):
        return profile
    per_window = mix.batch.tokens * mix.steps_at_once
    # Few windows of a large job are planned, because each takes seconds, and says as much as many small ones.
    windows = max(_LEAST_WINDOWS, min(_MOST_WINDOWS, _PLANNED_TOKENS // per_window))
    with shown(f"planning for {ranks} ranks", windows) as advance:
        costs = measure_planner(job, profile, windows, advance)
    return profile.model_copy(update={"planners": (*profile.planners, costs)})


def _planned(job: Job, profile: Profile, windows: int, advance: Callable[[int], object]) -> _Timed:
    planner, timed = a_planner_of(job, profile), _Timed(list)
    sources = [HollowSource(s, costs) for s, costs in enumerate(job.costs(profile))]
    # On Ray there always is a journal, because a planner that replaces a lost one reads it.
    has_journal = runtime_of(job.spec) == "ray" or job.spec.run_dir is not None
    with tempfile.TemporaryDirectory() if has_journal else nullcontext() as folder:
        # Not durable: waiting for a disk takes no processor time, and steps are planned far ahead of it.
        journal = open_journal(Path(folder), planner, durable=False) if folder else None
        run = _TimedPlanner(planner, sources, journal, job, timed)
        for _ in islice(run.windows(), windows + _WARM_UP):
            advance(1)
        if journal is not None:
            journal.close()
    return timed


class _TimedPlanner:
    """A planner, with loaders and ranks that answer it immediately."""

    def __init__(
        self,
        planner: Planner,
        sources: Sequence[HollowSource],
        journal: Journal | None,
        job: Job,
        timed: _Timed,
    ) -> None:
        self._planner, self._sources, self._journal = planner, sources, journal
        self._timed, self._counts = timed, PlannedCounts(Figures())
        self._parts = [ranks for _, ranks in constructors_of(job)]
        self._num_ranks = job.spec.tree.size_of("dp")

    def windows(self) -> Iterator[None]:
        """Continue to plan; yield after each window."""
        events: deque[PlannerEvent] = deque([Started()])
        number = 0
        while events:
            event = events.popleft()
            began_s = time.process_time()
            commands = self._planner.handle(event)
            published = [each for each in commands if isinstance(each, PublishPlans)]
            plans = [plan for each in published for plan in each.plans]
            self._keep(commands)
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
                # Every rank takes every step immediately, because the planner is only timed here and never held up.
                events.extend(
                    StepTaken(step=each.plans[-1].step, dp_rank=rank)
                    for rank in range(self._num_ranks)
                )
                yield

    def _keep(self, commands: Sequence[PlannerCommand]) -> None:
        """Do what the planner's shell does apart from sending messages."""
        kept = [command for command in commands if isinstance(command, Kept)]
        if self._journal is not None and kept:
            keep(self._journal, kept)
        self._counts.note(commands, self._planner.ranks.slowest)

    def _count(self, event: PlannerEvent, seconds: float, steps: int) -> None:
        if steps:
            # The event's own cost is small compared with a step, and is counted with it.
            self._timed["step"].append(seconds / steps)
        elif isinstance(event, SamplesReported | StepTaken):
            self._timed["taken" if isinstance(event, StepTaken) else "report"].append(seconds)

    def _time_parts(self, plans: Sequence[StepPlan]) -> None:
        began_s = time.process_time()
        for plan in plans:
            plan.parts_of(self._parts)
        passed_s = time.process_time() - began_s
        self._timed["part"].append(passed_s / (len(self._parts) * len(plans)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """Costs of building a window."""

    slices_s: float
    rows_s: float
    requests: int
    tokens: int


def measure_builds(spec: PlaneSpec, runtime: str, *, ranks: int, tokens: int) -> BuildCosts:
    """Build windows of steps as one constructor does.

    Args:
        spec: The mix of the profile.
        runtime: Within a process samples are copied once, between processes twice.
        ranks: Ranks of the constructor.
        tokens: Tokens of a step over all its ranks.

    Returns:
        The costs.
    """
    # At least four rows: a quarter of fewer rows has as many tokens, and no line could be drawn through the two sizes.
    rows = max(4, ranks, tokens // spec.mix.pack.length)
    large, small = _windows_of(
        [(_with_rows(spec, rows), ranks), _quartered(_with_rows(spec, rows), ranks)], runtime
    )
    rows_s, rows_token_s = line_through(small.tokens, small.rows_s, large.tokens, large.rows_s)
    fixed_s, slices_token_s = line_through(
        small.tokens, small.slices_s, large.tokens, large.slices_s
    )
    return BuildCosts(
        slices_request_s=fixed_s / large.requests,
        slices_token_s=slices_token_s,
        rows_s=rows_s,
        rows_token_s=rows_token_s,
    )


def _with_rows(spec: PlaneSpec, rows: int) -> PlaneSpec:
    """Return the mix with ``rows`` rows per step, and with the steps ahead of its file."""
    ahead = spec.mix.steps_ahead
    mix = with_tokens(spec.mix, rows * spec.mix.pack.length)
    return replace(spec, mix=_with_ahead(mix, ahead))


def _quartered(spec: PlaneSpec, ranks: int) -> tuple[PlaneSpec, int]:
    """Return the mix with windows of a quarter of the tokens, and the number of ranks for it.

    The windows have fewer steps. If they have few steps already, the steps have fewer rows, for fewer ranks.
    """
    mix = spec.mix
    if mix.steps_at_once >= _PARTS:
        return replace(spec, mix=_with_ahead(mix, 2 * (mix.steps_at_once // _PARTS))), ranks
    few = with_tokens(mix, mix.batch.tokens // _PARTS)
    return replace(spec, mix=_with_ahead(few, 2 * mix.steps_at_once)), max(1, ranks // _PARTS)


def _with_ahead(mix: MixConfig, steps: int) -> MixConfig:
    """Return the mix with this many steps ahead; half as many are planned together, if they fit."""
    runtime = mix.runtime.model_copy(update={"prefetch_steps": steps})
    return mix.model_copy(update={"runtime": runtime})


def _windows_of(sizes: Sequence[tuple[PlaneSpec, int]], runtime: str) -> list[_Window]:
    """Plan, read and build some windows of each size for real; return the medians.

    The sizes alternate, and each window is built a few times, so that a slow moment of the machine affects all sizes,
    and only a minority of each.
    """
    largest = max(spec.mix.batch.tokens * spec.mix.steps_at_once for spec, _ in sizes)
    windows = int(np.clip(_TOKENS_BUILT // largest, 2, _WINDOWS)) + _WARM_WINDOWS
    specs = [
        replace(spec, tree=ClientPlaceTree.of(dp=ranks), num_steps=None) for spec, ranks in sizes
    ]
    rounds: list[list[_Window]] = []
    with ExitStack() as opened:
        rehearsals = [opened.enter_context(closing(Rehearsal(spec))) for spec in specs]
        planned = zip(*(each.windows() for each in rehearsals), strict=False)
        for together in islice(planned, windows):
            rounds.extend(
                [
                    _built(spec, plans, rehearsal.loader, runtime)
                    for spec, plans, rehearsal in zip(specs, together, rehearsals, strict=True)
                ]
                for _ in range(_BUILT)
            )
    # If the data ends in the first windows, no measured window remains, and the last one is used as it is.
    measured = rounds[_WARM_WINDOWS * _BUILT :] or rounds[-1:]
    return [_median(each) for each in zip(*measured, strict=True)]


def _median(windows: Sequence[_Window]) -> _Window:
    return _Window(
        slices_s=median(each.slices_s for each in windows),
        rows_s=median(each.rows_s for each in windows),
        requests=round(median(each.requests for each in windows)),
        tokens=round(median(each.tokens for each in windows)),
    )


def _built(
    spec: PlaneSpec, plans: Sequence[StepPlan], loader: LoaderShell, runtime: str
) -> _Window:
    machine = DataConstructor.of(spec.mix, range(spec.tree.size_of("dp")))
    begun_s, (fetch,) = spent_s(lambda: machine.handle(BuildSteps(plans=plans)))
    assert isinstance(fetch, FetchSlices), "the steps are new"
    # Between processes, the loader copies its answer; within a process, the constructor reads the samples in place.
    if runtime == "ray":
        slices_s, answer = spent_s(lambda: loader.slices(fetch.requests))
        joined_s, slices = spent_s(lambda: ColumnRanges.of(answer))
    else:
        joined_s = 0.0
        slices_s, slices = spent_s(lambda: loader.ranges(fetch.requests))
    fetched = SlicesFetched(steps=fetch.steps, slices=slices)
    built_s, _ = spent_s(lambda: machine.handle(fetched))
    return _Window(
        slices_s=slices_s,
        rows_s=begun_s + joined_s + built_s,
        requests=len(fetch.requests),
        tokens=int(slices.tokens.lengths_N.sum()),
    )
