"""Opening of sources by a role, further readers of a source, and reading of a range in parts."""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from omniload.actors.heartbeat_board import Activity
from omniload.base.clock import Clock
from omniload.base.concurrency.time_limit import LimitedCalls
from omniload.base.errors import IntegrityError, OmniloadError
from omniload.base.linux.cores import cores_here
from omniload.base.log import get_logger
from omniload.machine.loader_groups import most_of_one
from omniload.machine.readers import ReadBegun, ReadEnded, ReaderScaler, TimePassed
from omniload.machine.scaling.coming import Ahead
from omniload.mix.config import MixConfig
from omniload.source.block_memory import BlockMemory
from omniload.source.parts.divided import DividedSource
from omniload.source.parts.reader import OpenPart, PartReader
from omniload.source.parts.sample_block import SampleBlock, joined
from omniload.source.record_source import RecordSource, open_source
from omniload.source.source import Source
from omniload.source.spec import SourceSpec
from omniload.source.stores.shard_cache import ShardCache, open_shard_cache
from omniload.source.token_cache.cache import TokenCache
from omniload.source.token_cache.opening import open_token_cache

__all__ = ["Caches", "PartReads", "SourceOpening", "SourceReaders", "StartReaderOf"]

_FIRST_RECORDS = 16
_SHORT_S, _LONG_S = 0.05, 0.25
"""Bounds of the duration of a part: short enough for closing a loader, and long enough to have few parts."""
_GROWTH = 4
_ANSWER_S = 0.5
"""Time after which a read answers with its samples so far; the next plan may need no more, or requests the rest."""
_CHANGES = "reader_changes_total"
_TOLD = 0.5
"""Share of reading time above which a source with a single reader is reported."""
_TELL_EVERY_S = 1.0
_LOG = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caches:
    """The caches of a process for the sources of a mix."""

    memory: BlockMemory
    """Memory for decoded blocks."""
    tokens: TokenCache | None
    shards: ShardCache | None

    @classmethod
    def of(cls, mix: MixConfig, base_dir: Path) -> "Caches":
        """Open the caches of a mix; raises as ``open_token_cache``."""
        spill = base_dir / mix.loader.spill if mix.loader.spill else None
        return cls(
            memory=BlockMemory(mix.loader.memory, spill),
            tokens=open_token_cache(mix.loader.token_cache, mix.tokenizer, base_dir),
            shards=open_shard_cache(mix.loader.shard_cache, base_dir),
        )

    def figures(self) -> dict[str, float]:
        """Return the caches' figures for the role."""
        return {} if self.shards is None else self.shards.figures()


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOpening:
    """Everything that is needed to open a source in any process."""

    mix: MixConfig
    number: int
    """Number of the source."""
    base_dir: Path
    cache_dir: Path | None

    @property
    def name(self) -> str:
        """Its name in the mix."""
        return self.mix.names[self.number]

    def open(self, caches: Caches, calls: LimitedCalls | None = None) -> RecordSource:
        """Open the source with the caches of this process; ``calls`` list the files of many sources.

        Raises:
            OmniloadError: As for ``open_source``; names the source.
        """
        spec = SourceSpec.drawn(self.mix, self.name, self.base_dir, self.cache_dir)
        try:
            return open_source(
                spec, token_cache=caches.tokens, shard_cache=caches.shards, calls=calls
            )
        except OmniloadError as error:
            key = f"sources.{self.name}"
            if key in str(error):
                raise
            # Several sources may share a file, and only one of them asks for something that is not there.
            raise type(error)(f"{key}: {error}") from error

    def open_part(self) -> OpenPart:
        """Open the source for a further reader, which gets its share of a loader's memory for decoded blocks."""
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
"""Starts the further reader with a number of a source; each runtime has its own way."""


