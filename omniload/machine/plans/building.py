"""What a data constructor is told of steps and of their samples, and what it asks for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from omniload.batch.microbatch import Microbatch
from omniload.machine.messages import SliceRequest
from omniload.mix.columns import ColumnRanges
from omniload.plan.records import StepPlan
from omniload.plan.world import RanksServed

__all__ = [
    "BatchesBuilt",
    "BuildSteps",
    "Commands",
    "FetchSlices",
    "SlicesFetched",
    "SlicesMissing",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSteps:
    """Plans were published: these are the parts of them that concern this constructor, in step order."""

    plans: Sequence[StepPlan]
    served: RanksServed | None = None
    """The ranks to build them for; ``None`` for those of before. Without plans it says that there are other ranks."""
    released_to: int = 0
    """As in ``PublishPlans``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicesFetched:
    """The source loaders have answered: the ranges asked for, request by request."""

    steps: tuple[int, ...]
    slices: ColumnRanges
    generation: int = 0
    """Generation of the ranks that they were asked for."""
    edition: tuple[int, int] = (0, 0)
    """Number of the edition of the plans that they were asked for."""
    rows: Sequence[Microbatch] | None = None
    """Microbatches of the ranges, from ``DataConstructor.lay_out``; ``None`` has them laid out as they are handled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicesMissing:
    """A source loader does not hold what was asked for: it has let go of it, or never had it."""

    steps: tuple[int, ...]
    generation: int = 0
    """Generation of the ranks that it was asked for."""
    edition: tuple[int, int] = (0, 0)
    """As in ``SlicesFetched``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchSlices:
    """Ask the source loaders, one request for each source of the steps."""

    steps: tuple[int, ...]
    requests: Sequence[SliceRequest]
    generation: int = 0
    """Generation of the ranks that they are for."""
    edition: tuple[int, int] = (0, 0)
    """Number of the edition of their plans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchesBuilt:
    """Nothing of the steps is left to build: ranks that wait for one of them may look."""

    steps: tuple[int, ...]


Commands: TypeAlias = tuple[FetchSlices | BatchesBuilt, ...]
"""What must now be done, in order."""
