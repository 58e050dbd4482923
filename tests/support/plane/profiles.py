"""Profiles with round figures, for simulations whose results can be computed by hand."""

from pathlib import Path
from typing import Any

import numpy as np

from omniload.actors.plane import PlaneSpec
from omniload.mix.config import MixConfig
from omniload.plan.place_tree import ClientPlaceTree
from omniload.simulation.job import Job
from omniload.simulation.profile import (
    ROLES,
    BuildCosts,
    MessageCosts,
    PlannerCosts,
    Profile,
    RoleCosts,
    SourceCosts,
)
from tests.support.plane.builders import a_mix

__all__ = ["a_job", "a_profile", "planned", "some_costs"]


def some_costs(seed: int = 0, **changes: Any) -> SourceCosts:
    """Return a source of 1,000 records of some 20 tokens, in blocks of 100 and of four units."""
    lengths = np.random.default_rng(seed).integers(5, 40, 60).tolist()
    defaults = {
        "read_s": 1e-4,
        "token_s": 1e-7,
        "block_s": 1e-3,
        "merge_s": 1e-5,
        "merge_token_s": 1e-9,
        "block_positions": 100,
        "block_units": 4,
        "block_bytes": 10_000,
        "bytes_per_token": 4.0,
        "positions_per_epoch": 1_000,
        "counts": [1, 0, 2] * 20,
        "lengths": lengths,
    }
    return SourceCosts(**(defaults | changes))


def a_profile(names: tuple[str, ...] = ("web", "code"), **changes: Any) -> Profile:
    """Return a profile of such sources on two cores, with messages of a tenth of a millisecond."""
    builds = BuildCosts(slices_request_s=1e-4, slices_token_s=1e-9, rows_s=1e-3, rows_token_s=1e-8)
    messages = MessageCosts(
        latencies_s=(1e-4, 2e-4, 4e-4),
        roles={
            **dict.fromkeys(ROLES, RoleCosts(end_s=1e-4, byte_s=1e-9)),
            "node": RoleCosts(end_s=1e-5),
        },
        process_bytes=50 << 20,
        node_bytes=60 << 20,
    )
    defaults = {
        "machine": "a test",
        "cores": 2,
        "load": 0.0,
        "threads": 1.5,
        "sources": {name: some_costs(s) for s, name in enumerate(names)},
        "builds": {"local": builds, "ray": builds},
        "messages": {"local": messages, "ray": messages},
    }
    return Profile(**(defaults | changes))


def a_job(mix: MixConfig | None = None, *, ranks: int = 1, **changes: Any) -> Job:
    """Return a job of a small mix, at full speed on hosts of two cores."""
    mix = mix or a_mix(rows=16, runtime={"kind": "ray", "prefetch_steps": 4})
    spec = PlaneSpec(mix=mix, base_dir=Path(), tree=ClientPlaceTree.of(dp=ranks))
    defaults = {"spec": spec, "originals": mix.names, "cores": 2.0, "steps": 24}
    return Job(**(defaults | changes))


def planned(profile: Profile, job: Job, **costs: float) -> Profile:
    """Return the profile with the costs of planning for a job: round figures, and the given ones."""
    rounded = {"report_s": 1e-4, "taken_s": 1e-5, "step_s": 1e-3, "part_s": 1e-4} | costs
    mix, ranks = job.spec.mix, job.spec.tree.size_of("dp")
    size = {"ranks": ranks, "sources": len(mix.names), "tokens": mix.batch.tokens}
    last = PlannerCosts(**size, **rounded)
    others = tuple(each for each in profile.planners if each != profile.planner_of(**size))
    return profile.model_copy(update={"planners": (*others, last)})
