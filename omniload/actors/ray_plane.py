"""The Ray runtime: every role an actor, batches through the shared-memory object store."""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeVar

from typing_extensions import override

from omniload.actors.constructor import ConstructorShell
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
from omniload.actors.planner import ConstructorLink, LoaderLink, PlannerShell
from omniload.actors.ray_cluster import ClusterAddress, PrivateCluster, connect
from omniload.actors.ray_environment import RayActorError, RayTaskError, ray
from omniload.base.errors import OmniloadError, UnavailableError
from omniload.base.ragged import Ragged
from omniload.base.state import JsonObject
from omniload.build.microbatch import Batch
from omniload.machine.data_constructor import DataConstructor
from omniload.machine.messages import (
    ReadAhead,
    ReleaseSamples,
    ReleaseSteps,
    SamplesReported,
    SliceRequest,
)
from omniload.machine.scaler import SourceCost, group_sources
from omniload.mix.config import MixConfig
from omniload.mix.fingerprint import SourceFacts
from omniload.mix.schedule import weights_at
from omniload.plan.records import StepPlan

__all__ = ["PlaneAddress", "RayPlane", "handle_in"]

Result = TypeVar("Result")

_RANKS_PER_CONSTRUCTOR = 8
_ALIVE_CHECK_S = 2.0
_BYTES_PER_TOKEN = 16
_STORE_FLOOR_BYTES = 256 << 20
_PREPROCESS_S_PER_TOKEN = {"text": 1e-6, "tokens": 2e-8}
"""Measured on one core: tokenising about a million tokens a second, reading token ids fifty million."""


class _LoaderActor(LoaderShell):
    """A source loader; its methods run in several threads."""

    def pid(self) -> int:
        return os.getpid()


class _ConstructorActor(ConstructorShell):
    """A data constructor that fetches from loader actors."""

    def __init__(self, machine: DataConstructor, loaders: Mapping[int, Any]) -> None:
        super().__init__(machine, partial(_fetch, loaders))

    def pid(self) -> int:
        return os.getpid()


class _PlannerActor:
    """The planner."""

    def __init__(
        self,
        spec: PlaneSpec,
        facts: Sequence[SourceFacts],
        loaders: Mapping[int, Any],
        constructors: Sequence[Any],
    ) -> None:
        planner = make_planner(spec, facts)
        serve_metrics(spec.mix)
        self._first_step = planner.state.step
        links = {actor: _RayLoader(actor) for actor in loaders.values()}
        self._shell = PlannerShell(
            planner,
            lambda source: links[loaders[source]],
            [_RayConstructor(actor, ranks) for actor, ranks in constructors],
            open_journal(spec.run_dir, planner),
        )
        self._shell.start()

    def first_step(self) -> int:
        return self._first_step

    def taken(self, step: int, dp_rank: int, cp_rank: int) -> None:
        self._shell.taken(step, dp_rank, cp_rank)

    def state_at(self, step: int) -> JsonObject:
        return self._shell.state_at(step)

    def pid(self) -> int:
        return os.getpid()

    def close(self) -> None:
        self._shell.close()


class _RayLoader(LoaderLink):
    def __init__(self, actor: Any) -> None:  # noqa: ANN401 -- Ray's handle has no static type
        self._actor = actor

    @override
    def read_ahead(self, command: ReadAhead) -> "Future[SamplesReported]":
        return _answered(self._actor.read_ahead.remote(command), "a source loader")

    @override
    def release(self, command: ReleaseSamples) -> None:
        self._actor.release.remote(command)


