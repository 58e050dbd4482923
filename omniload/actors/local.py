"""The local runtime: planner, loader and constructor as threads of this process. No Ray."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

from typing_extensions import override

from omniload.actors.address import check_rank
from omniload.actors.constructor import ConstructorShell
from omniload.actors.links import ConstructorLink, LoaderLink
from omniload.actors.loader import LoaderShell
from omniload.actors.plane import (
    DataPlane,
    PlaneSpec,
    RankHandle,
    make_planner,
    open_journal,
    require_rows,
    serve_metrics,
)
from omniload.actors.planner import PlannerShell
from omniload.base.errors import OmniloadError, UnavailableError
from omniload.base.state import JsonObject
from omniload.build.microbatch import Batch
from omniload.machine.data_constructor import DataConstructor
from omniload.machine.messages import ReadAhead, ReleaseSamples, ReleaseSteps, SamplesReported
from omniload.plan.records import StepPlan

__all__ = ["LocalPlane"]

_READER_THREADS = 2
"""Decoding releases the interpreter lock, so two readers keep a second core busy."""


class _LocalLoader(LoaderLink):
    def __init__(self, shell: LoaderShell, pool: ThreadPoolExecutor) -> None:
        self._shell, self._pool = shell, pool

    @override
    def read_ahead(self, command: ReadAhead) -> "Future[SamplesReported]":
        return self._pool.submit(self._shell.read_ahead, command)

    @override
    def release(self, command: ReleaseSamples) -> None:
        self._shell.release(command)


class _LocalConstructor(ConstructorLink):
    def __init__(
        self, shell: ConstructorShell, dp_ranks: tuple[int, ...], pool: ThreadPoolExecutor
    ) -> None:
        self._shell, self._pool = shell, pool
        self._dp_ranks = dp_ranks

    @property
    @override
    def dp_ranks(self) -> Sequence[int]:
        return self._dp_ranks

    @override
    def build(self, plan: StepPlan) -> "Future[int]":
        return self._pool.submit(self._shell.build, plan)

    @override
    def release(self, command: ReleaseSteps) -> None:
        self._shell.release(command)

    @override
    def end(self, step: int) -> None:
        self._shell.end(step)

    @override
    def fail(self, error: OmniloadError) -> None:
        self._shell.fail(error)


class _LocalHandle(RankHandle):
    def __init__(self, plane: "LocalPlane", dp_rank: int, cp_rank: int) -> None:
        self.first_step = plane.first_step
        self._plane, self._dp_rank, self._cp_rank = plane, dp_rank, cp_rank

    @override
    def take(self, step: int) -> Batch | None:
        return self._plane.constructor.take(step, self._dp_rank, self._cp_rank)

    @override
    def taken(self, step: int) -> None:
        self._plane.planner.taken(step, self._dp_rank, self._cp_rank)

    @override
    def state_at(self, step: int) -> JsonObject:
        return self._plane.planner.state_at(step)

    @override
    def close(self) -> None:
        """Nothing is held besides the plane."""


class LocalPlane(DataPlane):
    """A data plane in this process, for the ranks of this process."""

    def __init__(self, spec: PlaneSpec) -> None:
        """Open the sources and start planning.

        Raises:
            ConfigError: A source or the batch is refused.
            StateError: ``spec.state`` does not fit the mix or the data.
        """
        require_rows(spec)
        mix, tree = spec.mix, spec.tree
        self._tree = tree
        every_source = range(len(mix.names))
        self.loader = LoaderShell(
            mix, every_source, base_dir=spec.base_dir, cache_dir=spec.cache_dir
        )
        facts = self.loader.facts()
        planner = make_planner(spec, [facts[s] for s in every_source])
        self.first_step = planner.state.step
        self._end_metrics = serve_metrics(mix)
        dp_ranks = tuple(range(tree.size_of("dp")))
        self.constructor = ConstructorShell(
            DataConstructor(
                dp_ranks=dp_ranks,
                names=mix.names,
                row_length=mix.pack.length,
                cp_size=tree.size_of("cp"),
            ),
            self.loader.ranges,
        )
        self._readers = ThreadPoolExecutor(_READER_THREADS, thread_name_prefix="omniload-reader")
        self._builder = ThreadPoolExecutor(1, thread_name_prefix="omniload-builder")
        link = _LocalLoader(self.loader, self._readers)
        self.planner = PlannerShell(
            planner,
            lambda _source: link,
            [_LocalConstructor(self.constructor, dp_ranks, self._builder)],
            open_journal(spec.run_dir, planner),
        )
        self.planner.start()

    @override
    def handle(self, dp_rank: int, cp_rank: int = 0) -> RankHandle:
        sizes = {axis: self._tree.size_of(axis) for axis in ("dp", "cp")}
        return _LocalHandle(self, *check_rank(sizes, dp_rank, cp_rank))

    @override
    def close(self) -> None:
        self.constructor.fail(UnavailableError("the data plane was closed; open it again to go on"))
        self.loader.close()
        self.planner.close()
        for pool in (self._readers, self._builder):
            pool.shutdown(wait=True, cancel_futures=True)
        self._end_metrics()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
