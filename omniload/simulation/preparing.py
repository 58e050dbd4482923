"""A profile that has all that a job needs: what is missing is measured."""

import os
import platform
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from omniload.actors.opening import runtime_of
from omniload.actors.plane import PlaneSpec
from omniload.simulation.building import measure_builds
from omniload.simulation.job import Job, constructors_of
from omniload.simulation.planning import measure_planner
from omniload.simulation.probing import measure_messages
from omniload.simulation.profile import Profile
from omniload.simulation.reading import measure_sources, measure_threads

__all__ = ["Shown", "measured_sources", "with_planner", "with_runtime"]

Shown = Callable[[str, float], AbstractContextManager[Callable[[float], None]]]
"""Shows how far work is: told what it is and how much of it there is; each part that is done is told to its value."""

_PLANNED_TOKENS = 1 << 30
_LEAST_WINDOWS, _MOST_WINDOWS = 4, 24


def measured_sources(spec: PlaneSpec, shown: Shown) -> Profile:
    """Return a profile of every source of a mix.

    Raises:
        OmniloadError: A source cannot be read.
    """
    with shown("measuring sources", len(spec.mix.names)) as advance:
        sources = measure_sources(spec, advance)
    return Profile(
        machine=_processor(),
        cores=len(os.sched_getaffinity(0)),
        load=os.getloadavg()[0],
        threads=measure_threads(spec),
        sources=sources,
    )


def with_runtime(profile: Profile, spec: PlaneSpec, job: Job, shown: Shown) -> Profile:
    """Return the profile with figures of the job's runtime.

    Args:
        profile: What was measured so far.
        spec: The mix as its file says.
        job: The job.
        shown: Shows how far it is.

    Raises:
        OmniloadError: As for ``measure_builds`` and ``measure_messages``.
    """
    runtime = runtime_of(job.spec)
    dp, tokens = job.spec.tree.size_of("dp"), job.spec.mix.batch.tokens
    ranks = dp if runtime == "local" else max(len(ranks) for _, ranks in constructors_of(job))
    if runtime not in profile.builds:
        with shown("measuring what building takes", 1) as advance:
            builds = measure_builds(spec, runtime, ranks=ranks, tokens=tokens * ranks // dp)
            advance(1)
        profile = profile.model_copy(update={"builds": {**profile.builds, runtime: builds}})
    if runtime not in profile.messages:
        with shown(f"measuring the {runtime} runtime", 1) as advance:
            messages = measure_messages(runtime, job, profile)
            advance(1)
        profile = profile.model_copy(update={"messages": {**profile.messages, runtime: messages}})
    return profile


def with_planner(profile: Profile, job: Job, shown: Shown) -> Profile:
    """Return the profile with figures of planning at the job's size."""
    mix, ranks = job.spec.mix, job.spec.tree.size_of("dp")
    if profile.planner_of(ranks=ranks, sources=len(mix.names), tokens=mix.batch.tokens):
        return profile
    per_window = mix.batch.tokens * mix.steps_at_once
    windows = max(_LEAST_WINDOWS, min(_MOST_WINDOWS, _PLANNED_TOKENS // per_window))
    with shown(f"planning for {ranks} ranks", windows) as advance:
        costs = measure_planner(job, profile, windows, advance)
    return profile.model_copy(update={"planners": (*profile.planners, costs)})


def _processor() -> str:
    """Return the model of the processor."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
