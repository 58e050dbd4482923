"""Planning for real, in this thread, and training on nothing.

The planner, the source loader and the data constructor are those of a run; only the shells that carry events between
them are left out. So what is planned, shown, audited or timed here is what a run does.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from omniload.actors.heartbeat_board import Activity
from omniload.actors.plane import PlaneSpec, require_rows
from omniload.actors.planning import make_planner
from omniload.actors.roles.loader import LoaderShell
from omniload.base.errors import ConfigError, IntegrityError, OmniloadError
from omniload.base.state import JsonObject
from omniload.batch.microbatch import Batch
from omniload.machine.data_constructor import DataConstructor
from omniload.machine.messages import (
    EndOfData,
    PlannerEvent,
    PublishPlans,
    ReadAhead,
    ReleaseSamples,
    SliceRequest,
    Started,
    StepTaken,
)
from omniload.machine.plans.building import BuildSteps, FetchSlices, SlicesFetched
from omniload.mix.config import MixConfig
from omniload.mix.pieces import PieceTable
from omniload.mix.schedule import drawn_in
from omniload.mix.state import MixState
from omniload.plan.forecast.figures import StepFigures, figures_of
from omniload.plan.forecast.forecast import Forecast, Span, forecast
from omniload.plan.forecast.sizes import Sampled, SourceSizes
from omniload.plan.forecast.stages import end_is_within, steps_to_the_end
from omniload.plan.records import PieceTags, StepPlan
from omniload.simulation.reading import Shown
from omniload.source.estimate import SourceProfile

__all__ = ["FirstSteps", "Refusal", "Rehearsal", "steps_of_a_forecast"]

_REHEARSED_TOKENS = 16_000_000
"""Tokens that may be read to measure packing and balance: about ten seconds of tokenising."""
_MOST_REHEARSED = 64
_MOST_TO_THE_END = 4096
"""Steps of a run that is planned whole, so that its end is known: some seconds of planning."""
_MARGIN = 1.25
"""Times as long as that a run may be expected to be, and is tried: it may be shorter."""
_GROUPS = 8


class Rehearsal:
    """Steps of a mix, planned one after the other; each one's samples are at hand until the next."""

    def __init__(self, spec: PlaneSpec) -> None:
        """Open the sources; planning starts where ``spec.state`` says.

        Raises:
            ConfigError: The mix, a source or the batch is refused.
            StateError: ``spec.state`` does not fit the mix or the data.
        """
        require_rows(spec)
        self._spec = spec = spec.with_edits()
        mix = spec.history.latest
        every_source = range(len(mix.names))
        self.loader = LoaderShell(
            mix,
            every_source,
            base_dir=spec.base_dir,
            cache_dir=spec.cache_dir,
            activity=Activity("loader-0"),
        )
        """The one loader of all sources."""
        facts = self.loader.facts()
        self._planner = make_planner(spec, [facts[s] for s in every_source])

    @property
    def state(self) -> MixState:
        """Where planning stands: at first what ``spec.state`` says, which fits the mix and the data."""
        return self._planner.state

    @property
    def overlong_S(self) -> NDArray[np.int64]:
        """Tokens cut off or dropped with overlong documents so far, by source."""
        return np.asarray(self._planner.overlong_S, np.int64)

    def plans(self) -> Iterator[StepPlan]:
        """Yield plan after plan, until the mix or ``spec.num_steps`` ends them.

        Raises:
            OmniloadError: A source cannot be read.
        """
        for window in self.windows():
            yield from window

    def windows(self) -> Iterator[Sequence[StepPlan]]:
        """Yield the plans of steps that are planned together, as ``plans`` does one by one."""
        events: deque[PlannerEvent] = deque([Started()])
        while events:
            for command in self._planner.handle(events.popleft()):
                match command:
                    case ReadAhead():
                        events.append(self.loader.read_ahead(command))
                    case PublishPlans(plans=plans):
                        yield plans
                        ranks, last = range(self._spec.tree.size_of("dp")), plans[-1].step
                        # Every rank takes its part at once, so the planner goes on and lets samples go.
                        events.extend(StepTaken(step=last, dp_rank=rank) for rank in ranks)
                    case ReleaseSamples():
                        self.loader.release(command)
                    case EndOfData():
                        return
                    case _:
                        pass  # nothing is journaled, and no built step is kept

    def close(self) -> None:
        """Close the sources."""
        self.loader.close()

    def plan_of(self, step: int) -> StepPlan | None:
        """Plan on until ``step`` and return its plan; ``None`` when the data ends before it."""
        return next((plan for plan in self.plans() if plan.step == step), None)

    def build(self, plan: StepPlan) -> tuple[Batch, ...]:
        """Return every rank's batch of the plan that was yielded last."""
        mix, ranks = self._spec.history.latest, tuple(range(self._spec.tree.size_of("dp")))
        constructor = DataConstructor.of(mix, ranks)
        for command in constructor.handle(BuildSteps(plans=[plan])):
            assert isinstance(command, FetchSlices), f"a new step is fetched, not {command!r}"
            slices = self.loader.ranges(command.requests)
            constructor.handle(SlicesFetched(steps=(plan.step,), slices=slices))
        return tuple(constructor.batch_of(plan.step, rank) for rank in ranks)

    def tags_of(self, plan: StepPlan) -> PieceTags:
        """Return the tags that costs and strategies read, of the samples of the plan that was yielded last."""
        return self._planner.tags_of(plan.pieces)

    def place_at(self, source: int, position: int) -> tuple[str, str]:
        """Return the path of the file that holds the record of a position, and what people call the record there."""
        return self.loader.place_at(source, position)

    def tokens_of(self, pieces: PieceTable) -> list[NDArray[np.int32]]:
        """Return the token ids of pieces of the plan that was yielded last, in their order."""
        order = np.argsort(pieces.sources_P, kind="stable")
        tokens: list[NDArray[np.int32]] = [np.empty(0, np.int32)] * len(pieces)
        # A source at a time: a request names one, and pieces of a step lie in the order of its rows.
        for source in np.unique(pieces.sources_P).tolist():
            at = order[pieces.sources_P[order] == source]
            wanted = pieces.take(at)
            request = SliceRequest(
                source=source,
                positions_N=wanted.positions_P,
                subs_N=wanted.subs_P,
                starts_N=wanted.starts_P,
                stops_N=wanted.stops_P,
            )
            (columns,) = self.loader.slices([request])
            for i, piece in enumerate(at.tolist()):
                tokens[piece] = columns.tokens[i]
        return tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """What ends a run before the last step that it is to have."""

    step: int
    """The first step that there is not."""
    error: OmniloadError
    """Why, and what to do; its class says what the command ends with."""
    is_seen: bool
    """Whether every step before was planned; where not, the step is as sure as what is expected of sources."""

    def as_json(self) -> JsonObject:
        """Return the same as plain JSON; of a step that is expected and not planned, ``estimated`` says so."""
        return {"step": self.step, "why": str(self.error), "estimated": not self.is_seen}

    def raised(self, steps: int | None) -> OmniloadError:
        """Return what the command ends with, behind the plan of the steps before.

        Args:
            steps: Those that were asked for; ``None`` for as many as there are.
        """
        of = "" if steps is None else f" of {steps:,}"
        near = "" if self.is_seen else "about "
        said = f"the run ends at {near}step {self.step:,}{of}: {self.error}"
        return type(self.error)(said)


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstSteps:
    """What the first steps of a run would be."""

    steps: tuple[StepFigures, ...]
    """At least one."""
    drawn_KS: NDArray[np.int64]
    """Tokens of each source in each step, without padding."""
    overlong_KS: NDArray[np.int64]
    """Tokens that the policy for overlong documents left out meanwhile."""
    begun_S: NDArray[np.int64]
    """Records of each source that they begin, each as often as they do."""
    is_whole: bool = False
    """Whether they are all steps of the run."""
    refusal: Refusal | None = None
    """Why the step behind them cannot be planned; ``None`` where it can, or nobody has tried."""

    @property
    def kept_S(self) -> NDArray[np.float64]:
        """Share of each source's drawn tokens that the policy for overlong documents keeps."""
        drawn_S = self.drawn_KS.sum(axis=0)
        all_S = drawn_S + self.overlong_KS.sum(axis=0)
        # Of a source that nothing was drawn of nothing is known: it is taken to keep all.
        kept_S: NDArray[np.float64] = np.divide(
            drawn_S, all_S, out=np.ones(len(all_S)), where=drawn_S > 0
        )
        return kept_S

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens of a step; a short one at the end of the data says nothing of the others."""
        most = max(step.capacity for step in self.steps)
        return fmean(step.tokens for step in self.steps if step.capacity == most)

    @property
    def waste(self) -> float:
        """Share of the rows that is padding."""
        return 1.0 - sum(s.tokens for s in self.steps) / sum(s.capacity for s in self.steps)

    def told(self, mix: MixConfig, profiles: Sequence[SourceProfile]) -> tuple[SourceSizes, float]:
        """Return what sources hold and a step takes, in tokens; of a run that was planned whole as it draws it."""
        sizes = self._sizes(mix, profiles)
        if not self.is_whole:
            return sizes, self.tokens_per_step
        drawn_S, records_S = self.drawn_KS.sum(axis=0), [float(each.records) for each in profiles]
        sizes = sizes.that_gave(drawn_S, self.begun_S / np.asarray(records_S))
        return sizes, float(drawn_S.sum()) / len(self.steps)

    def forecast(
        self, mix: MixConfig, sizes: SourceSizes, num_steps: int, *, tokens_per_step: float
    ) -> Forecast:
        """Say what a run of so many steps will draw; of one that was planned whole, what it draws."""
        drawn_KS = self.drawn_KS if self.is_whole else None
        return forecast(mix, sizes, num_steps, tokens_per_step=tokens_per_step, drawn_KS=drawn_KS)

    def end(self, mix: MixConfig, profiles: Sequence[SourceProfile]) -> int | None:
        """Return the steps that a mix is expected to end by itself after; ``None``: not within what a run may have."""
        sizes = self._sizes(mix, profiles)
        return steps_to_the_end(mix, sizes, tokens_per_step=self.tokens_per_step)

    def end_is_within(
        self, mix: MixConfig, profiles: Sequence[SourceProfile], total: Span
    ) -> float | None:
        """Return half of what ``end`` is known within, a part of it; ``None`` where nobody knows, as of one place.

        It is 0 of a run that was planned whole.
        """
        if self.is_whole:
            return 0.0
        errors_S = [np.nan if each.tokens_error is None else each.tokens_error for each in profiles]
        sampled = Sampled(
            errors_S=np.asarray(errors_S, np.float64),
            varies_S=np.asarray([each.varies for each in profiles]),
            between_S=np.asarray([each.between for each in profiles]),
            records_S=np.asarray([float(each.records) for each in profiles]),
            units_S=np.asarray([float(each.units) for each in profiles]),
        )
        groups = min(_GROUPS, len(self.steps))
        others = [self._but_for(group, groups) for group in range(groups if groups > 1 else 0)]
        return end_is_within(mix, total, sampled, [each.end(mix, profiles) for each in others])

    def _sizes(self, mix: MixConfig, profiles: Sequence[SourceProfile]) -> SourceSizes:
        tokens_S = np.asarray([source.tokens_per_record for source in profiles])
        return SourceSizes.of(
            mix,
            [float(source.records) for source in profiles],
            tokens_S * self.kept_S,
            [source.behind for source in profiles],
        )

    def _but_for(self, group: int, groups: int) -> "FirstSteps":
        """Return them without one of so many groups of neighbours."""
        left_K = np.arange(len(self.steps)) * groups // len(self.steps) != group
        return replace(
            self,
            steps=tuple(step for step, left in zip(self.steps, left_K, strict=True) if left),
            drawn_KS=self.drawn_KS[left_K],
            overlong_KS=self.overlong_KS[left_K],
        )


def steps_of_a_forecast(
    spec: PlaneSpec,
    profiles: Sequence[SourceProfile],
    shown: Shown,
    *,
    steps: int | None,
    rehearse: int | None,
) -> FirstSteps:
    """Plan the first steps of a run, and all of one that is short and ends with its data.

    Args:
        spec: The run.
        profiles: What its sources hold.
        shown: Tells how far it is.
        steps: Those that it is asked to have; ``None`` for as many as it has until it ends by itself.
        rehearse: Those to plan; ``None`` for what it takes.

    Raises:
        ConfigError: The mix ends before the first step.
        OmniloadError: A source is refused, or a store does not answer; or the first step cannot be planned.
    """
    far = int(np.clip(_REHEARSED_TOKENS // spec.mix.batch.tokens, 1, _MOST_TO_THE_END))

    def most_of(first: FirstSteps) -> int:
        if rehearse or not _ends_with_its_data(spec.mix):
            return 0
        end = first.end(spec.mix, profiles)
        return far if end is not None and end <= _MARGIN * min(far, steps or far) else 0

    most = rehearse or min(far, _MOST_REHEARSED)
    return _first_steps(replace(spec, num_steps=steps), shown, most, most_of)


def _ends_with_its_data(mix: MixConfig) -> bool:
    """Return whether a run draws all of what it is to draw of each source, and ends."""
    return mix.mix.amounts is not None or mix.mix.stop == "each_once"


def _first_steps(
    spec: PlaneSpec, shown: Shown, most: int, most_of: Callable[[FirstSteps], int]
) -> FirstSteps:
    """Plan ``most`` steps of a run; ``most_of`` is told them, and says how many to plan in all."""
    rehearsal, mix = Rehearsal(spec), spec.mix
    plans, dp = rehearsal.plans(), spec.tree.size_of("dp")
    steps: list[StepFigures] = []
    num_sources, drawn_KS = len(mix.names), list[tuple[int, ...]]()
    overlong_KS: list[NDArray[np.int64]] = [np.zeros(num_sources, np.int64)]

    def planned_by(count: int, advance: Callable[[int], object]) -> Refusal | None:
        try:
            for planned in islice(plans, count):
                steps.append(figures_of(mix, planned, dp, rehearsal.tags_of(planned)))
                drawn_KS.append(planned.tokens_S)
                overlong_KS.append(rehearsal.overlong_S)
                advance(1)
        except (ConfigError, IntegrityError) as error:
            # What the mix or its data refuse, they refuse at that step of every run; a store may answer the next time.
            if not steps:
                raise
            return Refusal(step=len(steps), error=error, is_seen=True)
        return None

    def look(count: int) -> FirstSteps:
        with shown("planning steps", count) as advance:
            refusal = planned_by(count, advance)
        if not steps:
            raise ConfigError(
                f"mix.stop {mix.mix.stop!r} ends the run before step 0; use a smaller batch or more data"
            )
        return FirstSteps(
            steps=tuple(steps),
            drawn_KS=np.asarray(drawn_KS, np.int64),
            overlong_KS=np.diff(overlong_KS, axis=0),
            begun_S=np.asarray(
                [drawn_in("epochs", rehearsal.state, s) for s in range(num_sources)]
            ),
            refusal=refusal,
        )

    limit = min(most, spec.num_steps or most)
    found = look(limit)
    if len(steps) == limit and (more := most_of(found)) > limit:
        limit = min(more, spec.num_steps or more)
        found = look(limit - len(steps))
    # Short of what was to be planned, the data or a fault has ended it.
    return replace(found, is_whole=len(steps) < limit or len(steps) == spec.num_steps)
