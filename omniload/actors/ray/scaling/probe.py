"""What Ray takes of this machine: small planes at full speed, at rest, and calls to a bare actor beside them.

What a message takes is not seen in a loop of calls: in a plane every end is woken for one message, in threads, with
caches that other processes have used meanwhile. So processor time is that of the processes of a real plane.
"""

import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import count, islice

import psutil

from omniload.actors.plane import PlaneSpec
from omniload.actors.ray.plane import RayPlane
from omniload.actors.ray.scaling.calls import Call, measured_calls
from omniload.actors.ray.scaling.spent import memory_of, rays_own, spent_by

__all__ = ["PlaneSpent", "Probed", "probe"]

_RUN_S, _REST_S = 1.5, 1.0
"""How long a plane is measured at full speed and at rest, in which every heartbeat comes once."""
_LEAST_WINDOWS = 4
"""In fewer a loader may have nothing to do, and nothing would be known of its messages: on a machine that is busy."""
_FILLS_S = 0.3
"""Buffers of a plane whose rank asks for nothing are full by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneSpent:
    """Processor time of a plane of one rank, by role: ``planner``, ``loader``, ``constructor``, ``rank``, ``node``."""

    steps: int
    """That were taken at full speed."""
    step_s: Mapping[str, float]
    """Of a step at full speed, less what is done by the clock."""
    clock: Mapping[str, float]
    """Cores in use while nobody asks for anything; the process of the rank also has the keeper of the plane."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """What was found."""

    plane: PlaneSpent
    call: Call
    """That is answered with nothing."""
    node_bytes: int
    """Memory of Ray's own processes."""


def probe(spec: PlaneSpec, calls: int) -> Probed:
    """Open a plane of one rank on a Ray of our own, measure it and calls beside it, and end it.

    Args:
        spec: The plane: one loader, one constructor, sources without end.
        calls: Calls to measure.

    Raises:
        StateError: This process uses Ray already.
        UnavailableError: Ray did not start.
    """
    with RayPlane(spec) as plane:
        spent = _spent_of(plane, spec)
        call = measured_calls(calls)
        node_bytes = sum(map(memory_of, rays_own()))
    return Probed(plane=spent, call=call, node_bytes=node_bytes)


def _spent_of(plane: RayPlane, spec: PlaneSpec) -> PlaneSpent:
    """Take steps for a while and then none; return what each took."""
    roles = {pid: name.partition("-")[0] for name, pid in plane.pids().items()}
    window, ahead = spec.mix.steps_at_once, spec.mix.steps_ahead
    with closing(plane.handle(0)) as handle:
        numbers = count(handle.first_step)

        def take(steps: int) -> None:
            for step in islice(numbers, steps):
                handle.take(step)
                handle.taken(step)

        # The first windows find empty buffers and cold caches; none of it comes again.
        take(2 * (ahead + window))
        before, began_s, steps = _spent_by_role(roles), time.perf_counter(), 0
        while time.perf_counter() - began_s < _RUN_S or steps < _LEAST_WINDOWS * window:
            take(window)
            steps += window
        after, run_s = _spent_by_role(roles), time.perf_counter() - began_s
        time.sleep(_FILLS_S)
        resting, began_s = _spent_by_role(roles), time.perf_counter()
        time.sleep(_REST_S)
        rested, rest_s = _spent_by_role(roles), time.perf_counter() - began_s
    clock = {role: (rested[role] - resting[role]) / rest_s for role in after}
    return PlaneSpent(
        steps=steps,
        step_s={role: (after[role] - before[role] - clock[role] * run_s) / steps for role in after},
        clock=clock,
    )


def _spent_by_role(roles: Mapping[int, str]) -> dict[str, float]:
    """Return the processor seconds of each role so far; ``rank`` is this process, ``node`` what is of no role."""
    found = dict.fromkeys((*roles.values(), "rank", "node"), 0.0)
    found["rank"] += time.process_time()
    for process in psutil.Process().children(recursive=True):
        found[roles.get(process.pid, "node")] += spent_by(process)
    return found
