"""What messages between roles cost.

On Ray a small plane runs for real, and the same one is simulated with messages that cost nothing but for their bytes:
what its processes took beyond that is what messages took, role by role.
"""

import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from omniload.actors.plane import PlaneSpec
from omniload.base.concurrency.threads import DaemonPool
from omniload.simulation.figures import Simulated
from omniload.simulation.job import Job
from omniload.simulation.plane import simulate
from omniload.simulation.planning import measure_planner
from omniload.simulation.probing.reference import Reference
from omniload.simulation.profile import ROLES, MessageCosts, Profile, Role, RoleCosts
from omniload.simulation.reading import measure_sources

__all__ = ["costs_by_role", "even_roles", "measure_messages"]

_CALLS, _SAMPLED = 200, 64
_WINDOWS, _STEPS = 8, 8
"""Windows that are planned to measure planning, and windows that are simulated."""


def measure_messages(runtime: str, job: Job, profile: Profile) -> MessageCosts:
    """Measure messages between roles: threads of this process, or processes of a Ray of our own.

    Args:
        runtime: ``local`` or ``ray``.
        job: The job, whose samples, sources and rows the small plane has.
        profile: What was measured of its sources, and of building.

    Raises:
        ConfigError: Ray is asked for and not installed.
        UnavailableError: Ray did not start.
    """
    return _between_threads() if runtime == "local" else _between_processes(job, profile)


def even_roles(end_s: float) -> dict[Role, RoleCosts]:
    """Return equal costs of every role."""
    return dict.fromkeys(ROLES, RoleCosts(end_s=end_s))


def _between_processes(job: Job, profile: Profile) -> MessageCosts:
    from omniload.actors.ray.scaling.calls import ANSWERS  # noqa: PLC0415 -- an extra, absent for local users
    from omniload.actors.ray.scaling.probe import probe  # noqa: PLC0415 -- as above

    with tempfile.TemporaryDirectory() as held:
        spec = Reference.of(job, profile).written(Path(held))
        sources = measure_sources(_of_one_source(spec), _unheard)
        # What building takes is that of the job: what is too much or too little of it is made up for.
        known = profile.model_copy(update={"sources": sources})
        found = probe(spec, _CALLS)
    bare, some, full = found.calls
    sizes = ANSWERS[1] - ANSWERS[0]
    sending_s = max(0.0, full.answering_s - some.answering_s) / sizes
    taking_s = max(0.0, full.asking_s - some.asking_s) / sizes
    passing_s = max(0.0, full.others_s - some.others_s) / sizes
    bytes_s = {
        "loader": sending_s,
        "reader": sending_s,
        "constructor": sending_s,
        "node": passing_s,
    }
    waits_s = [each / 2 for each in bare.waits_s]
    free = MessageCosts(
        latencies_s=tuple(np.quantile(waits_s, np.linspace(0, 1, _SAMPLED)).tolist()),
        roles={role: RoleCosts(end_s=0, byte_s=bytes_s.get(role, taking_s)) for role in ROLES},
        process_bytes=bare.process_bytes,
        node_bytes=found.node_bytes,
    )
    known = known.model_copy(update={"messages": {"ray": free}})
    simulated = _simulated(replace(job, spec=spec), known)
    # There and back are two messages with two ends each.
    least_s = (bare.asking_s + bare.answering_s) / 4
    roles = costs_by_role(found.plane.step_s, found.plane.clock, simulated, free.roles, least_s)
    return free.model_copy(update={"roles": roles})


def _of_one_source(spec: PlaneSpec) -> PlaneSpec:
    """Return the plane with the first of its sources, which are all the same."""
    name = spec.mix.names[0]
    only = spec.mix.model_copy(update={"sources": {name: spec.mix.sources[name]}})
    return replace(spec, mix=only)


def _simulated(job: Job, known: Profile) -> Simulated:
    """Simulate the small plane, messages left out."""
    names, window = job.spec.mix.names, job.spec.mix.steps_at_once
    job = replace(job, originals=names[:1] * len(names), hosts=1, step_s=0.0, steps=_STEPS * window)
    planner = measure_planner(job, known, _WINDOWS, _unheard)
    return simulate(job, known.model_copy(update={"planners": (planner,)}))


def costs_by_role(
    spent_s: Mapping[str, float],
    clock: Mapping[str, float],
    simulated: Simulated,
    free: Mapping[Role, RoleCosts],
    least_s: float,
) -> dict[Role, RoleCosts]:
    """Return what a message takes at each role: what it took beyond its simulation, over its messages.

    Args:
        spent_s: Processor seconds of a step of the small plane, by role.
        clock: Cores in use at rest; those of the rank's process are its plane's, and counted with the node. One
            of a rank alone takes what any process of a plane takes at least.
        simulated: The small plane, where messages cost nothing.
        free: Costs that it was simulated with.
        least_s: What an end takes in a loop of calls: none takes less, but for what passes a node.
    """
    found = {role: each.model_copy(update={"end_s": least_s}) for role, each in free.items()}
    step_s = simulated.seconds / simulated.steps
    for figures in simulated.roles:
        role = figures.role
        beyond_s = max(0.0, spent_s[role] - figures.cores * step_s) / figures.messages_step
        end_s = beyond_s if role == "node" else max(least_s, beyond_s)
        own = {"end_s": end_s, "clock": max(0.0, clock[role])}
        found[role] = found[role].model_copy(update=own)
    at_rest = found["node"].clock + found["rank"].clock
    found["node"] = found["node"].model_copy(update={"clock": at_rest})
    least = min(found[role].clock for role in ("planner", "loader", "constructor"))
    found["rank"] = found["rank"].model_copy(update={"clock": least})
    found["reader"] = found["loader"]
    return found


def _unheard(_: object) -> None:
    """Show nobody how far it is: these are parts of one."""


def _between_threads() -> MessageCosts:
    pool = DaemonPool(1, "omniload-probe")
    try:
        pool.submit(_nothing).result()
        rounds_s = []
        began_s = time.process_time()
        for _ in range(_CALLS):
            asked_s = time.perf_counter()
            pool.submit(_nothing).result()
            rounds_s.append(time.perf_counter() - asked_s)
        spent_s = (time.process_time() - began_s) / _CALLS
    finally:
        pool.close(1.0)
    waits_s = sorted(max(0.0, (each - spent_s) / 2) for each in rounds_s)
    return MessageCosts(
        latencies_s=tuple(np.quantile(waits_s, np.linspace(0, 1, _SAMPLED)).tolist()),
        roles=even_roles(spent_s / 4),
        process_bytes=0,
        node_bytes=0,
    )


def _nothing() -> None:
    """Do nothing, in another thread."""
