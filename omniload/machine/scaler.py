"""The Scaler: how many source loaders there are, and which sources share one.

Each source has a cost triple (P, T, M) as in the paper: preprocessing, transfer, memory.
At start, light sources are put together so that no loader carries much more than the
mean; a loader per source would cost a process of tens of megabytes each.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from omniload.mix.config import MixConfig
from omniload.mix.schedule import weights_at
from omniload.plan.balance import balance

__all__ = ["SourceCost", "estimated_costs", "group_sources"]

_PREPROCESS_S_PER_TOKEN = {"text": 1e-6, "tokens": 2e-8}
"""Orders of size on one core: tokenising text against reading token ids."""
_TRANSFER_S_PER_TOKEN = 1e-8
_TOKENS_PER_S = 100_000.0
"""What training is assumed to use, before it was measured."""
_SOURCE_BYTES = 64 << 20
"""A decoded block and an open file, roughly."""
_BUSY_SHARE = 0.7
"""Share of a core that a loader may be planned to use; the rest absorbs bursts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCost:
    """The cost of serving a source at its share of the mix."""

    preprocess_s: float
    """P: processor seconds of reading and transforming, per second of training."""
    transfer_s: float
    """T: processor seconds of handing samples over, per second of training."""
    memory_bytes: int
    """M: access state and decoded block."""

    @property
    def busy(self) -> float:
        """Share of a core that the source keeps busy."""
        return self.preprocess_s + self.transfer_s


def group_sources(
    costs: Sequence[SourceCost],
    *,
    num_loaders: int = 0,
    max_loaders: int = 8,
    memory_limit_bytes: int = 2 << 30,
) -> tuple[tuple[int, ...], ...]:
    """Deal sources to loaders.

    Args:
        costs: Cost of each source, ``[S]``.
        num_loaders: Loaders to use; 0 takes as many as the work and the memory need.
        max_loaders: Most loaders when the number is free.
        memory_limit_bytes: Memory one loader should stay under.

    Returns:
        Numbers of the sources of each loader; every source once, no loader empty.

    Raises:
        ValueError: There are no sources.
    """
    if not costs:
        raise ValueError("there are 0 sources to group; declare at least one")
    work = np.asarray([max(cost.busy, 1e-9) for cost in costs])
    memory = sum(cost.memory_bytes for cost in costs)
    needed = max(math.ceil(work.sum() / _BUSY_SHARE), math.ceil(memory / memory_limit_bytes), 1)
    count = min(num_loaders or min(needed, max_loaders), len(costs))
    # Longest first fills every bin before any gets a second source, so none stays empty.
    bins = balance(work, count).bins_N
    groups = [tuple(np.flatnonzero(bins == number).tolist()) for number in range(count)]
    return tuple(group for group in groups if group)


def estimated_costs(mix: MixConfig) -> list[SourceCost]:
    """Estimate (P, T, M) of each source at its greatest share, before anything was measured."""
    stages = mix.mix.stages
    ends = [weights_at(stages, mix.names, stage.from_step + stage.ramp_steps) for stage in stages]
    costs = []
    for s, source in enumerate(mix.sources.values()):
        kind = "text" if source.holds_text else "tokens"
        share = max(weights[s] for weights in ends)
        costs.append(
            SourceCost(
                preprocess_s=share * _TOKENS_PER_S * _PREPROCESS_S_PER_TOKEN[kind],
                transfer_s=share * _TOKENS_PER_S * _TRANSFER_S_PER_TOKEN,
                memory_bytes=_SOURCE_BYTES,
            )
        )
    return costs
