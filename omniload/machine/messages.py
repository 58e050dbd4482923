"""Events and commands that pass between planner, source loaders and data constructors.

::

    planner --ReadAhead--> source loader --SamplesReported, ReadFailed--> planner
    command line --ChangeAsked--> planner --KeepEdits--> edits of the run
    planner --AskFences--> data constructors --FenceTold--> planner --CutJournal--> journal, --NewEdition--> the former
    rank --ResizeAsked--> planner --AppendWorld--> journal, then --ServeWorld--> data constructors
    planner --AppendJournal, AppendBase--> journal, then --PublishPlans--> data constructor
    data constructor --SliceRequest--> source loader --SampleColumns--> data constructor
    client --StepTaken--> data constructor --StepsTaken, of its ranks--> planner --ReleaseSamples--> source loader
    planner --ReleaseSteps, where no PublishPlans says so--> data constructor
    board of the heartbeats --RanksLost--> a planner that took over
    roster --ConstructorReplaced--> planner --Republish--> the new data constructor
    roster --LoaderReplaced--> planner --TakeOver, ReadAhead--> the new source loader
    planner --ReadTimes--> compute times of the run --TimesRead--> planner --KeepEdits--> edits of the run
    scaler --HandedOver--> source loader, before others of the plane hear of the next one
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from omniload.base.state import Json, JsonObject
from omniload.machine.plans.fences import (
    AskFences,
    CutJournal,
    NewEdition,
    WithdrawalEvent,
)
from omniload.machine.plans.unread import ReadFailed
from omniload.machine.scaling.coming import Ahead
from omniload.mix.edits.edit import Change
from omniload.mix.edits.history import History
from omniload.mix.fingerprint import SourceFacts
from omniload.mix.journal.records import StepRecord
from omniload.mix.journal.times import MeasuredTimes
from omniload.mix.samples import SampleTable
from omniload.mix.state import MixState
from omniload.plan.records import StepPlan
from omniload.plan.world import World

__all__ = [
    "AppendBase",
    "AppendJournal",
    "AppendWorld",
    "ChangeAsked",
    "ConstructorReplaced",
    "EndOfData",
    "HandedOver",
    "KeepEdits",
    "LoaderReplaced",
    "PlannerCommand",
    "PlannerEvent",
    "PublishPlans",
    "RanksLost",
    "ReadAhead",
    "ReadTimes",
    "ReleaseSamples",
    "ReleaseSteps",
    "Republish",
    "ResizeAsked",
    "SamplesReported",
    "ServeWorld",
    "SliceRequest",
    "Started",
    "StepTaken",
    "StepsTaken",
    "TakeOver",
    "TimesRead",
    "base_due",
]

_BASE_EVERY = 1024
"""Steps between two whole states in the journal, at least as many as may be planned ahead: a planner that takes over
reads from the last but one."""


@dataclass(frozen=True, slots=True)
class Started:
    """The loaders and constructors stand ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesReported:
    """A source loader has read and holds these samples: all that were asked for, or the first of them."""

    source: int
    table: SampleTable
    without: tuple[int, ...] = ()
    """Shards whose records were left out."""
    size_bytes: int = 0
    """What they take of its memory; 0 where that is not known."""
    took_steps: float = field(default=0.0, compare=False)
    """Steps that went by while the planner waited for them, at the pace of the job; 0 where that is not known, and of
    a quick read. It says how far ahead the source is read, and nothing of its samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTaken:
    """A rank has handed the batch of ``step`` to its trainer: it wants the ones after it."""

    step: int
    dp_rank: int
    cp_rank: int = 0
    """Peers of a cp group fetch a slice each: the step is needed until all of them have theirs."""
    generation: int = 0
    """Generation of the rank's world; events of an earlier world are ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsTaken:
    """What ranks have told their data constructor, in one message: ``StepTaken`` of each."""

    steps: Mapping[tuple[int, int], int]
    """The last step of each rank that has told one, by its places along dp and cp."""
    generation: int = 0
    """As in ``StepTaken``."""
    is_whole: bool = field(default=False, compare=False)
    """Whether every rank of that constructor has told one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksLost:
    """Ranks that never reported to a planner that took over have ended, or give no heartbeat.

    Which steps they had taken, the lost planner may have known.
    """

    ranks: tuple[tuple[int, int], ...]
    """By their places along dp and cp."""
    generation: int
    """Of their world."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderReplaced:
    """Another loader serves these sources from now on. It holds nothing yet, or what it has mirrored."""

    sources: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstructorReplaced:
    """Another constructor serves the ranks of this one from now on. It holds nothing yet."""

    number: int
    """Place among the constructors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeAsked:
    """The mix is to be changed while it is trained on."""

    change: Change
    at: int | None = None
    """First step that it is to hold at; ``None`` for the first one that no rank was given, as far as that is known."""
    facts: SourceFacts | None = None
    """What was found in a source that is added; its loader has it open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeAsked:
    """From a step on there are other ranks; every rank that stays or joins sends this, in any order."""

    dp: int
    """Data-parallel ranks from now on."""
    step: int
    """First step that they train on; the ranks of before have trained on all steps before it."""
    generation: int | None = None
    """Of these ranks; ``None`` for those of now where the numbers are theirs, else for the next."""

    def after(self, generation: int) -> "ResizeAsked":
        """Return this with the generation after ``generation``, which is the asking rank's, where it names none."""
        return self if self.generation is not None else replace(self, generation=generation + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimesRead:
    """Compute times that ranks have reported."""

    times: MeasuredTimes


PlannerEvent = (
    Started
    | SamplesReported
    | StepTaken
    | StepsTaken
    | RanksLost
    | LoaderReplaced
    | ConstructorReplaced
    | ChangeAsked
    | ResizeAsked
    | TimesRead
    | ReadFailed
    | WithdrawalEvent
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadAhead:
    """Read and hold the raw positions ``start`` to ``stop`` of a source, and report their samples."""

    source: int
    start: int
    stop: int
    life: int = 0
    """Planners before the one that asks."""
    without: tuple[int, ...] = ()
    """Shards whose records are left out: they keep their positions and give no sample."""
    is_lacked: bool = field(default=False, compare=False)
    """Whether the next plan waits for it; it does not change what is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeOver:
    """Serve sources that another loader served: samples of these raw positions may be asked for at any time."""

    ranges: Mapping[int, tuple[int, int]]
    """For each source the first position that is still needed, and the end of what was reported."""
    without: Mapping[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    """Of sources with shards that are left out: the position from which on, and the shards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOver:
    """Another loader begins to serve sources of this one; constructors may still ask this one for them."""

    sources: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AppendJournal:
    """Make the record of a step durable before anything that follows it.

    The record is made when it is asked for: a run without a journal pays for none.
    """

    before: MixState
    plan: StepPlan
    after: MixState
    names: Sequence[str]
    bad: Mapping[int, int] = field(default_factory=dict)
    """As in ``StepRecord``."""

    @property
    def record(self) -> JsonObject:
        """What the journal keeps."""
        digest = self.plan.membership_digest()
        made = StepRecord.between(self.before, self.after, digest, self.bad)
        return made.to_json(self.names)


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendBase:
    """Note the whole state in the journal: a planner that takes over reads from there on."""

    state: MixState
    names: Sequence[str]
    fingerprint: Mapping[str, str]
    edits: Sequence[Json] = ()
    """Those up to the revision of the state."""

    @property
    def content(self) -> JsonObject:
        """What the journal keeps."""
        return self.state.to_json(self.names, self.fingerprint, self.edits)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadTimes:
    """Read the compute times that ranks have reported, for ``TimesRead``; a plane without a folder has none."""

    first: int
    """First step that times are wanted of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepEdits:
    """Make an edit durable before any step that is planned under it."""

    history: History


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendWorld:
    """Note in the journal which ranks there are, before any constructor builds for them."""

    world: World


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeWorld:
    """Have every constructor drop what it built for other ranks, and build these steps for the ranks of now."""

    world: World
    windows: tuple[tuple[StepPlan, ...], ...]
    """The steps from the world's first on that are planned, placed on its ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishPlans:
    """Build the steps: every constructor its ranks' rows."""

    plans: tuple[StepPlan, ...]
    """One for each step, in order."""
    released_to: int
    """Batches of steps before this one are no longer needed: said with the plans, as a call takes longer than that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Republish:
    """Have one constructor build what the one before it held, or was to build."""

    number: int
    """Place among the constructors."""
    released_to: int
    """Every rank has taken the steps before this one."""
    windows: tuple[tuple[StepPlan, ...], ...]
    """The steps after them that are planned, as they were published."""
    end: int | None
    """First step that there is none of, where that is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseSamples:
    """Samples of these sources before these raw positions are no longer needed."""

    floors: dict[int, int]
    life: int = 0
    """Lost planners before the sender: a later planner may need samples again that the sender did not."""
    ahead: Ahead | None = field(default=None, compare=False)
    """What coming steps draw, by which readers are scaled; it does not change what is released."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseSteps:
    """Batches of steps before ``step`` are no longer needed."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndOfData:
    """There is no step ``step``: the mix says to stop before it, or the run has no more steps."""

    step: int


PlannerCommand = (
    ReadAhead
    | TakeOver
    | AppendJournal
    | AppendBase
    | AppendWorld
    | KeepEdits
    | ReadTimes
    | ServeWorld
    | PublishPlans
    | Republish
    | ReleaseSamples
    | ReleaseSteps
    | EndOfData
    | AskFences
    | CutJournal
    | NewEdition
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceRequest:
    """Token ranges of samples of one source: one request per source and step."""

    source: int
    positions_N: NDArray[np.int64]
    subs_N: NDArray[np.int64]
    starts_N: NDArray[np.int64]
    stops_N: NDArray[np.int64]
    columns: tuple[str, ...] = ()
    """Columns wanted beside the tokens; one that the source has not is left out of the answer."""


def base_due(
    history: History, state: MixState, fingerprint: Mapping[str, str], world: World
) -> tuple[AppendBase | AppendWorld, ...]:
    """Return the records of a whole state that the journal is due before the step of ``state``; most often none."""
    if state.step % _BASE_EVERY:
        return ()
    beside = history.state_fields_at(state.mix_revision, fingerprint)
    base = AppendBase(state=state, **beside)
    # With the ranks: a planner that takes over reads from this base on.
    return (base, AppendWorld(world=world)) if world.generation else (base,)
