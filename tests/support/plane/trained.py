"""The tokens that the ranks of a simulation trained on, one by one."""

from collections import Counter

from omniload.batch.microbatch import Batch
from tests.support.plane.simulation import Simulation

__all__ = ["steps_of", "trained"]


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
