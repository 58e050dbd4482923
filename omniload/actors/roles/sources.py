"""How a role opens a source, alone or with further readers, and reads a range of it part by part."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from omniload.base.clock import Clock
from omniload.base.concurrency.time_limit import LimitedCalls
from omniload.mix.config import MixConfig
from omniload.source.block_memory import BlockMemory
from omniload.source.parts.divided import OpenPart, PartReader
from omniload.source.parts.sample_block import SampleBlock, joined
from omniload.source.source import RecordSource, open_source
from omniload.source.stores.shard_cache import ShardCache, open_shard_cache
from omniload.source.token_cache.cache import TokenCache, open_token_cache

__all__ = ["Caches", "PartReads", "SourceOpening", "StartReaderOf"]

_FIRST_RECORDS = 16
_SHORT_S, _LONG_S = 0.05, 0.25
"""Between them a part takes its time: it is neither felt by whoever closes the loader, nor are there many."""
_GROWTH = 4
_ANSWER_S = 0.5
"""After so long a read answers with what it has: the next plan may need no more, and the rest is asked for again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caches:
    """What a process keeps of the sources of a mix."""

    memory: BlockMemory
    """Of decoded blocks."""
    tokens: TokenCache | None
    shards: ShardCache | None

    @classmethod
    def of(cls, mix: MixConfig, base_dir: Path) -> "Caches":
        """Open those of a mix; raises as ``open_token_cache``."""
        spill = base_dir / mix.loader.spill if mix.loader.spill else None
        return cls(
            memory=BlockMemory(mix.loader.memory, spill),
            tokens=open_token_cache(mix.loader.token_cache, mix.tokenizer, base_dir),
            shards=open_shard_cache(mix.loader.shard_cache, base_dir),
        )

    def figures(self) -> dict[str, float]:
        """Return what a role says of them."""
        return {} if self.shards is None else self.shards.figures()


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOpening:
    """All that it takes to open a source in any process."""

    mix: MixConfig
    number: int
    """Of the source."""
    base_dir: Path
    cache_dir: Path | None

    @property
    def name(self) -> str:
        """Its name in the mix."""
        return self.mix.names[self.number]

    def open(self, caches: Caches, calls: LimitedCalls | None = None) -> RecordSource:
        """Open it, with the caches of this process; ``calls`` list the files of many sources.

        Raises:
            OmniloadError: As for ``open_source``.
        """
        return open_source(
            self.name,
            self.mix.sources[self.name].using(self.mix.batch.columns_used),
            seed=self.mix.seed,
            tokenizer=self.mix.tokenizer,
            base_dir=self.base_dir,
            cache_dir=self.cache_dir,
            row_length=self.mix.pack.length,
            token_cache=caches.tokens,
            shard_cache=caches.shards,
            calls=calls,
        )

    def open_part(self) -> OpenPart:
        """Open it for a further reader, which has its share of a loader's memory for decoded blocks."""
        caches = Caches.of(self.mix, self.base_dir)
        source = self.open(caches)
        source.share(caches.memory)
        return OpenPart(
            source=source,
            memory=caches.memory,
            memory_bytes=self.mix.loader.memory,
            shards=caches.shards,
        )


StartReaderOf = Callable[[SourceOpening, int], PartReader]
"""Starts the further reader of a number of a source; each runtime has its own."""


class PartReads:
    """Reads ranges of one source in parts of a quarter of a second: a loader that is closed waits for one of them.

    A thousand long documents take seconds to become tokens, and a thousand photographs to be decoded. Samples are the
    same however a range is cut. For one thread at a time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock, self._records = clock, _FIRST_RECORDS

    def read(
        self, start: int, stop: int, read_part: Callable[[int, int], SampleBlock]
    ) -> SampleBlock:
        """Return the samples of positions from ``start`` on: to ``stop``, or fewer where they take their time.

        At least one part is read; what ``read_part`` raises ends it.
        """
        parts, at = [], start
        answer_s = self._clock.now_s() + _ANSWER_S
        while True:
            end = min(at + self._records, stop)
            began_s = self._clock.now_s()
            parts.append(read_part(at, end))
            now_s = self._clock.now_s()
            took_s = now_s - began_s
            if took_s > _LONG_S:
                self._records = max(1, self._records // 2)
            elif took_s < _SHORT_S and end - at == self._records:
                self._records *= _GROWTH
            at = end
            if at == stop or now_s >= answer_s:
                return joined(parts, start, at)
