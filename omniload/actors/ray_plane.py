"""The Ray runtime: every role an actor, batches through the shared-memory object store."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Self

from typing_extensions import override

from omniload.actors.address import PlaneAddress
from omniload.actors.plane import DataPlane, PlaneSpec, RankHandle, require_rows
from omniload.actors.ray_actors import ConstructorActor, LoaderActor, PlannerActor, actor_of
from omniload.actors.ray_answers import answer_to
from omniload.actors.ray_cluster import PrivateCluster
from omniload.actors.ray_environment import RayError, ray
from omniload.actors.ray_handle import RayHandle
from omniload.base.errors import OmniloadError
from omniload.machine.data_constructor import DataConstructor
from omniload.machine.scaler import estimated_costs, group_sources
from omniload.mix.config import MixConfig
from omniload.mix.fingerprint import SourceFacts

__all__ = ["RayPlane"]

_RANKS_PER_CONSTRUCTOR = 8
_BYTES_PER_TOKEN = 16
_CLOSE_S = 10.0
_STORE_FLOOR_BYTES = 256 << 20


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
        groups = group_sources(estimated_costs(mix), num_loaders=mix.runtime.loaders)
        dp = spec.tree.size_of("dp")
        num_constructors = min(dp, mix.runtime.constructors or -(-dp // _RANKS_PER_CONSTRUCTOR))
        dp_ranks_of = {
            f"constructor-{i}": [
                r for r in range(dp) if spec.tree.constructor_of(r, num_constructors) == i
            ]
            for i in range(num_constructors)
        }
        self._cluster = PrivateCluster(
            object_store_bytes=_store_bytes(mix), workers=len(groups) + num_constructors + 1
        )
        try:
            self._start(spec, groups, dp_ranks_of)
        except BaseException:
            self._cluster.close()
            raise
        self._closed = False
        self.address = PlaneAddress(
            cluster=self._cluster.address,
            namespace=self._cluster.namespace,
            dp_ranks_of={name: tuple(ranks) for name, ranks in dp_ranks_of.items()},
            cp_size=spec.tree.size_of("cp"),
        )

    def _start(
        self,
        spec: PlaneSpec,
        groups: Sequence[Sequence[int]],
        dp_ranks_of: Mapping[str, Sequence[int]],
    ) -> None:
        mix, cp = spec.mix, spec.tree.size_of("cp")
        # All processes start together; what they need of each other is handed over afterwards.
        loader_class = actor_of(LoaderActor, threads=4)
        self._loaders = [
            loader_class.options(name=f"loader-{i}").remote() for i in range(len(groups))
        ]
        self._planner = actor_of(PlannerActor, threads=4).options(name="planner").remote()
        loaders = {
            s: actor for actor, group in zip(self._loaders, groups, strict=True) for s in group
        }
        self._constructors = [
            actor_of(ConstructorActor, threads=4 + 2 * len(ranks) * cp)
            .options(name=name)
            .remote(
                DataConstructor(
                    dp_ranks=ranks, names=mix.names, row_length=mix.pack.length, cp_size=cp
                ),
                loaders,
            )
            for name, ranks in dp_ranks_of.items()
        ]
        opening = [
            actor.open.remote(spec, group)
            for actor, group in zip(self._loaders, groups, strict=True)
        ]
        facts: dict[int, SourceFacts] = {}
        for found in opening:
            facts |= answer_to(found, "a source loader")
        ready = self._planner.open.remote(
            spec,
            [facts[s] for s in range(len(mix.names))],
            loaders,
            list(zip(self._constructors, dp_ranks_of.values(), strict=True)),
        )
        answer_to(ready, "the planner")

    @override
    def handle(self, dp_rank: int, cp_rank: int = 0) -> RankHandle:
        return RayHandle(self.address, dp_rank, cp_rank, on_close=_nothing)

    def pids(self) -> dict[str, int]:
        """Return the process of every role: ``planner``, ``loader-0``, ``constructor-0``, ..."""
        actors = {"planner": self._planner}
        actors |= {f"loader-{i}": actor for i, actor in enumerate(self._loaders)}
        actors |= dict(zip(self.address.dp_ranks_of, self._constructors, strict=True))
        return {name: answer_to(actor.pid.remote(), name) for name, actor in actors.items()}

    @override
    def close(self) -> None:
        # Once only: by the second time this process may have opened another plane in a Ray of its own.
        if self._closed:
            return
        self._closed = True
        try:
            # A dead planner has nothing left to close, and one that hangs ends with the cluster.
            with suppress(OmniloadError, RayError):
                ray.get(self._planner.close.remote(), timeout=_CLOSE_S)
        finally:
            self._cluster.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _nothing() -> None:
    pass


def _store_bytes(mix: MixConfig) -> int:
    """Return room for the steps in flight, twice over: once as slices, once as batches."""
    steps = mix.runtime.prefetch_steps + 4
    return max(_STORE_FLOOR_BYTES, 2 * steps * mix.batch.tokens * _BYTES_PER_TOKEN)
