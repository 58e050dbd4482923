"""Planning for real, in this thread, and training on nothing.

The planner, the source loader and the data constructor are those of a run; only the shells that carry events between
them are left out. So what is planned, shown, audited or timed here is what a run does.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from omniload.actors.heartbeat_board import Activity
from omniload.actors.plane import PlaneSpec, require_rows
from omniload.actors.planning import make_planner
from omniload.actors.roles.loader import LoaderShell
from omniload.base.errors import ConfigError
from omniload.batch.microbatch import Batch
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
    SliceRequest,
    Started,
    StepTaken,
)
from omniload.mix.pieces import PieceTable
from omniload.mix.state import MixState
from omniload.plan.forecast.forecast import StepFigures, figures_of
from omniload.plan.records import StepPlan
from omniload.simulation.reading import Shown

__all__ = ["FirstSteps", "Rehearsal", "first_steps"]


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
class FirstSteps:
    """What the first steps of a run would be."""

    steps: tuple[StepFigures, ...]
    """At least one."""
    kept_S: NDArray[np.float64]
    """Share of each source's drawn tokens that the policy for overlong documents keeps."""

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens of a step; a short one at the end of the data says nothing of the others."""
        most = max(step.capacity for step in self.steps)
        return fmean(step.tokens for step in self.steps if step.capacity == most)

    @property
    def waste(self) -> float:
        """Share of the rows that is padding."""
        return 1.0 - sum(s.tokens for s in self.steps) / sum(s.capacity for s in self.steps)


def first_steps(spec: PlaneSpec, dp: int, shown: Shown) -> FirstSteps:
    """Plan the steps of a run before ``spec.num_steps`` for ``dp`` ranks; ``shown`` tells how far that is.

    Raises:
        ConfigError: The mix ends before the first step.
        OmniloadError: A source is refused or cannot be read.
    """
    rehearsal, mix = Rehearsal(spec), spec.mix
    drawn_S = np.zeros(len(mix.names))
    steps: list[StepFigures] = []
    assert spec.num_steps is not None, "a rehearsal is bounded"
    with shown("planning steps", spec.num_steps) as advance:
        for planned in islice(rehearsal.plans(), spec.num_steps):
            steps.append(figures_of(mix, planned, dp))
            drawn_S += planned.tokens_S
            advance(1)
    if not steps:
        raise ConfigError(
            f"mix.stop {mix.mix.stop!r} ends the run before step 0; use a smaller batch or more data"
        )
    all_S = drawn_S + rehearsal.overlong_S
    return FirstSteps(
        steps=tuple(steps),
        # Of a source that nothing was drawn of nothing is known: it is taken to keep all.
        kept_S=np.divide(drawn_S, all_S, out=np.ones_like(all_S), where=drawn_S > 0),
    )
