"""Events and commands of a data constructor."""

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
    """Plans were published; these are the parts for this constructor, in step order."""

    plans: Sequence[StepPlan]
    served: RanksServed | None = None
    """The ranks to build for; ``None`` for the same ranks as before. If only the ranks change, there are no plans."""
    released_to: int = 0
    """As in ``PublishPlans``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicesFetched:
    """The source loaders have answered with the requested ranges, request by request."""

    steps: tuple[int, ...]
    slices: ColumnRanges
    generation: int = 0
    """Generation of the ranks that the request was for."""
    edition: tuple[int, int] = (0, 0)
    """Number of the edition of the plans that the request was for."""
    rows: Sequence[Microbatch] | None = None
    """Microbatches from ``DataConstructor.lay_out``; if ``None``, rows are laid out when the event is handled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicesMissing:
    """A source loader does not hold the requested samples: it has released them, or never had them."""

    steps: tuple[int, ...]
    generation: int = 0
    """As in ``SlicesFetched``."""
    edition: tuple[int, int] = (0, 0)
    """As in ``SlicesFetched``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchSlices:
    """Ask the source loaders for samples, with one request for each source of the steps."""

    steps: tuple[int, ...]
    requests: Sequence[SliceRequest]
    generation: int = 0
    """Generation of the ranks that the steps are built for."""
    edition: tuple[int, int] = (0, 0)
    """Number of the edition of the plans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchesBuilt:
    """Building of these steps is finished, so ranks that wait for one of them can look again."""

    steps: tuple[int, ...]


Commands: TypeAlias = tuple[FetchSlices | BatchesBuilt, ...]
"""Commands to carry out, in order."""
