"""Ways from the planner's shell to the other roles; each runtime has its own."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from omniload.base.errors import OmniloadError
from omniload.machine.messages import ReadAhead, ReleaseSamples, ReleaseSteps, SamplesReported
from omniload.plan.records import StepPlan

__all__ = ["ConstructorLink", "LoaderLink"]


class LoaderLink(Protocol):
    """A way to a source loader."""

    @property
    def name(self) -> str:
        """Its name as a role."""
        ...

    def read_ahead(self, command: ReadAhead) -> "Future[SamplesReported]":
        """Start reading; the future holds the report."""
        ...

    def release(self, command: ReleaseSamples) -> None:
        """Let go; no answer."""
        ...


class ConstructorLink(Protocol):
    """A way to a data constructor."""

    @property
    def dp_ranks(self) -> Sequence[int]:
        """Data-parallel ranks that it serves."""
        ...

    def build(self, plans: Sequence[StepPlan]) -> "Future[int]":
        """Start building consecutive steps; the future says when that is done."""
        ...

    def release(self, command: ReleaseSteps) -> None:
        """Let go; no answer."""
        ...

    def end(self, step: int) -> None:
        """There is no such step."""
        ...

    def fail(self, error: OmniloadError) -> None:
        """The data plane has failed."""
        ...
