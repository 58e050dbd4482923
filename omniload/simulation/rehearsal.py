"""Real planning in this thread, without training.

The planner, the source loader and the data constructor are those of a run; only the shells that carry events between
them are left out. So everything that is planned, shown, audited or timed here is as in a run.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from omniload.actors.heartbeat_board import Activity
from omniload.actors.plane import PlaneSpec
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
from omniload.mix.schedule import drawn_in, part_drawn
from omniload.mix.state import MixState
from omniload.plan.forecast.figures import StepFigures, figures_of
from omniload.plan.forecast.forecast import Forecast, Span, forecast
from omniload.plan.forecast.sizes import Sampled, SourceSizes
from omniload.plan.forecast.stages import end_is_within, steps_to_the_end
from omniload.plan.records import PieceTags, StepPlan
from omniload.plan.world import require_rows
from omniload.simulation.reading import Shown
from omniload.source.estimate import SourceProfile

__all__ = ["FirstSteps", "Refusal", "Rehearsal", "steps_of_a_forecast"]

_REHEARSED_TOKENS = 16_000_000
"""Most tokens read to measure packing and balance: about ten seconds of tokenising."""
_MOST_REHEARSED = 64
_MOST_TO_THE_END = 4096
"""Most steps of a run that is planned completely, so that its end is known: some seconds of planning."""
_MARGIN = 1.25
"""Factor by which an expected run may exceed that and is still tried, because it may turn out shorter."""
_GROUPS = 8


class Rehearsal:
    """Steps of a mix, planned one after another; the samples of each step are available until the next."""

    def __init__(self, spec: PlaneSpec) -> None:
        """Open the sources; planning starts at ``spec.state``.

        Raises:
            ConfigError: The mix, a source or the batch is refused.
            StateError: ``spec.state`` does not fit the mix or the data.
        """
        require_rows(spec.mix, spec.tree)
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
        """The only loader, for all sources."""
        facts = self.loader.facts()
        self.records_S = [facts[s].positions_per_epoch for s in every_source]
        """Raw records of each source."""
        self._planner = make_planner(spec, [facts[s] for s in every_source])

    @property
    def state(self) -> MixState:
        """Present state of planning: at first ``spec.state``, which fits the mix and the data."""
        return self._planner.state

    def lost_in(self, plan: StepPlan) -> NDArray[np.int64]:
        """Return the tokens of each source that the plan yielded last cuts off or drops with overlong documents."""
        return self._planner.lost_in(plan.step)

    def plans(self) -> Iterator[StepPlan]:
        """Yield plan after plan, until the mix or ``spec.num_steps`` ends them.

        Raises:
            OmniloadError: A source cannot be read.
        """
        for window in self.windows():
            yield from window

    def windows(self) -> Iterator[Sequence[StepPlan]]:
        """Yield the plans of steps that are planned together, as ``plans`` yields them one by one."""
        events: deque[PlannerEvent] = deque([Started()])
        while events:
            for command in self._planner.handle(events.popleft()):
                match command:
                    case ReadAhead():
                        events.append(self.loader.read_ahead(command))
                    case PublishPlans(plans=plans):
                        yield plans
                        ranks, last = range(self._spec.tree.size_of("dp")), plans[-1].step
                        # Every rank takes its part immediately, so the planner continues and samples are released.
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
        """Plan until ``step`` and return its plan; ``None`` if the data ends before it."""
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
        """Return the tags that costs and strategies read, for the samples of the plan that was yielded last."""
        return self._planner.tags_of(plan.pieces)

    def place_at(self, source: int, position: int) -> tuple[str, str]:
        """Return the path of the file with a position's record, and the common name of the record there."""
        return self.loader.place_at(source, position)

    def tokens_of(self, pieces: PieceTable) -> list[NDArray[np.int32]]:
        """Return the token ids of pieces of the plan that was yielded last, in their order."""
        order = np.argsort(pieces.sources_P, kind="stable")
        tokens: list[NDArray[np.int32]] = [np.empty(0, np.int32)] * len(pieces)
        # One source at a time, because a request names one source, and pieces of a step are in the order of its rows.
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
    """The error that ends a run before its intended last step."""

    step: int
    """The first step that does not exist."""
    error: OmniloadError
    """The reason and the remedy; the command ends with the error's class."""
    is_seen: bool
    """Whether every earlier step was planned; if not, the step is only as certain as the estimates of sources."""

    def as_json(self) -> JsonObject:
        """Return the same as plain JSON; ``estimated`` marks a step that is expected and not planned."""
        return {"step": self.step, "why": str(self.error), "estimated": not self.is_seen}

    def raised(self, steps: int | None) -> OmniloadError:
        """Return the error with which the command ends, after the plan of the earlier steps.

        Args:
            steps: Number of steps that was asked for; ``None`` for all steps.
        """
        of = "" if steps is None else f" of {steps:,}"
        near = "" if self.is_seen else "about "
        said = f"the run ends at {near}step {self.step:,}{of}: {self.error}"
        return type(self.error)(said)


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstSteps:
    """The first steps of a run, as planned."""

    steps: tuple[StepFigures, ...]
    """Figures of at least one step."""
    drawn_KS: NDArray[np.int64]
    """Tokens of each source in each step, without padding."""
    overlong_KS: NDArray[np.int64]
    """Tokens left out in these steps by the policy for overlong documents."""
    begun_S: NDArray[np.int64]
    """Records of each source that they begin, each as often as they do."""
    samples_S: NDArray[np.int64]
    """Samples of each source that they begin."""
    part_drawn: float | None = None
    """How much of its amounts, of the one that is least far, is drawn and in rows; ``None`` of a mix of weights."""
    is_whole: bool = False
    """Whether these are all steps of the run."""
    refusal: Refusal | None = None
    """Why the step after them cannot be planned; ``None`` if it can, or if it was not tried."""

    @property
    def kept_S(self) -> NDArray[np.float64]:
        """Share of each source's drawn tokens that the policy for overlong documents keeps."""
        drawn_S = self.drawn_KS.sum(axis=0)
        all_S = drawn_S + self.overlong_KS.sum(axis=0)
        # A source without drawn tokens is assumed to keep all.
        kept_S: NDArray[np.float64] = np.divide(
            drawn_S, all_S, out=np.ones(len(all_S)), where=drawn_S > 0
        )
        return kept_S

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens of a step, without a short step at the end of the data, which is not typical."""
        most = max(step.capacity for step in self.steps)
        return fmean(step.tokens for step in self.steps if step.capacity == most)

    @property
    def waste(self) -> float:
        """Share of the rows that is padding."""
        return 1.0 - sum(s.tokens for s in self.steps) / sum(s.capacity for s in self.steps)

    def sizes(self, mix: MixConfig, profiles: Sequence[SourceProfile]) -> SourceSizes:
        """Return the sizes of sources and of a step; for a completely planned run, as it draws them."""
        sizes = self._sizes(mix, profiles)
        if not self.is_whole:
            return sizes
        drawn_S, records_S = self.drawn_KS.sum(axis=0), [float(each.records) for each in profiles]
        epochs_S = self.begun_S / np.asarray(records_S)
        sizes = sizes.that_gave(drawn_S, self.samples_S, epochs_S)
        return replace(sizes, planned_tokens=float(drawn_S.sum()) / len(self.steps))

    def forecast(self, mix: MixConfig, sizes: SourceSizes, num_steps: int) -> Forecast:
        """Return the forecast of a run of ``num_steps`` steps; exact for a completely planned run."""
        drawn_KS = self.drawn_KS if self.is_whole else None
        return forecast(mix, sizes, num_steps, drawn_KS=drawn_KS)

    def end(self, mix: MixConfig, profiles: Sequence[SourceProfile]) -> int | None:
        """Return the number of steps after which a mix is expected to end; ``None`` if beyond any allowed run."""
        return steps_to_the_end(mix, self._sizes(mix, profiles))

    def end_is_within(
        self, mix: MixConfig, profiles: Sequence[SourceProfile], total: Span
    ) -> float | None:
        """Return half the relative uncertainty of ``end``; ``None`` if unknown, for instance from only one place.

        It is 0 for a completely planned run.
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
        sizes = SourceSizes.of(
            mix,
            [float(source.records) for source in profiles],
            tokens_S * self.kept_S,
            [source.behind for source in profiles],
            samples_per_record_S=[source.samples_per_record for source in profiles],
        )
        return replace(sizes, planned_tokens=self.tokens_per_step)

    def _but_for(self, group: int, groups: int) -> "FirstSteps":
        """Return the steps without one of ``groups`` groups of neighbours."""
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
    """Plan the first steps of a run, or all steps of a short run that ends with its data.

    Args:
        spec: The run.
        profiles: Profiles of its sources.
        shown: Shows the progress.
        steps: Requested number of steps; ``None`` for all until the run ends by itself.
        rehearse: Number of steps to plan; ``None`` for as many as needed.

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
    """Return whether a run draws all that it must draw of each source, and then ends."""
    return mix.mix.amounts is not None or mix.mix.stop == "each_once"


def _first_steps(
    spec: PlaneSpec, shown: Shown, most: int, most_of: Callable[[FirstSteps], int]
) -> FirstSteps:
    """Plan ``most`` steps of a run; ``most_of`` receives them, and returns how many to plan in total."""
    rehearsal, mix = Rehearsal(spec), spec.mix
    plans, dp = rehearsal.plans(), spec.tree.size_of("dp")
    steps: list[StepFigures] = []
    num_sources, drawn_KS = len(mix.names), list[tuple[int, ...]]()
    samples_S = np.zeros(num_sources, np.int64)
    overlong_KS = list[NDArray[np.int64]]()

    def planned_by(count: int, advance: Callable[[int], object]) -> Refusal | None:
        try:
            for planned in islice(plans, count):
                steps.append(figures_of(mix, planned, dp, rehearsal.tags_of(planned)))
                drawn_KS.append(planned.tokens_S)
                begun = planned.pieces.sources_P[planned.pieces.starts_P == 0]
                samples_S[:] += np.bincount(begun, minlength=num_sources)
                overlong_KS.append(rehearsal.lost_in(planned))
                advance(1)
        except (ConfigError, IntegrityError) as error:
            # The mix or its data fail at the same step of every run, but a store may answer the next time.
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
            overlong_KS=np.asarray(overlong_KS),
            begun_S=np.asarray(
                [drawn_in("epochs", rehearsal.state, s) for s in range(num_sources)]
            ),
            samples_S=samples_S.copy(),
            part_drawn=None if mix.mix.amounts is None else part_in_rows(rehearsal.state),
            refusal=refusal,
        )

    def part_in_rows(state: MixState) -> float:
        in_rows, waits = np.sum(drawn_KS), state.carried.lengths_P.sum()
        return part_drawn(mix, state, rehearsal.records_S) * float(in_rows / (in_rows + waits))

    limit = min(most, spec.num_steps or most)
    found = look(limit)
    if len(steps) == limit and (more := most_of(found)) > limit:
        limit = min(more, spec.num_steps or more)
        found = look(limit - len(steps))
    # If fewer steps were planned than intended, the data or a fault has ended the run.
    return replace(found, is_whole=len(steps) < limit or len(steps) == spec.num_steps)
