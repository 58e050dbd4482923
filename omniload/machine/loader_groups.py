"""The partition: how many source loaders there are at start, and which sources share one.

Each source has a cost triple (P, T, M) as in the paper: preprocessing, transfer, memory. Light
sources are put together so that no loader carries much more than the mean; a loader per
source would cost a process of tens of megabytes each. A heavy source has several readers, each
its share of the units of every block: the loader itself, and processes beside it.

Source:
    OVERLORD / Omniload / MegaScale-Data, arXiv 2504.09844, on multi-level partitioning.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from omniload.base.linux.cores import cores_here
from omniload.mix.config import MixConfig
from omniload.mix.schedule import weights_at
from omniload.plan.balance_methods import balance
from omniload.source.kept_profile import KeptProfile

__all__ = [
    "ANSWERING",
    "MOST_READS",
    "TOKENS_PER_S",
    "LoaderShare",
    "SourceCost",
    "costs_of",
    "most_of_one",
    "part_of_loader",
    "partition",
    "readers_of",
    "seconds_in_loaders",
]

TOKENS_PER_S = 100_000.0
"""What training is assumed to use."""
_PREPROCESS_S_PER_TOKEN = {"text": 1e-6, "tokens": 2e-8}
"""Orders of size on one core, where nothing was measured: tokenising text against reading token ids."""
_TRANSFER_S_PER_TOKEN = 1e-8
_ACCESS_BYTES = 1 << 20
"""Index, order and open file of a source, roughly."""
_BUSY_SHARE = 0.7
"""Share of a core that a loader may be planned to use; the rest absorbs bursts."""
_READS_AT_ONCE, MOST_READS = 4, 16
"""Reads of a loader beyond which others wait for these; one of much work has threads for more."""
_LONGEST_READ_S = 2.0
"""Of a longer read this counts: it has tried its store again and again, and that is no work of its loader."""
_MOST_OF_ONE = 8
"""Readers of one source that are chosen by its cost; more are had by asking."""
ANSWERING = 4
"""Threads that answer constructors while others read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCost:
    """The cost of serving a source at its share of the mix."""

    preprocess_s: float
    """P: processor seconds of reading and transforming, per second of training."""
    transfer_s: float
    """T: processor seconds of handing samples over, per second of training."""
    memory_bytes: int
    """M: access state; and its decoded block, which may lie on disk where ``loader.memory`` is full."""
    is_measured: bool = False
    """Whether P and M come from a profile of the source; else from its kind alone."""
    readers: int = 1
    """How many read it at once, its loader included."""

    @property
    def busy(self) -> float:
        """Share of a core that the source keeps busy, of all readers together."""
        return self.preprocess_s + self.transfer_s

    @property
    def of_loader(self) -> float:
        """Share of a core that it keeps busy in its loader."""
        return self.preprocess_s / self.readers + self.transfer_s


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderShare:
    """What one source loader carries."""

    sources: tuple[int, ...]
    """Numbers of its sources."""
    busy: float
    """Share of a core that they keep busy in it; above 1, it holds up training."""
    memory_bytes: int
    """What they would take if all lay in memory."""
    reads: int
    """Reads of the loader that are under way at once, of one source each; constructors are answered beside them."""
    why: str
    """Why it carries them."""
    readers: int = 0
    """Further readers of its sources, beside it."""

    @property
    def threads(self) -> int:
        """Threads that read, and that answer constructors meanwhile."""
        return self.reads + ANSWERING


def part_of_loader(busy_s: float, took_s: float) -> float:
    """Return the seconds of a loader's time that a read takes, of its core or of the reads it does at once.

    Args:
        busy_s: Processor seconds.
        took_s: From its beginning to its end: it may wait for a store, or in a transform.
    """
    return max(busy_s, min(took_s, _LONGEST_READ_S) / _READS_AT_ONCE)


def partition(
    costs: Sequence[SourceCost], *, num_loaders: int = 0, max_loaders: int = 8
) -> tuple[LoaderShare, ...]:
    """Deal sources to loaders.

    Args:
        costs: Cost of each source, ``[S]``.
        num_loaders: Loaders to use; 0 takes as many as the work needs.
        max_loaders: Most loaders when the number is free.

    Returns:
        The loaders; every source is with one, and no loader is empty.

    Raises:
        ValueError: There are no sources.
    """
    if not costs:
        raise ValueError("there are 0 sources to deal; declare at least one")
    # Never 0: such sources would all be dealt to one bin, and other loaders have none.
    work = np.asarray([max(cost.of_loader, 1e-9) for cost in costs])
    needed = max(math.ceil(work.sum() / _BUSY_SHARE), 1)
    count = min(num_loaders or min(needed, max_loaders), len(costs))
    # Longest first fills every bin before any gets a second source, so none stays empty.
    bins = balance(work, count).bins_N
    groups = [tuple(np.flatnonzero(bins == number).tolist()) for number in range(count)]
    return tuple(
        _share(group, [costs[s] for s in group], is_asked=num_loaders > 0)
        for group in groups
        if group
    )