class SourceReaders:
    """Shell of the machine that scales the readers of each source of a loader. Safe to call from several threads."""

    def __init__(self, start: StartReaderOf | None, activity: Activity, clock: Clock) -> None:
        """Use ``start`` to start further readers; ``None`` for none."""
        self._start, self._activity, self._clock = start, activity, clock
        cores = cores_here()
        self._scaler = ReaderScaler(cores=cores, most=most_of_one(cores))
        self._lock = threading.Lock()
        self._sources: dict[int, DividedSource] = {}
        self._told: dict[int, dict[str, float]] = {}
        """Posted figures by source."""
        self._told_s = -math.inf
        if start is not None:
            activity.figures.note(readers=0)
            activity.figures.count(_CHANGES, 0)

    def of(
        self, opening: SourceOpening, own: RecordSource, readers: int, shards: ShardCache | None
    ) -> Source:
        """Return a source that begins with this many readers; ``own`` itself if it never has others."""
        if self._start is None:
            return own
        is_given = opening.name in opening.mix.loader.readers
        if is_given and readers == 1:
            return own
        source = DividedSource(own, readers, partial(self._start, opening), shards, self._clock)
        with self._lock:
            self._sources[opening.number] = source
            self._scaler.follow(opening.number, readers, is_given=is_given)
        return source

    @contextmanager
    def reading(self, number: int, *, is_lacked: bool) -> Iterator[None]:
        """Note a read of a source for its duration; ``is_lacked`` if the planner waits for it."""
        source = self._sources.get(number)
        if source is None:
            yield
            return
        before = source.so_far
        self._tell(partial(ReadBegun, source=number, is_lacked=is_lacked))
        try:
            yield
        finally:
            done = source.so_far
            self._tell(
                partial(
                    ReadEnded,
                    source=number,
                    busy_s=done.busy_s - before.busy_s,
                    tokens=done.tokens - before.tokens,
                    readers=done.readers,
                )
            )

    def read_by(self, number: int) -> int:
        """Return the number of readers that took part in the last read of a source."""
        source = self._sources.get(number)
        return 1 if source is None else source.so_far.readers

    def look(self, ahead: Ahead | None = None) -> None:
        """Check whether fewer readers would do, or more are needed soon; reads alone do not trigger this."""
        self._tell(partial(TimePassed, ahead=ahead))
        for source in list(self._sources.values()):
            source.look()

    @contextmanager
    def unless_refused(self, number: int) -> Iterator[None]:
        """End the readers of a source that is refused inside, because the next source of its number needs others."""
        try:
            yield
        except BaseException:
            self.drop((number,))
            raise

    def drop(self, sources: Sequence[int]) -> None:
        """End the readers of sources that are no longer served."""
        with self._lock:
            dropped = {s: self._sources.pop(s) for s in sources if s in self._sources}
            for number in dropped:
                self._scaler.forget(number)
                # The loader that serves the source now posts its figures.
                self._activity.figures.forget(self._told.pop(number, ()))
            if dropped:
                self._note()
        # Outside the lock, because ending them through Ray may take a while.
        for source in dropped.values():
            source.close()

    def close(self) -> None:
        """End all readers."""
        for source in list(self._sources.values()):
            source.close()

    def _tell(self, event: Callable[..., TimePassed | ReadBegun | ReadEnded]) -> None:
        with self._lock:
            # Under the lock, so that the machine hears two threads in the order of their times.
            now_s = self._clock.now_s()
            commands = self._scaler.handle(event(now_s=now_s))
            due = [(self._sources[each.source], each) for each in commands]
            if due or now_s >= self._told_s + _TELL_EVERY_S:
                self._told_s = now_s
                self._note()
        for source, command in due:
            source.divide(command.readers, at_once=command.is_ahead)
            self._activity.figures.count(_CHANGES)
            said = f"source {source.name} is read by {command.readers} from now on"
            # Also called when the loader releases samples, which is not an activity.
            with self._activity.speaking():
                _LOG.warning("%s: %s", said, command.why)

    def _note(self) -> None:
        further = 0
        for number, reading in self._scaler.readings_S.items():
            source = self._sources[number]
            # A shadow, and a source whose readers are still opening it, has fewer readers than wanted.
            reads = reading.readers if reading.for_step else source.so_far.readers
            readers = min(reading.readers, reads)
            further += readers - 1
            # Most of perhaps a thousand sources have nothing to report.
            if readers > 1 or reading.share > _TOLD or source.lost or number in self._told:
                now = replace(reading, readers=readers, lost=source.lost)
                self._told[number] = now.figures(source.name)
                self._activity.figures.note(**self._told[number])
        self._activity.figures.note(readers=further)


class PartReads:
    """Reads ranges of one source in parts of a quarter of a second, so that a closing loader waits for one part only.

    Tokenising a thousand long documents, or decoding a thousand photographs, takes seconds. Samples are the same
    however a range is cut. For one thread at a time.
    """

    def __init__(self, clock: Clock, goes_on: Callable[[], bool] = lambda: False) -> None:
        """Answer with the samples read after half a second, unless ``goes_on`` says to read the whole range."""
        self._clock, self._records, self._goes_on = clock, _FIRST_RECORDS, goes_on

    def read(
        self,
        start: int,
        stop: int,
        read_part: Callable[[int, int], SampleBlock],
        block_stop: Callable[[int], int],
    ) -> SampleBlock:
        """Return the samples of positions from ``start`` to ``stop``, or fewer if reading takes long.

        Samples from a damaged block on are left out, so that steps which do not need it go on; ``block_stop`` says
        where blocks end. At least one part is read, and an error of its first block is raised.
        """
        parts, at, is_damaged = [], start, False
        answer_s = self._clock.now_s() + _ANSWER_S
        while True:
            end = min(at + self._records, stop)
            if is_damaged:
                end = min(end, block_stop(at))
            began_s = self._clock.now_s()
            try:
                parts.append(read_part(at, end))
            except IntegrityError as error:
                if not is_damaged and end > block_stop(at):
                    is_damaged = True  # from here on each block by itself
                    _LOG.info("%s; what lies before it is read block by block", error)
                    continue
                if not parts:
                    raise
                return joined(parts, start, at)
            now_s = self._clock.now_s()
            took_s = now_s - began_s
            if took_s > _LONG_S:
                self._records = max(1, self._records // 2)
            elif took_s < _SHORT_S and end - at == self._records:
                self._records *= _GROWTH
            at = end
            if at == stop or (now_s >= answer_s and not self._goes_on()):
                return joined(parts, start, at)
