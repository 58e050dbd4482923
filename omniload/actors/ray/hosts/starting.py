"""Starts actors on a chosen node of Ray. Ray neither moves nor restarts them."""

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
"""Group of a detached actor's threads that answer for it and end it, even while all other threads are busy."""
_ASKED_THREADS = 4
LEASED = "leased"
"""Group of the one thread of a detached actor for calls that are never answered. The first such call blocks the thread,
and the others queue behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where an actor is started, and with which resources."""

    place: str
    """Node, or bundle on a node."""
    threads: int = 1
    """Number of threads that run the actor's methods."""
    asked: Mapping[str, float] = field(default_factory=dict)
    """Amount of each of Ray's resources that the actor asks for, by name; empty for none."""
    namespace: str = ""
    """Namespace of the plane, which may differ from that of the starting process."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables, in addition to those of the node and of the starting process."""
    reads: int = 0
    """Number of extra threads for calls that read a source, so that no other call waits for a read."""
    is_detached: bool = False
    """Whether the actor outlives the process that starts it. There is one such actor per name, whichever process asks
    first."""
    is_away: bool = False
    """Whether the actor cannot write to its host's folder of heartbeats, so that the keeper asks for them."""
    is_soft: bool = False
    """Whether Ray may choose another node, because the chosen one may be gone."""


def actor_of(shell: type, name: str, start: Start) -> Any:  # noqa: ANN401 -- Ray's decorated classes have no static type
    """Return what starts the actor of a shell under a name; the name is empty for an actor that is never looked up."""
    here = strategy_for(start.place, is_soft=start.is_soft)
    options: dict[str, Any] = {"max_concurrency": start.threads, "scheduling_strategy": here}
    options |= {"name": name} if name else {}
    options |= {"namespace": start.namespace} if name and start.namespace else {}
    options |= {"lifetime": "detached", "get_if_exists": True} if start.is_detached else {}
    if start.variables:  # without any, Ray needs no agent and can use a spare worker
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
    """Return the actor class of a shell: one class for all members, which Ray sends to its head once per plane."""
    # Ray disassembles all methods that the class itself defines, which takes 0.1 s of processor time for each sending.
    bare = type(
        shell.__name__, (shell,), {"__module__": shell.__module__, "__doc__": shell.__doc__}
    )
    # Ray must not restart an actor: a restart would run ``__init__`` again and lose the actor's state. Instead, the
    # supervisor starts the whole plane again from the last saved state.
    options: dict[str, Any] = {"max_restarts": 0, "num_cpus": 0}
    if groups:
        options["concurrency_groups"] = dict(groups)
    remote: Any = ray.remote
    return remote(**options)(bare)
