"""How an actor is started on a node of Ray: one that is never moved, and never started again by Ray itself."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from omniload.actors.ray.environment import ray
from omniload.actors.ray.hosts.bundles import strategy_for
from omniload.actors.ray.hosts.relay import BEATS
from omniload.actors.ray.links.of_planner import READS

__all__ = ["ASKED", "LEASED", "Start", "actor_of"]

ASKED = "asked"
"""Threads of a detached actor that answer for it, and end it, however busy the others are."""
_ASKED_THREADS = 4
LEASED = "leased"
"""The thread of a detached actor in which calls wait that are never answered: the first of them waits for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where an actor is started, and with what."""

    place: str
    """A node, or a bundle on one."""
    threads: int = 1
    """In which its methods run."""
    asked: Mapping[str, float] = field(default_factory=dict)
    """What it asks for of each resource of Ray, by name; nothing where there is none."""
    namespace: str = ""
    """Of the plane, which may be another than that of the process which starts it."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of its environment, beside those of the node and of whatever starts it."""
    reads: int = 0
    """Calls that read a source, in so many threads beside those: whatever it is asked meanwhile waits for no read."""
    is_detached: bool = False
    """Whether it outlives the process that starts it; of one name there is one, whoever asks first."""
    is_away: bool = False
    """Whether it has no folder of the heartbeats of its host: the keeper asks for them."""
    is_soft: bool = False
    """Whether Ray may start it where it can, as its node may be gone by now."""


def actor_of(shell: type, name: str, start: Start) -> Any:  # noqa: ANN401 -- Ray's decorated classes have no static type
    """Return what starts the actor of a shell by a name; empty for one that nobody looks for."""
    here = strategy_for(start.place, is_soft=start.is_soft)
    options: dict[str, Any] = {"max_concurrency": start.threads, "scheduling_strategy": here}
    options |= {"name": name} if name else {}
    options |= {"namespace": start.namespace} if name and start.namespace else {}
    options |= {"lifetime": "detached", "get_if_exists": True} if start.is_detached else {}
    if start.variables:  # without any Ray asks no agent, and has workers that stand ready
        options["runtime_env"] = {"env_vars": dict(start.variables)}
    if asked := dict(start.asked):
        options["num_cpus"] = asked.pop("CPU", 0.0)
        options |= {"memory": asked.pop("memory")} if "memory" in asked else {}
        options["resources"] = asked
    groups = [(BEATS, 1)] if start.is_away else []
    groups += [(READS, start.reads)] if start.reads else []
    groups += [(ASKED, _ASKED_THREADS), (LEASED, 1)] if start.is_detached else []
    return _remote(shell, tuple(groups)).options(**options)


@cache
def _remote(shell: type, groups: tuple[tuple[str, int], ...]) -> Any:  # noqa: ANN401 -- as above
    """Return the actor class of a shell: one for all members, which Ray sends to its head once a plane."""
    # Ray disassembles all methods that the class itself has, 0.1 s of processor time each time that it is sent.
    bare = type(
        shell.__name__, (shell,), {"__module__": shell.__module__, "__doc__": shell.__doc__}
    )
    # Not restarted by Ray: a restart would run __init__ again and lose what was held. The
    # supervisor starts the whole plane again from the last saved state instead.
    options: dict[str, Any] = {"max_restarts": 0, "num_cpus": 0}
    if groups:
        options["concurrency_groups"] = dict(groups)
    remote: Any = ray.remote
    return remote(**options)(bare)
