"""Ways between the roles as threads of one process."""

from collections.abc import Sequence
from concurrent.futures import Future

from typing_extensions import override

from omniload.actors.roles.constructor import ConstructorShell
from omniload.actors.roles.links import ConstructorLink, LoaderLink
from omniload.actors.roles.loader import LoaderShell
from omniload.base.concurrency.threads import DaemonPool
from omniload.base.errors import OmniloadError
from omniload.machine.messages import (
    ReadAhead,
    ReleaseSamples,
    ReleaseSteps,
    SamplesReported,
    TakeOver,
)
from omniload.plan.records import StepPlan
from omniload.plan.world import RanksServed

__all__ = ["LocalConstructor", "LocalLoader"]


class LocalLoader(LoaderLink):
    """A way to the source loader."""

    def __init__(self, shell: LoaderShell, pool: DaemonPool, name: str) -> None:
        self._shell, self._pool, self._name = shell, pool, name

    @property
    @override
    def name(self) -> str:
        return self._name

    @override
    def read_ahead(self, command: ReadAhead) -> "Future[SamplesReported]":
        return self._pool.submit(lambda: self._shell.read_ahead(command))

    @override
    def take_over(self, command: TakeOver) -> "Future[None]":
        return self._pool.submit(lambda: self._shell.take_over(command))

    @override
    def release(self, command: ReleaseSamples) -> None:
        self._shell.release(command)


class LocalConstructor(ConstructorLink):
    """A way to the data constructor."""

    def __init__(
        self, shell: ConstructorShell, dp_ranks: tuple[int, ...], pool: DaemonPool
    ) -> None:
        self._shell, self._pool = shell, pool
        self._dp_ranks = dp_ranks

    @property
    @override
    def dp_ranks(self) -> Sequence[int]:
        return self._dp_ranks

    @override
    def build(self, plans: Sequence[StepPlan], served: RanksServed) -> "Future[int]":
        return self._pool.submit(lambda: self._shell.build(plans, served))

    @override
    def release(self, command: ReleaseSteps) -> None:
        self._shell.release(command)

    @override
    def end(self, step: int) -> None:
        self._shell.end(step)

    @override
    def fail(self, error: OmniloadError) -> None:
        self._shell.fail(error)
