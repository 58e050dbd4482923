"""A rank's way to a data plane of Ray actors, from the same process or another of the job."""

from collections.abc import Callable
from typing import Any

from typing_extensions import override

from omniload.actors.address import PlaneAddress, check_rank
from omniload.actors.plane import RankHandle
from omniload.actors.ray_answers import answer_to, log_failure
from omniload.actors.ray_cluster import connect
from omniload.actors.ray_environment import ray
from omniload.base.state import JsonObject
from omniload.build.microbatch import Batch

__all__ = ["RayHandle", "handle_in"]

_ALIVE_CHECK_S = 2.0


class RayHandle(RankHandle):
    """A rank's way to its constructor. The next step's batch is asked for while this one trains."""

    def __init__(
        self, address: PlaneAddress, dp_rank: int, cp_rank: int, on_close: Callable[[], None]
    ) -> None:
        self._dp_rank, self._cp_rank = check_rank(address.sizes, dp_rank, cp_rank)
        self._constructor: Any = ray.get_actor(address.constructor_of(self._dp_rank))
        self._planner: Any = ray.get_actor("planner")
        self._on_close = on_close
        self._asked: dict[int, Any] = {}
        self.first_step = answer_to(self._planner.first_step.remote(), "the planner")

    @override
    def take(self, step: int) -> Batch | None:
        for ahead in (step, step + 1):
            if ahead not in self._asked:
                self._asked[ahead] = self._constructor.take.remote(
                    ahead, self._dp_rank, self._cp_rank
                )
        asked = self._asked.pop(step)
        # A dead constructor answers at once; a planner that is dead or has stopped would never let
        # the step be built.
        while not ray.wait([asked], timeout=_ALIVE_CHECK_S)[0]:
            answer_to(self._planner.check.remote(), "the planner")
        batch: Batch | None = answer_to(asked, "the data constructor")
        return batch

    @override
    def taken(self, step: int) -> None:
        told = self._planner.taken.remote(step, self._dp_rank, self._cp_rank)
        log_failure(told, "the planner", f"hear that step {step} was taken")

    @override
    def state_at(self, step: int) -> JsonObject:
        return answer_to(self._planner.state_at.remote(step), "the planner")  # type: ignore[no-any-return]

    @override
    def close(self) -> None:
        self._asked.clear()
        self._on_close()


def handle_in(address: PlaneAddress, dp_rank: int, cp_rank: int = 0) -> RankHandle:
    """Return a rank's handle in a process that is not the plane's: joins its Ray first.

    Raises:
        ConfigError: The plane has no such rank.
    """
    check_rank(address.sizes, dp_rank, cp_rank)
    connect(address.cluster, address.namespace)
    return RayHandle(address, dp_rank, cp_rank, on_close=ray.shutdown)
