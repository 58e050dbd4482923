"""Steps planned over synthetic metadata: the planner's arithmetic without any file."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omniload.mix.config import MixConfig
from omniload.mix.samples import SampleTable
from omniload.mix.state import MixState
from omniload.plan.membership import Membership, Starved, membership_of

__all__ = ["Lengths", "steps_of", "table_at"]

_WINDOW = 1 << 14


@dataclass(frozen=True, slots=True)
class Lengths:
    """Document lengths of one source, repeated for ever."""

    lengths_N: NDArray[np.int32]

    def between(self, start: int, stop: int) -> NDArray[np.int32]:
        """Return the lengths at positions ``start`` to ``stop``."""
        return np.take(self.lengths_N, np.arange(start, stop), mode="wrap")


def table_at(lengths: Lengths, start: int, count: int) -> SampleTable:
    """Return a loader's report of ``count`` samples from position ``start`` on."""
    return SampleTable(
        start=start,
        stop=start + count,
        positions_N=np.arange(start, start + count),
        subs_N=np.zeros(count, np.int32),
        lengths_N=lengths.between(start, start + count),
    )


@dataclass(slots=True)
class _Known:
    """The number of samples ahead of each cursor that the planner sees; any number is allowed."""

    counts: dict[int, int] = field(default_factory=dict)

    def tables(self, lengths: list[Lengths], state: MixState) -> list[SampleTable]:
        return [
            table_at(lengths[s], position, self.counts.get(s, 32))
            for s, (position, _, _) in enumerate(state.cursors_S)
        ]


def steps_of(mix: MixConfig, lengths: list[Lengths]) -> Iterator[tuple[MixState, Membership]]:
    """Yield every step with the state before it, for ever."""
    state, known = MixState.start(len(lengths)), _Known()
    while True:
        found: Any = membership_of(mix, state, known.tables(lengths, state))
        if isinstance(found, Starved):
            wanted = 2 * known.counts.get(found.source, 32)
            assert wanted <= _WINDOW * 64, f"source {found.source} starves with {wanted} samples"
            known.counts[found.source] = wanted
            continue
        yield state, found
        state = found.after