def _share(sources: tuple[int, ...], costs: Sequence[SourceCost], *, is_asked: bool) -> LoaderShare:
    busy = sum(cost.of_loader for cost in costs)
    further = sum(cost.readers - 1 for cost in costs)
    # Whatever its sources are by now: others may be added to it, or moved.
    reads = max(_READS_AT_ONCE, min(math.ceil(2 * busy), MOST_READS))
    if busy > 1 and len(sources) == 1:
        why = "one source that needs more than a core: tokenise it beforehand, or have more read it (loader.readers)"
    elif further and len(sources) == 1:
        whole = f"{costs[0].busy:.2f} cores of work"
        why = f"one source of {whole}, which {costs[0].readers} read, each its units of every block"
    elif busy > _BUSY_SHARE and len(sources) == 1:
        why = "one source that needs a loader of its own"
    elif is_asked:
        why = "runtime.loaders says how many; work is dealt evenly"
    elif busy > _BUSY_SHARE:
        why = "more work than loaders: set runtime.loaders"
    else:
        why = "light enough to share a process"
    return LoaderShare(
        sources=sources,
        busy=busy,
        memory_bytes=sum(cost.memory_bytes for cost in costs),
        reads=reads,
        why=why,
        readers=further,
    )


def costs_of(
    mix: MixConfig,
    profiles: Mapping[str, KeptProfile],
    *,
    tokens_per_s: float = TOKENS_PER_S,
    cores: int | None = None,
) -> list[SourceCost]:
    """Return (P, T, M) of each source at its greatest share of the mix, and how many read it.

    Args:
        mix: The declared mix.
        profiles: What was measured, by the name of the source; others are estimated by their kind.
        tokens_per_s: What training uses.
        cores: Most readers of a source whose number is free; by default those of this machine.
    """
    most = most_of_one(cores_here() if cores is None else cores)
    stages = mix.mix.stages
    # Shares move from one end of a ramp to the other, so the greatest is at one of them.
    ends = [weights_at(stages, mix.names, stage.from_step + stage.ramp_steps) for stage in stages]
    costs = []
    per_token_S = _seconds_per_token(mix, profiles)
    for s, name in enumerate(mix.names):
        # At its greatest: a plane that stays as it starts is to carry the heaviest stage as well.
        share = max(weights[s] for weights in ends)
        measured = profiles.get(name)
        preprocess_s = share * tokens_per_s * per_token_S[s]
        # A reader is a core for itself at most: more of them would wait for each other.
        free = max(1, min(math.ceil(preprocess_s / _BUSY_SHARE), most))
        costs.append(
            SourceCost(
                preprocess_s=preprocess_s,
                readers=mix.loader.readers.get(name, free),
                transfer_s=share * tokens_per_s * _TRANSFER_S_PER_TOKEN,
                memory_bytes=_ACCESS_BYTES + (measured.block_bytes if measured else 0),
                is_measured=measured is not None,
            )
        )
    return costs


def most_of_one(cores: int) -> int:
    """Return how many readers a source has at most on a machine, where their number is free."""
    return min(cores, _MOST_OF_ONE)


def readers_of(mix: MixConfig, profiles: Mapping[str, KeptProfile]) -> dict[str, int]:
    """Return how many read each source of which it is more than one."""
    costs = zip(mix.names, costs_of(mix, profiles), strict=True)
    return {name: cost.readers for name, cost in costs if cost.readers > 1}


def seconds_in_loaders(mix: MixConfig, profiles: Mapping[str, KeptProfile]) -> dict[int, float]:
    """Return the processor seconds that a token of each source takes in its loader, as measured or of its kind."""
    readers = readers_of(mix, profiles)
    per_token_S = _seconds_per_token(mix, profiles)
    return {s: per_token_S[s] / readers.get(name, 1) for s, name in enumerate(mix.names)}


def _seconds_per_token(mix: MixConfig, profiles: Mapping[str, KeptProfile]) -> list[float]:
    """Return the processor seconds of a token of each source, as measured or of its kind."""
    return [
        measured.preprocess_s_per_token
        if (measured := profiles.get(name))
        else _PREPROCESS_S_PER_TOKEN["text" if source.holds_text else "tokens"]
        for name, source in mix.sources.items()
    ]
