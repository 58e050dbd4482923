"""Runs that come to the end of their data: simulated, and planned by membership alone."""

from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

from hypothesis import strategies as st

from omniload.machine import queue
from omniload.mix.state import MixState
from omniload.plan.membership import Exhausted, Starved, membership_of
from tests.support.plane.reference import known_ahead
from tests.support.plane.simulation import Simulation

__all__ = ["MANY", "memberships", "places", "simulated"]

MANY = 1 << 30
"""More steps, and more tokens, than any such run has."""


@st.composite
def places(draw: st.DrawFn, most_kills: int = 0) -> dict[str, Any]:
    """Return everything that must not matter: ranks, roles, and how often they are lost."""
    return {
        "dp": draw(st.sampled_from([1, 2, 3, 8])),
        "num_loaders": draw(st.integers(1, 3)),
        "num_constructors": draw(st.integers(1, 4)),
        "seed": draw(st.integers(0, 1 << 30)),
        "repeat_share": draw(st.sampled_from([0.0, 0.3])),
        "kills": draw(st.sampled_from([0, most_kills])),
        "planner_kills": draw(st.sampled_from([0, most_kills])),
    }


def simulated(
    world: Mapping[str, Any], first_read: int, **changes: Any
) -> tuple[Simulation, list[int]]:
    """Run a simulation to its end, with first reads of ``first_read`` records; return the digests of its steps too."""
    simulation = Simulation(**{**world, "num_steps": MANY, **changes})
    with patch.object(queue, "_FIRST_READ", first_read):
        digests = simulation.run()
    return simulation, digests


def memberships(world: Mapping[str, Any], known: int) -> list[tuple[Any, ...]]:
    """Plan a run to its end by membership alone, with ``known`` records known ahead, more where that is too few."""
    mix, state, steps = world["mix"], MixState.start(len(world["epochs"])), []
    ends_S = [len(epoch) for epoch in world["epochs"]]
    while True:
        count = known
        while isinstance(
            found := membership_of(mix, state, known_ahead(state, world["epochs"], count), ends_S),
            Starved,
        ):
            count += 1
        if isinstance(found, Exhausted):
            return steps
        state = found.after
        steps.append((found.pieces.rows(), found.row_offsets.tolist(), state.digest()))
