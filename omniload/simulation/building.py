"""Building, measured alone: windows of steps that are planned, fetched and built in this process.

Everything is processor time, so that other work on the machine counts for little.
"""

from collections import deque
from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import islice
from statistics import median

import numpy as np

from omniload.actors.heartbeats import Activity
from omniload.actors.plane import PlaneSpec
from omniload.actors.planning import make_planner
from omniload.actors.roles.loader import LoaderShell
from omniload.machine.data_constructor import (
    BuildSteps,
    DataConstructor,
    FetchSlices,
    SlicesFetched,
)
from omniload.machine.messages import (
    EndOfData,
    PlannerEvent,
    PublishPlans,
    ReadAhead,
    ReleaseSamples,
    Started,
    StepTaken,
)
from omniload.mix.columns import ColumnRanges
from omniload.mix.config import MixConfig
from omniload.plan.place_tree import ClientPlaceTree
from omniload.plan.records import StepPlan
from omniload.simulation.profile import BuildCosts
from omniload.simulation.reading import line_through, spent_s
from omniload.simulation.scale import with_tokens

__all__ = ["measure_builds"]

_WINDOWS, _WARM_WINDOWS = 8, 1
_BUILT = 3
"""How often each window is built."""
_PARTS = 4
"""The smaller of the two windows that are built has one of so many parts of the tokens of the larger one."""
_TOKENS_BUILT = 16 << 20
"""Tokens that are read to measure building, about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """What building a window took."""

    slices_s: float
    rows_s: float
    requests: int
    tokens: int


def measure_builds(spec: PlaneSpec, runtime: str, *, ranks: int, tokens: int) -> BuildCosts:
    """Build windows of steps as one constructor does.

    Args:
        spec: The mix as the profile has it.
        runtime: Within a process samples are copied once, across processes twice.
        ranks: Ranks of the constructor.
        tokens: Of a step of all of them.

    Returns:
        What it took.
    """
    # Four at least: a quarter of fewer has as many tokens, and there would be no line through the two.
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
    """Return the mix with steps of so many rows, and the steps ahead of its file."""
    ahead = spec.mix.steps_ahead
    mix = with_tokens(spec.mix, rows * spec.mix.pack.length)
    return replace(spec, mix=_with_ahead(mix, ahead))


def _quartered(spec: PlaneSpec, ranks: int) -> tuple[PlaneSpec, int]:
    """Return the mix with windows of a quarter of the tokens, and ranks for it.

    Windows have fewer steps. Where they have few, steps have fewer rows, for fewer ranks.
    """
    mix = spec.mix
    if mix.steps_at_once >= _PARTS:
        return replace(spec, mix=_with_ahead(mix, 2 * (mix.steps_at_once // _PARTS))), ranks
    few = with_tokens(mix, mix.batch.tokens // _PARTS)
    return replace(spec, mix=_with_ahead(few, 2 * mix.steps_at_once)), max(1, ranks // _PARTS)


def _with_ahead(mix: MixConfig, steps: int) -> MixConfig:
    """Return the mix with so many steps ahead; half as many go together, where they fit."""
    runtime = mix.runtime.model_copy(update={"prefetch_steps": steps})
    return mix.model_copy(update={"runtime": runtime})


def _windows_of(sizes: Sequence[tuple[PlaneSpec, int]], runtime: str) -> list[_Window]:
    """Plan, read and build some windows of each size for real; return the medians.

    Sizes take turns, and each window is built a few times: a slow moment of the machine is then one of all sizes, and a
    minority everywhere.
    """
    largest = max(spec.mix.batch.tokens * spec.mix.steps_at_once for spec, _ in sizes)
    windows = int(np.clip(_TOKENS_BUILT // largest, 2, _WINDOWS)) + _WARM_WINDOWS
    specs = [
        replace(spec, tree=ClientPlaceTree.of(dp=ranks), num_steps=None) for spec, ranks in sizes
    ]
    rounds: list[list[_Window]] = []
    with ExitStack() as opened:
        planned = [opened.enter_context(closing(_planned(spec))) for spec in specs]
        for together in islice(zip(*planned, strict=False), windows):
            rounds.extend(
                [
                    _built(spec, plans, loader, runtime)
                    for spec, (plans, loader) in zip(specs, together, strict=True)
                ]
                for _ in range(_BUILT)
            )
    measured = rounds[_WARM_WINDOWS * _BUILT :] or rounds[-1:]
    return [_median(each) for each in zip(*measured, strict=True)]


def _median(windows: Sequence[_Window]) -> _Window:
    return _Window(
        slices_s=median(each.slices_s for each in windows),
        rows_s=median(each.rows_s for each in windows),
        requests=round(median(each.requests for each in windows)),
        tokens=round(median(each.tokens for each in windows)),
    )


def _planned(spec: PlaneSpec) -> Generator[tuple[Sequence[StepPlan], LoaderShell], None, None]:
    """Plan window after window over a loader of all sources."""
    mix = spec.mix
    loader = LoaderShell(
        mix,
        range(len(mix.names)),
        base_dir=spec.base_dir,
        cache_dir=spec.cache_dir,
        activity=Activity("loader-0"),
    )
    try:
        facts = loader.facts()
        planner = make_planner(spec, [facts[s] for s in range(len(mix.names))])
        events: deque[PlannerEvent] = deque([Started()])
        while events:
            for command in planner.handle(events.popleft()):
                match command:
                    case ReadAhead():
                        events.append(loader.read_ahead(command))
                    case PublishPlans(plans=plans):
                        yield plans, loader
                        taken = plans[-1].step
                        ranks = range(spec.tree.size_of("dp"))
                        events.extend(StepTaken(step=taken, dp_rank=rank) for rank in ranks)
                    case ReleaseSamples():
                        loader.release(command)
                    case EndOfData():
                        return
                    case _:
                        pass
    finally:
        loader.close()


def _built(
    spec: PlaneSpec, plans: Sequence[StepPlan], loader: LoaderShell, runtime: str
) -> _Window:
    machine = DataConstructor.of(spec.mix, range(spec.tree.size_of("dp")))
    begun_s, (fetch,) = spent_s(lambda: machine.handle(BuildSteps(plans=plans)))
    assert isinstance(fetch, FetchSlices), "the steps are new"
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
