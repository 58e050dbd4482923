"""Runs that reach the end of their data: simulated, and planned by membership alone."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest.mock import patch

from omniload.batch.microbatch import Batch
from omniload.machine import queue
from omniload.mix.samples import SampleTable
from omniload.mix.state import MixState
from omniload.plan.membership import Exhausted, Membership, Starved, membership_of
from omniload.plan.window import window_of
from tests.support.plane.reference import known_ahead
from tests.support.plane.simulation import Simulation

__all__ = ["MANY", "memberships", "simulated", "starved_draws", "steps_of", "trained", "windows"]

MANY = 1 << 30
"""More steps, and more tokens, than any such run has."""


def simulated(
    world: Mapping[str, Any], first_read: int, **changes: Any
) -> tuple[Simulation, list[int]]:
    """Run a simulation to its end, with first reads of ``first_read`` records; also return the digests of its steps."""
    simulation = Simulation(**{**world, "num_steps": MANY, **changes})
    with patch.object(queue, "_FIRST_READ", first_read):
        digests = simulation.run()
    return simulation, digests


def memberships(world: Mapping[str, Any], known: int) -> list[tuple[Any, ...]]:
    """Plan a run to its end by membership alone, with ``known`` records known ahead, or more if those are too few."""
    return [
        _content(found)
        for _, _, found in _draws(world, [known] * len(world["epochs"]))
        if isinstance(found, Membership)
    ]


def windows(world: Mapping[str, Any], known: int, most: int) -> list[list[tuple[Any, ...]]]:
    """Plan a run to its end by windows of up to ``most`` steps, with ``known`` records known ahead, or more."""
    epochs, mix = world["epochs"], world["mix"]
    state, ends_S = MixState.start(len(epochs)), [len(epoch) for epoch in epochs]
    planned, count = list[list[tuple[Any, ...]]](), known
    while True:
        found = window_of(
            mix, state, _ahead(state, epochs, [count] * len(epochs)), ends_S, most=most
        )
        if isinstance(found, Exhausted):
            return planned
        if isinstance(found, Starved):
            count += 1
            continue
        planned.append([_content(step) for step in found])
        state, count = found[-1].after, known


def _content(step: Membership) -> tuple[Any, ...]:
    counts = (step.finished_S.tolist(), step.lost_S.tolist(), step.served_S)
    return step.pieces.rows(), step.row_offsets.tolist(), step.after.digest(), *counts


def starved_draws(
    world: Mapping[str, Any], known: Sequence[int], more: int
) -> Iterator[tuple[Starved, object]]:
    """Yield the sources that starve each draw, and the same draw with ``more`` known records of all other sources."""
    epochs, ends_S = world["epochs"], [len(epoch) for epoch in world["epochs"]]
    for state, ahead, found in _draws(world, known):
        if isinstance(found, Starved):
            counts = [
                table.stop - table.start + (0 if s in found.sources else more)
                for s, table in enumerate(ahead)
            ]
            further = _ahead(state, epochs, counts)
            yield found, membership_of(world["mix"], state, further, ends_S)


def _draws(
    world: Mapping[str, Any], known: Sequence[int]
) -> Iterator[tuple[MixState, list[SampleTable], Membership | Starved | Exhausted]]:
    """Draw step after step; yield the state before each draw, the known metadata, and the result of the draw."""
    mix, state = world["mix"], MixState.start(len(world["epochs"]))
    ends_S = [len(epoch) for epoch in world["epochs"]]
    found: Membership | Starved | Exhausted | None = None
    while not isinstance(found, Exhausted):
        counts, found = list(known), None
        while found is None or isinstance(found, Starved):
            ahead = _ahead(state, world["epochs"], counts)
            found = membership_of(mix, state, ahead, ends_S)
            yield state, ahead, found
            counts = [count + 1 for count in counts]
        if isinstance(found, Membership):
            state = found.after


def _ahead(
    state: MixState, epochs: Sequence[Sequence[Sequence[int]]], counts: Sequence[int]
) -> list[SampleTable]:
    """Return metadata of this many raw positions of each source, from its cursor on."""
    return [known_ahead(state, epochs, count)[s] for s, count in enumerate(counts[: len(epochs)])]


def steps_of(simulation: Simulation) -> list[list[Batch]]:
    """Return the batches of all ranks, step by step."""
    steps = sorted({step for step, _ in simulation.batches})
    return [[simulation.batches[step, r] for r in range(simulation.dp)] for step in steps]


def trained(simulation: Simulation) -> Counter[int]:
    """Count every token that is in a row."""
    found: Counter[int] = Counter()
    for batches in steps_of(simulation):
        for microbatch in (m for batch in batches for m in batch.microbatches):
            found.update(microbatch.tokens_RT[microbatch.source_ids_RT >= 0].tolist())
    return found