class _RayConstructor(ConstructorLink):
    def __init__(self, actor: Any, dp_ranks: Sequence[int]) -> None:  # noqa: ANN401 -- as above
        self._actor, self._dp_ranks = actor, dp_ranks

    @property
    @override
    def dp_ranks(self) -> Sequence[int]:
        return self._dp_ranks

    @override
    def build(self, plan: StepPlan) -> "Future[int]":
        return _answered(self._actor.build.remote(plan), "a data constructor")

    @override
    def release(self, command: ReleaseSteps) -> None:
        self._actor.release.remote(command)

    @override
    def end(self, step: int) -> None:
        self._actor.end.remote(step)

    @override
    def fail(self, error: BaseException) -> None:
        self._actor.fail.remote(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneAddress:
    """How another process of the job finds the data plane."""

    cluster: ClusterAddress
    dp_ranks_of: Mapping[str, Sequence[int]]
    """Data-parallel ranks of each constructor, by actor name."""


class _RayHandle(RankHandle):
    """A rank's way to its constructor. The next step's batch is asked for while this one trains."""

    def __init__(
        self, address: PlaneAddress, dp_rank: int, cp_rank: int, on_close: Callable[[], None]
    ) -> None:
        name = next(name for name, ranks in address.dp_ranks_of.items() if dp_rank in ranks)
        self._constructor = ray.get_actor(name)
        self._planner = ray.get_actor("planner")
        self._dp_rank, self._cp_rank = dp_rank, cp_rank
        self._on_close = on_close
        self._asked: dict[int, Any] = {}
        self.first_step = _get(self._planner.first_step.remote(), "the planner")

    @override
    def take(self, step: int) -> Batch | None:
        for ahead in (step, step + 1):
            if ahead not in self._asked:
                self._asked[ahead] = self._constructor.take.remote(
                    ahead, self._dp_rank, self._cp_rank
                )
        asked = self._asked.pop(step)
        # A dead constructor answers at once; a dead planner would never let the step be built.
        while not ray.wait([asked], timeout=_ALIVE_CHECK_S)[0]:
            _get(self._planner.pid.remote(), "the planner")
        batch: Batch | None = _get(asked, "the data constructor")
        return batch

    @override
    def taken(self, step: int) -> None:
        self._planner.taken.remote(step, self._dp_rank, self._cp_rank)

    @override
    def state_at(self, step: int) -> JsonObject:
        return _get(self._planner.state_at.remote(step), "the planner")  # type: ignore[no-any-return]

    @override
    def close(self) -> None:
        self._asked.clear()
        self._on_close()


class RayPlane(DataPlane):
    """A data plane of actors in a private Ray on this machine."""

    def __init__(self, spec: PlaneSpec) -> None:
        """Start Ray and the actors, open the sources and start planning.

        Raises:
            ConfigError: A source or the batch is refused.
            StateError: ``spec.state`` does not fit, or this process uses Ray already.
        """
        require_rows(spec)
        mix = spec.mix
        groups = group_sources(_costs(mix), num_loaders=mix.runtime.loaders)
        dp = spec.tree.size_of("dp")
        num_constructors = min(dp, mix.runtime.constructors or -(-dp // _RANKS_PER_CONSTRUCTOR))
        dp_ranks_of = {
            f"constructor-{i}": [
                r for r in range(dp) if spec.tree.constructor_of(r, num_constructors) == i
            ]
            for i in range(num_constructors)
        }
        self._cluster = PrivateCluster(object_store_bytes=_store_bytes(mix))
        try:
            self._start(spec, groups, dp_ranks_of)
        except BaseException:
            self._cluster.close()
            raise
        self.address = PlaneAddress(cluster=self._cluster.address, dp_ranks_of=dp_ranks_of)

    def _start(
        self,
        spec: PlaneSpec,
        groups: Sequence[Sequence[int]],
        dp_ranks_of: Mapping[str, Sequence[int]],
    ) -> None:
        mix, cp = spec.mix, spec.tree.size_of("cp")
        loader_class = _actor(_LoaderActor, threads=4)
        self._loaders = [
            loader_class.options(name=f"loader-{i}").remote(
                mix, group, base_dir=spec.base_dir, cache_dir=spec.cache_dir
            )
            for i, group in enumerate(groups)
        ]
        loaders = {
            s: actor for actor, group in zip(self._loaders, groups, strict=True) for s in group
        }
        facts: dict[int, SourceFacts] = {}
        for actor in self._loaders:
            facts |= _get(actor.facts.remote(), "a source loader")
        self._constructors = [
            _actor(_ConstructorActor, threads=4 + 2 * len(ranks) * cp)
            .options(name=name)
            .remote(
                DataConstructor(
                    dp_ranks=ranks, names=mix.names, row_length=mix.pack.length, cp_size=cp
                ),
                loaders,
            )
            for name, ranks in dp_ranks_of.items()
        ]
        self._planner = (
            _actor(_PlannerActor, threads=4)
            .options(name="planner")
            .remote(
                spec,
                [facts[s] for s in range(len(mix.names))],
                loaders,
                list(zip(self._constructors, dp_ranks_of.values(), strict=True)),
            )
        )
        _get(self._planner.first_step.remote(), "the planner")

    @override
    def handle(self, dp_rank: int, cp_rank: int = 0) -> RankHandle:
        return _RayHandle(self.address, dp_rank, cp_rank, on_close=_nothing)

    def pids(self) -> dict[str, int]:
        """Return the process of every role: ``planner``, ``loader-0``, ``constructor-0``, ..."""
        actors = {"planner": self._planner}
        actors |= {f"loader-{i}": actor for i, actor in enumerate(self._loaders)}
        actors |= dict(zip(self.address.dp_ranks_of, self._constructors, strict=True))
        return {name: _get(actor.pid.remote(), name) for name, actor in actors.items()}

    @override
    def close(self) -> None:
        with suppress(OmniloadError):  # a dead planner has nothing left to close
            _get(self._planner.close.remote(), "the planner")
        self._cluster.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def handle_in(address: PlaneAddress, dp_rank: int, cp_rank: int = 0) -> RankHandle:
    """Return a rank's handle in a process that is not the plane's: joins its Ray first."""
    connect(address.cluster)
    return _RayHandle(address, dp_rank, cp_rank, on_close=ray.shutdown)


def _nothing() -> None:
    pass


def _actor(shell: type, *, threads: int) -> Any:  # noqa: ANN401 -- Ray's decorated classes have no static type
    # Not restarted by Ray: a restart would run __init__ again and lose what was held. The
    # supervisor starts the whole plane again from the last saved state instead.
    remote: Any = ray.remote
    return remote(max_restarts=0, num_cpus=0, max_concurrency=threads)(shell)


def _fetch(loaders: Mapping[int, Any], requests: Sequence[SliceRequest]) -> list[Ragged]:
    """Get the slices of a step: one call per loader, however many samples or sources."""
    places: dict[Any, list[int]] = {}
    for place, request in enumerate(requests):
        places.setdefault(loaders[request.source], []).append(place)
    answers = [
        (at, actor.slices.remote([requests[place] for place in at])) for actor, at in places.items()
    ]
    slices: dict[int, Ragged] = {}
    for at, ref in answers:
        slices |= zip(at, _get(ref, "a source loader"), strict=True)
    return [slices[place] for place in range(len(requests))]


def _get(ref: Any, role: str) -> Any:  # noqa: ANN401 -- whatever the actor's method returns
    try:
        return ray.get(ref)
    except (RayTaskError, RayActorError) as error:
        raise _plain(error, role) from None


def _answered(ref: Any, role: str) -> "Future[Any]":  # noqa: ANN401 -- as above
    """Return a future of the answer whose error is the one that was raised in the actor."""
    answer: Future[Any] = Future()

    def settle(done: "Future[Any]") -> None:
        error = done.exception()
        if error is None:
            answer.set_result(done.result())
        else:
            answer.set_exception(_plain(error, role))

    ref.future().add_done_callback(settle)
    return answer


def _plain(error: BaseException, role: str) -> BaseException:
    """Undo Ray's wrapping; a dead actor becomes an ``UnavailableError``."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        return _plain(error.cause, role)
    if isinstance(error, RayActorError):
        return UnavailableError(
            f"{role} has died ({type(error).__name__}); start again from the last checkpoint"
        )
    return error


def _costs(mix: MixConfig) -> list[SourceCost]:
    """Estimate (P, T, M) of each source at its greatest share, before anything was measured."""
    stages = mix.mix.stages
    ends = [weights_at(stages, mix.names, stage.from_step + stage.ramp_steps) for stage in stages]
    tokens_per_s = 100_000.0
    costs = []
    for s, source in enumerate(mix.sources.values()):
        kind = "tokens" if source.type == "parquet" and source.tokens is not None else "text"
        share = max(weights[s] for weights in ends)
        costs.append(
            SourceCost(
                preprocess_s=share * tokens_per_s * _PREPROCESS_S_PER_TOKEN[kind],
                transfer_s=share * tokens_per_s * 1e-8,
                memory_bytes=64 << 20,
            )
        )
    return costs


def _store_bytes(mix: MixConfig) -> int:
    """Return room for the steps in flight, twice over: once as slices, once as batches."""
    steps = mix.runtime.prefetch_steps + 4
    return max(_STORE_FLOOR_BYTES, 2 * steps * mix.batch.tokens * _BYTES_PER_TOKEN)
