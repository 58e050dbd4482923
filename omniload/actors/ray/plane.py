"""The Ray runtime: every role an actor, batches through the shared-memory object store."""

import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from typing_extensions import override

from omniload.actors.address import PlaneAddress
from omniload.actors.claim import claim
from omniload.actors.gate import Gate
from omniload.actors.heartbeats import FolderBoard
from omniload.actors.patience import wait_for_opening
from omniload.actors.plane import DataPlane, PlaneSpec, RankHandle, require_rows
from omniload.actors.ray.actors import (
    ConstructorActor,
    LoaderActor,
    Loaders,
    PlannerActor,
    actor_of,
)
from omniload.actors.ray.answers import answer_to, there
from omniload.actors.ray.cluster import PrivateCluster
from omniload.actors.ray.environment import RayError, ray
from omniload.actors.ray.handle import RayHandle
from omniload.actors.ray.layout import dp_ranks_of_constructors, store_bytes
from omniload.base.errors import OmniloadError
from omniload.machine.data_constructor import DataConstructor
from omniload.machine.scaler import estimated_costs, group_sources
from omniload.mix.fingerprint import SourceFacts

__all__ = ["RayPlane"]

_CLOSE_S = 10.0


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
        dp_ranks_of = dp_ranks_of_constructors(spec)
        self._gate, self._closing, self._closed = Gate(), threading.Lock(), False
        self._handles: list[RayHandle] = []
        self._opened = ExitStack()
        try:
            self._opened.callback(claim(spec).close)
            self._cluster = PrivateCluster(
                object_store_bytes=store_bytes(mix), workers=len(groups) + len(dp_ranks_of) + 1
            )
            self._opened.push(self._end_cluster)
            self.address = PlaneAddress(
                cluster=self._cluster.address,
                namespace=self._cluster.namespace,
                dp_ranks_of={name: tuple(ranks) for name, ranks in dp_ranks_of.items()},
                cp_size=spec.tree.size_of("cp"),
                steps_at_once=mix.steps_at_once,
                board=self._cluster.folder / "board",
                batch_timeout_s=mix.runtime.batch_timeout,
            )
            self.address.board.mkdir()
            self._start(spec, groups, dp_ranks_of)
        except BaseException:
            self._opened.close()
            raise

    def _start(
        self,
        spec: PlaneSpec,
        groups: Sequence[Sequence[int]],
        dp_ranks_of: Mapping[str, Sequence[int]],
    ) -> None:
        mix, cp = spec.mix, spec.tree.size_of("cp")
        # All processes start together; what they need of each other is handed over afterwards.
        loader_class = actor_of(LoaderActor, threads=4)
        self._board = board = FolderBoard(self.address.board)
        names = [f"loader-{i}" for i in range(len(groups))]
        self._loaders = [loader_class.options(name=name).remote(name, board) for name in names]
        self._planner = actor_of(PlannerActor, threads=4).options(name="planner").remote(board)
        loaders = Loaders(
            of={s: a for a, group in zip(self._loaders, groups, strict=True) for s in group},
            names=dict(zip(self._loaders, names, strict=True)),
            limit_s=mix.runtime.batch_timeout,
        )
        self._constructors = [
            actor_of(ConstructorActor, threads=4 + 2 * len(ranks) * cp)
            .options(name=name)
            .remote(
                DataConstructor(
                    dp_ranks=ranks, names=mix.names, row_length=mix.pack.length, cp_size=cp
                ),
                loaders,
                name,
                board,
            )
            for name, ranks in dp_ranks_of.items()
        ]
        opening = [a.open.remote(spec, g) for a, g in zip(self._loaders, groups, strict=True)]
        facts: dict[int, SourceFacts] = {}
        for name, found in zip(names, opening, strict=True):
            facts |= self._patiently(found, name)
        ready = self._planner.open.remote(
            spec,
            [facts[s] for s in range(len(mix.names))],
            loaders,
            list(zip(self._constructors, dp_ranks_of.values(), strict=True)),
        )
        self._patiently(ready, "planner")

    def _patiently(self, answer: Any, role: str) -> Any:  # noqa: ANN401 -- as the actor's method
        """Wait for an answer for as long as something goes on."""
        limit_s = self.address.batch_timeout_s
        wait_for_opening(lambda s: there(answer, s, self._gate.check), role, limit_s, self._board)
        return answer_to(answer, role)

    @override
    def handle(self, dp_rank: int, cp_rank: int = 0) -> RankHandle:
        with self._gate.inside():
            handle = RayHandle(self.address, dp_rank, cp_rank, on_close=lambda: None)
            self._handles.append(handle)
        return handle

    def pids(self) -> dict[str, int]:
        """Return the process of every role: ``planner``, ``loader-0``, ``constructor-0``, ..."""
        actors = {"planner": self._planner}
        actors |= {f"loader-{i}": actor for i, actor in enumerate(self._loaders)}
        actors |= dict(zip(self.address.dp_ranks_of, self._constructors, strict=True))
        with self._gate.inside():
            return {name: answer_to(actor.pid.remote(), name) for name, actor in actors.items()}

    @override
    def close(self) -> None:
        with self._closing:  # whoever closes as well waits for the end of the first
            if not self._closed:
                self._closed = True
                self._opened.close()

    def _end_cluster(self, *_: object) -> None:
        """End the actors and their Ray, once nobody in this process waits for one of them."""
        is_used = not self._gate.close(_CLOSE_S)
        for handle in self._handles:
            is_used |= not handle.leave(_CLOSE_S)
        try:
            # A dead planner has nothing left to close, and one that hangs ends with the cluster.
            if not is_used and (planner := getattr(self, "_planner", None)) is not None:
                with suppress(OmniloadError, RayError):
                    ray.get(planner.close.remote(), timeout=_CLOSE_S)
        finally:
            self._cluster.close(is_used=is_used)
