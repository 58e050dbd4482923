"""Events and commands that pass between planner, source loaders and data constructors.

::

    of every step
      planner --ReadAhead--> source loader --SamplesReported, ReadFailed--> planner
      planner --AppendJournal, AppendBase--> journal, then --PublishPlans--> data constructor
      data constructor --SliceRequest--> source loader --SampleColumns--> data constructor
      client --StepTaken--> data constructor --StepsTaken, of its ranks--> planner --ReleaseSamples--> source loader
      planner --ReleaseSteps, if no PublishPlans says so--> data constructor
    of a change of the mix
      command line --ChangeAsked--> planner --KeepEdits--> edits of the run
      planner --AskFences--> data constructor --FenceTold--> planner --CutJournal--> journal,
                                                             planner --NewEdition--> data constructor
      planner --ReadTimes--> compute times of the run --TimesRead--> planner --KeepEdits--> edits of the run
    of other ranks
      rank --ResizeAsked--> planner --AppendWorld--> journal, then --ServeWorld--> data constructors
      board of the heartbeats --RanksLost--> a planner that took over
    of other roles
      roster --ConstructorReplaced--> planner --Republish--> the new data constructor
      roster --LoaderReplaced--> planner --TakeOver, ReadAhead--> the new source loader
      scaler --HandedOver--> source loader, before the rest of the plane hears of the next loader
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

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
from omniload.plan.world import World, WorldRank

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
]


@dataclass(frozen=True, slots=True)
class Started:
    """The loaders and constructors are ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesReported:
    """A source loader has read these samples and holds them: all that were requested, or the first of them."""

    source: int
    table: SampleTable
    without: tuple[int, ...] = ()
    """Shards whose records were left out."""
    size_bytes: int = 0
    """Memory that they take in the loader; 0 if unknown."""
    took_steps: float = field(default=0.0, compare=False)
    """Duration of the read in steps of the job; 0 if unknown, and for a quick read. It decides only how far ahead the
    source is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTaken:
    """A rank has handed the batch of ``step`` to its trainer and wants the next ones."""

    step: int
    dp_rank: int
    cp_rank: int = 0
    """Each peer of a cp group fetches its own slice, so the step is needed until all of them have theirs."""
    generation: int = 0
    """Generation of the rank's world; events of an earlier world are ignored."""

    @classmethod
    def by(cls, rank: WorldRank, step: int) -> Self:
        """Return the event of a rank."""
        return cls(step=step, dp_rank=rank.dp, cp_rank=rank.cp, generation=rank.generation)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsTaken:
    """The ``StepTaken`` of all ranks of a data constructor, in one message."""

    steps: Mapping[tuple[int, int], int]
    """The last step of each rank that has reported one, by the rank's dp and cp coordinates."""
    generation: int = 0
    """As in ``StepTaken``."""
    is_whole: bool = field(default=False, compare=False)
    """Whether every rank of that constructor has reported one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksLost:
    """Ranks have ended, or give no heartbeat, before they reported to a planner that took over.

    The lost planner may have known which steps they had taken; this one does not.
    """

    ranks: tuple[tuple[int, int], ...]
    """The ranks, by their dp and cp coordinates."""
    generation: int
    """Generation of their world."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderReplaced:
    """Another loader serves these sources from now on. It holds no samples yet, or those that it read as a shadow."""

    sources: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstructorReplaced:
    """Another constructor serves the ranks of constructor ``number`` from now on. It holds no batches yet."""

    number: int
    """Index of the constructor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeAsked:
    """A change of the mix of a running job is requested."""

    change: Change
    at: int | None = None
    """First step with the change; ``None`` for the first step that no rank was given, as far as the planner knows."""
    facts: SourceFacts | None = None
    """Facts about an added source, which a loader has opened already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeAsked:
    """The number of ranks changes at a step; every rank that stays or joins sends this, in any order."""

    dp: int
    """Data-parallel ranks from ``step`` on."""
    step: int
    """First step of the new ranks; the old ranks have trained on all earlier steps."""
    generation: int | None = None
    """Generation of the new ranks; ``None`` for the current generation if its numbers are the same, else the next."""

    def after(self, generation: int) -> "ResizeAsked":
        """Return this event; if it names no generation, with the one after ``generation``, that of the asking rank."""
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
    """Number of planners that were lost before the one that asks."""
    without: tuple[int, ...] = ()
    """Shards whose records are left out: they keep their positions but give no sample."""
    is_lacked: bool = field(default=False, compare=False)
    """Whether the next plan waits for this read; it does not change what is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeOver:
    """Serve sources of another loader; samples at these raw positions may be requested at any time."""

    ranges: Mapping[int, tuple[int, int]]
    """For each source, the first position that is still needed and the end of the reported ones."""
    without: Mapping[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    """For each source with shards to leave out: the position from which on, and the shards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOver:
    """Another loader begins to serve sources of this one; constructors may keep asking this one for a while."""

    sources: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AppendJournal:
    """Make the record of a step durable before the commands after this one.

    The record is computed on access, so a run without a journal does not pay for it.
    """

    before: MixState
    plan: StepPlan
    after: MixState
    names: Sequence[str]
    bad: Mapping[int, int] = field(default_factory=dict)
    """As in ``StepRecord``."""

    @property
    def record(self) -> JsonObject:
        """The record, as stored in the journal."""
        digest = self.plan.membership_digest()
        made = StepRecord.between(self.before, self.after, digest, self.bad)
        return made.to_json(self.names)


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendBase:
    """Write the whole state to the journal; a planner that takes over reads the journal from there on."""

    state: MixState
    names: Sequence[str]
    fingerprint: Mapping[str, str]
    edits: Sequence[Json] = ()
    """Edits up to the revision of the state."""

    @property
    def content(self) -> JsonObject:
        """The state, as stored in the journal."""
        return self.state.to_json(self.names, self.fingerprint, self.edits)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadTimes:
    """Read the compute times that ranks have reported, and answer by ``TimesRead``; without a folder there are none."""

    first: int
    """First step whose times are wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepEdits:
    """Make edits durable before any step that is planned under them."""

    history: History


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendWorld:
    """Write the ranks to the journal before any constructor builds for them."""

    world: World


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeWorld:
    """Tell every constructor to drop batches built for earlier ranks, and to build these steps for the new ones."""

    world: World
    windows: tuple[tuple[StepPlan, ...], ...]
    """The planned steps from the world's first step on, placed on its ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishPlans:
    """Tell every constructor to build its ranks' rows of these steps."""

    plans: tuple[StepPlan, ...]
    """One plan for each step, in order."""
    released_to: int
    """Batches of steps before this one are no longer needed. Sent with the plans to save a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Republish:
    """Tell a replacement constructor to build the steps that the lost one held or was told to build."""

    number: int
    """Index of the constructor."""
    released_to: int
    """Every rank has taken the steps before this one."""
    windows: tuple[tuple[StepPlan, ...], ...]
    """The planned steps after those, as they were published."""
    end: int | None
    """First step that does not exist, if the end is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseSamples:
    """Samples of these sources before these raw positions are no longer needed."""

    floors: dict[int, int]
    life: int = 0
    """Number of planners lost before the sender; a later planner may need samples again that the sender released."""
    ahead: Ahead | None = field(default=None, compare=False)
    """The draws of coming steps, used to scale readers; it does not change what is released."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseSteps:
    """Batches of steps before ``step`` are no longer needed."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndOfData:
    """There is no step ``step``: the mix ends before it, or the run has no more steps."""

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
    """Token ranges of samples of one source; there is one request per source and window of steps."""

    source: int
    positions_N: NDArray[np.int64]
    subs_N: NDArray[np.int64]
    starts_N: NDArray[np.int64]
    stops_N: NDArray[np.int64]
    columns: tuple[str, ...] = ()
    """Columns wanted in addition to the tokens; the answer leaves out columns that the source does not have."""
