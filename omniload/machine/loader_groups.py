"""The partition: how many source loaders there are at start, and which sources share one.

Each source has a cost triple (P, T, M) as in the paper: preprocessing, transfer, memory. Light
sources share a loader so that no loader carries much more than the mean; one loader per source
would cost a process of tens of megabytes each. A heavy source has several readers, the loader
itself and further processes; each reads its share of the units of every block.

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
"""Assumed consumption of the training."""
_PREPROCESS_S_PER_TOKEN = {"text": 1e-6, "tokens": 2e-8}
"""Rough costs on one core, used where nothing was measured: tokenising text, and reading token ids."""
_TRANSFER_S_PER_TOKEN = 1e-8
_ACCESS_BYTES = 1 << 20
"""Index, order and open file of a source, roughly."""
_BUSY_SHARE = 0.7
"""Share of a core that a loader may be planned to use; the rest absorbs bursts."""
_READS_AT_ONCE, MOST_READS = 4, 16
"""Concurrent reads of a loader, and their limit for a loader with much work; further reads wait."""
_LONGEST_READ_S = 2.0
"""Longer reads count as this long: they retried their store again and again, which is no work of the loader."""
_MOST_OF_ONE = 8
"""Most readers that are chosen for a source by its cost; a user may ask for more."""
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
    """M: access state, and the decoded block, which may lie on disk if ``loader.memory`` is full."""
    is_measured: bool = False
    """Whether P and M come from a profile of the source, and not just from its kind."""
    readers: int = 1
    """Processes that read it at once, including its loader."""

    @property
    def busy(self) -> float:
        """Cores that all readers of the source together keep busy."""
        return self.preprocess_s + self.transfer_s

    @property
    def of_loader(self) -> float:
        """Share of a core that the source keeps busy in its loader."""
        return self.preprocess_s / self.readers + self.transfer_s


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderShare:
    """The sources and load of one source loader."""

    sources: tuple[int, ...]
    """Numbers of its sources."""
    busy: float
    """Share of a core that they keep busy in the loader; above 1, the loader holds up training."""
    memory_bytes: int
    """Memory that they would take if nothing were spilled to disk."""
    reads: int
    """Concurrent reads, each of another source; constructors are answered by further threads."""
    why: str
    """Why the loader has these sources."""
    readers: int = 0
    """Further reader processes of its sources."""

    @property
    def threads(self) -> int:
        """Threads that read, and that answer constructors meanwhile."""
        return self.reads + ANSWERING


def part_of_loader(busy_s: float, took_s: float) -> float:
    """Return the seconds of a loader's time that a read takes, of its core or of its concurrent reads.

    Args:
        busy_s: Processor seconds of the read.
        took_s: Seconds from its beginning to its end; it may wait for a store, or in a transform.
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
    # Never 0: all such sources would be dealt to one bin, and other loaders would stay empty.
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
    # Not by its current sources, because others may be added or moved to it.
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
    """Return (P, T, M) of each source at its greatest share of the mix, with its number of readers.

    Args:
        mix: The declared mix.
        profiles: What was measured, by the name of the source; others are estimated by their kind.
        tokens_per_s: What training uses.
        cores: Most readers of a source whose number the user leaves open; by default the cores of this machine.
    """
    most = most_of_one(cores_here() if cores is None else cores)
    stages = mix.mix.stages
    # Shares move monotonically along a ramp, so the greatest share is at one of its ends.
    ends = [weights_at(stages, mix.names, stage.from_step + stage.ramp_steps) for stage in stages]
    costs = []
    per_token_S = _seconds_per_token(mix, profiles)
    for s, name in enumerate(mix.names):
        # The greatest share, because a plane without scaling has to carry its heaviest stage as well.
        share = max(weights[s] for weights in ends)
        measured = profiles.get(name)
        preprocess_s = share * tokens_per_s * per_token_S[s]
        # A reader can use one whole core, so more readers than cores would wait for each other.
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
    """Return the most readers of a source on a machine with ``cores`` cores, if the user leaves their number open."""
    return min(cores, _MOST_OF_ONE)


def readers_of(mix: MixConfig, profiles: Mapping[str, KeptProfile]) -> dict[str, int]:
    """Return the number of readers of each source that has more than one."""
    costs = zip(mix.names, costs_of(mix, profiles), strict=True)
    return {name: cost.readers for name, cost in costs if cost.readers > 1}


def seconds_in_loaders(mix: MixConfig, profiles: Mapping[str, KeptProfile]) -> dict[int, float]:
    """Return the processor seconds per token of each source in its loader, as measured or estimated from its kind."""
    readers = readers_of(mix, profiles)
    per_token_S = _seconds_per_token(mix, profiles)
    return {s: per_token_S[s] / readers.get(name, 1) for s, name in enumerate(mix.names)}


def _seconds_per_token(mix: MixConfig, profiles: Mapping[str, KeptProfile]) -> list[float]:
    """Return the processor seconds per token of each source, as measured or estimated from its kind."""
    return [
        measured.preprocess_s_per_token
        if (measured := profiles.get(name))
        else _PREPROCESS_S_PER_TOKEN["text" if source.holds_text else "tokens"]
        for name, source in mix.sources.items()
    ]
