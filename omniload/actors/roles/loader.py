"""Shell of the Source Loader: opens its sources, reads when told to, answers slice requests."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow as pa

from omniload.actors.heartbeat_board import Activity
from omniload.actors.roles.first_look import Look, as_it_is, require_samples
from omniload.actors.roles.sources import (
    Caches,
    PartReads,
    SourceOpening,
    SourceReaders,
    StartReaderOf,
)
from omniload.base.clock import Clock, SystemClock
from omniload.base.concurrency.threads import DaemonPool
from omniload.base.concurrency.time_limit import LimitedCalls
from omniload.base.errors import OmniloadError, UnavailableError, project_error
from omniload.base.log import get_logger
from omniload.base.retry import backoff_s, with_retries
from omniload.machine.held.blocks import SampleRange
from omniload.machine.loader_groups import part_of_loader, readers_of
from omniload.machine.messages import (
    HandedOver,
    ReadAhead,
    ReleaseSamples,
    SamplesReported,
    SliceRequest,
    TakeOver,
)
from omniload.machine.source_loader import DecodedAhead, Read, SamplesRead, SourceLoader
from omniload.machine.status import REPEATED
from omniload.mix.columns import ColumnRanges, SampleColumns
from omniload.mix.config import MixConfig
from omniload.mix.edits.edit import SkipShard
from omniload.mix.edits.shards import ShardsFound, shards_like
from omniload.mix.fingerprint import SourceFacts
from omniload.source.kept_profile import RunningCosts, kept_profiles
from omniload.source.parts.sample_block import SampleBlock
from omniload.source.source import Source

__all__ = ["PATIENT_S", "LoaderShell"]

_OPENING_THREADS = 8
_AGAIN_THREADS = range(4)
"""Threads with which a loader that takes over reads its sources again, because ranks wait for all of them."""
PATIENT_S = tuple(backoff_s(attempts=18))
"""Waits between attempts, about a minute in all: the time in which a storage server restarts or fails over."""
_KEEP_S = 2.0
"""Longest wait at the end for the folder in which costs are kept; a home folder on a network may hang."""
_LOG = get_logger(__name__)


class LoaderShell:
    """Holds the only open copy of its sources. Safe to call from several threads."""

    opens_again_s: Sequence[float] = ()
    """Waits between attempts to open sources from a store that does not answer; empty to raise the error at once."""

    def __init__(
        self,
        mix: MixConfig,
        sources: Sequence[int],
        *,
        base_dir: Path,
        cache_dir: Path | None,
        activity: Activity,
        start_reader: StartReaderOf | None = None,
    ) -> None:
        """Open sources; ``start_reader`` starts further readers of sources that have several."""
        names = mix.names
        self._machine = SourceLoader(names={s: names[s] for s in sources})
        self._base_dir, self._cache_dir = base_dir, cache_dir
        self._clock: Clock = SystemClock()
        self._activity = activity
        self._lock = threading.Lock()
        self._closed = False
        self._work: dict[int, tuple[float, int]] = {}
        self._costs = RunningCosts(cache_dir, self._clock.now_s())
        self._keeping = DaemonPool(1, "omniload-costs")
        # There are many sources with large blocks, and memory that one does not need now may serve another.
        self._caches = Caches.of(mix, base_dir)
        self._memory = self._caches.memory
        self._readers = SourceReaders(start_reader, activity, self._clock)
        self._readers_at_first = readers_of(
            mix, kept_profiles(cache_dir, (names[s] for s in sources))
        )
        # Arrow loads pandas, if that is installed, when it first makes a value; this must not happen in a reading
        # thread.
        pa.scalar(0)
        # Opening mostly waits for footers and indexes, so hundreds of sources are opened concurrently.
        calls = LimitedCalls("omniload-listing")
        with calls, DaemonPool(_OPENING_THREADS, "omniload-opening", reads=True) as pool:
            # Collected in their order, so that the user sees the error of the first failing source by number.
            waits_s = self.opens_again_s
            opened = pool.map(lambda s: self._open_source(s, mix, calls, waits_s), sources)
            self._sources: dict[int, Source] = dict(zip(sources, opened, strict=True))
        self._reading_again = DaemonPool(len(_AGAIN_THREADS), "omniload-reading-again", reads=True)
        # A source decodes into its own state, so it has one read at a time.
        self._reading = {s: threading.Lock() for s in sources}
        self._parts = {s: self._part_reads() for s in sources}
        self._decoded_ahead = DecodedAhead()
        self._serves = False
        """Whether it has taken over, and is no longer a shadow."""

    def _open_source(
        self,
        number: int,
        mix: MixConfig,
        calls: LimitedCalls | None = None,
        waits_s: Sequence[float] = (),
    ) -> Source:
        opening = SourceOpening(
            mix=mix, number=number, base_dir=self._base_dir, cache_dir=self._cache_dir
        )
        with self._activity.doing(f"opens source {opening.name}") as says:
            own = with_retries(
                *(lambda: opening.open(self._caches, calls), waits_s, self._sleep),
                partial(self._note_retry, opening.name, "opened", says),
            )
        own.share(self._memory)
        readers = self._readers_at_first.get(opening.name, 1)
        return self._readers.of(opening, own, readers, self._caches.shards)

    def open_also(self, number: int, mix: MixConfig, look: Look = require_samples) -> SourceFacts:
        """Open a source that an edit adds; return the facts about it. A source that ``look`` refuses is forgotten."""
        self._readers_at_first |= readers_of(
            mix, kept_profiles(self._cache_dir, (mix.names[number],))
        )
        # Before the lock is taken, so that constructors are answered from the other sources meanwhile.
        with self._readers.unless_refused(number):
            look(source := self._open_source(number, mix), mix)
        with self._lock:
            self._reading[number], self._parts[number] = threading.Lock(), self._part_reads()
            self._sources[number] = source
            self._machine.names = {**self._machine.names, number: source.name}
        return source.facts

    def open_more(self, sources: Sequence[int], mix: MixConfig) -> dict[int, SourceFacts]:
        """Open sources that another loader serves, if they are not open yet; return the facts about each."""
        missing = [s for s in sources if s not in self._sources]
        with DaemonPool(_OPENING_THREADS, "omniload-opening", reads=True) as pool:
            pool.map(lambda s: self.open_also(s, mix, as_it_is), missing)
        return {s: self._sources[s].facts for s in sources}

    def hand_over(self, command: HandedOver) -> None:
        """Keep answering for sources that another loader begins to serve, even for samples that only it has read."""
        with self._lock:
            self._machine.handle(command)

    def drop(self, sources: Sequence[int]) -> None:
        """Release sources that another loader serves, once this one is not asked for them any more."""
        with self._lock:
            for source in sources:
                self._sources.pop(source, None)
                self._machine.forget(source)
                self._decoded_ahead.forget(source)
        self._readers.drop(sources)
        self._count_held()

    def look_for_shard(self, change: SkipShard) -> ShardsFound:
        """Return the shards of its sources that a name may refer to."""
        return shards_like(change, {source.name: source.shards for source in self._sources_now()})

    def place_at(self, source: int, position: int) -> tuple[str, str]:
        """Return the path of the file with the record of a position, and the record's name there for people."""
        return self._sources[source].place_at(position)

    def _sources_now(self) -> list[Source]:
        with self._lock:
            return list(self._sources.values())

    def facts(self) -> dict[int, SourceFacts]:
        """Return the facts about each source that the planner needs."""
        return {s: source.facts for s, source in self._sources.items()}

    def read_ahead(self, command: ReadAhead) -> SamplesReported:
        """Read and hold a range, and report its samples; a store that does not answer is asked again for a while.

        If a range takes long to read, only its first part is read and reported, see ``PartReads``.
        """
        source = self._sources.get(command.source)
        if source is None:
            raise UnavailableError(
                f"source {command.source} is now served by another loader; ask that loader"
            )
        doing = f"reads records {command.start} to {command.stop} of source {source.name}"
        with self._activity.doing(doing) as says, self._reading[command.source]:
            with self._lock:
                (answer,) = self._machine.handle(command)
            # A planner that took over repeats requests of the lost one; samples that are held are not read twice.
            if isinstance(answer, SamplesReported):
                return answer
            readers = self._readers.read_by(command.source)
            began_s, at_s = (
                time.thread_time(),
                self._clock.now_s(),
            )  # waiting for a store does not count as work
            with self._readers.reading(command.source, is_lacked=command.is_lacked):
                block = self._read(source, answer, says)
            busy_s = time.thread_time() - began_s
            readers = max(readers, self._readers.read_by(command.source))
            part_s = part_of_loader(busy_s, self._clock.now_s() - at_s)
            self._count_work(command.source, busy_s, part_s, block, readers)
            source.give_way()
            report = self._hold(answer, block)
            self._activity.figures.count("read_samples_total", len(block.table))
            self._activity.figures.count("read_bytes_total", block.tokens.values_V.nbytes)
            self._count_held()
            if self._costs.is_due(self._clock.now_s()):
                # In a thread of its own, so that a hanging folder delays no read.
                self._keeping.submit(self._keep)
            return report

    def _part_reads(self) -> PartReads:
        # If blocks are released after each read, each of several reads would begin by decoding.
        return PartReads(self._clock, goes_on=self._memory.is_over)

    def _read(self, source: Source, asked: Read, says: Callable[[str], None]) -> SampleBlock:
        def part(start: int, stop: int) -> SampleBlock:
            if self._closed:
                raise UnavailableError(f"the data plane was closed while {source.name} was read")
            block = with_retries(
                lambda: source.read(start, stop, asked.without),
                *(PATIENT_S, self._sleep, partial(self._note_retry, source.name, "read", says)),
            )
            says("")  # its store answers again, and further parts are read
            return block

        return self._parts[asked.source].read(asked.start, asked.stop, part, source.block_stop)

    def work(self) -> dict[int, tuple[float, int]]:
        """Return, for each source, the seconds of the loader's time that its reads took, and their tokens."""
        with self._lock:
            return dict(self._work)

    def _count_work(
        self, source: int, busy_s: float, part_s: float, block: SampleBlock, readers: int
    ) -> None:
        with self._lock:
            before_s, tokens = self._work.get(source, (0.0, 0))
            self._work[source] = before_s + part_s, tokens + len(block.tokens.values_V)
            name = self._machine.names.get(source)
        # For a source with several readers, this thread knows its own part of the seconds, and all of the tokens.
        if name is not None and readers == 1:
            self._costs.count(name, busy_s, len(block.tokens.values_V))

    def _hold(self, asked: Read, block: SampleBlock) -> SamplesReported:
        """Hold the samples that were read, unless the source was dropped meanwhile; return the report."""
        source, without = asked.source, asked.without
        read = SampleRange(block.table, block.tokens, block.others, frozenset(without))
        with self._lock:
            # The planner's knowledge of this source stays valid, because its next loader reads the same samples itself.
            if source not in self._sources:
                return replace(self._machine.reported(source, (read,), without), size_bytes=0)
            (report,) = self._machine.handle(SamplesRead(source=source, block=read))
        assert isinstance(report, SamplesReported)
        return report

    def _note_retry(
        self, source: str, done: str, says: Callable[[str], None], error: Exception, wait_s: float
    ) -> None:
        self._activity.figures.count("retries_total")
        _LOG.warning("source %s: %s again in %.1f s: %s", source, done, wait_s, error)
        # Waiting ranks show the role's activity, because they may not see the log of another host. These words are part
        # of each heartbeat, so only the log has the whole error.
        says(f"has source {source} {done} again, as its store refused ({error!s:.200}),")

    def decode_ahead(self, command: TakeOver) -> None:
        """Decode the blocks that the first reads would need if ``command`` were carried out soon.

        A source that cannot be read there is passed over: its holder has reported that, or has the block already.
        """
        for number, (floor, end) in command.ranges.items():
            source = self._sources.get(number)
            # Checked for each source, because after a take-over ranks wait for the reads of this loader.
            if self._serves or self._closed:
                return
            if source is None or (reach := self._decoded_ahead.reach(number, floor, end)) is None:
                continue
            since, without = command.without.get(number, (0, ()))
            doing = f"decodes what record {floor} of source {source.name} lies in"
            try:
                with self._activity.doing(doing), self._reading[number]:
                    stop = source.decode_ahead(floor, reach, without if floor >= since else ())
                    source.give_way()
                self._decoded_ahead.note(number, range(floor, stop))
            except OmniloadError as error:
                _LOG.info("source %s is not ready at %d: %s", source.name, floor, error)
                self._decoded_ahead.pass_over(number, floor)

    def take_over(self, command: TakeOver, *, waits_s: float = 0.0) -> None:
        """Serve the sources of another loader, whose samples may be requested at once; wait ``waits_s`` for reads."""
        self._serves = True
        with self._lock:
            reads = self._machine.handle(command)
        left = deque(read for read in reads if isinstance(read, Read))
        # In separate threads; samples that constructors request meanwhile are read in the threads of their calls.
        read = [self._reading_again.submit(lambda: self._read_again(left)) for _ in _AGAIN_THREADS]
        wait(read, waits_s)

    def slices(self, requests: Sequence[SliceRequest]) -> list[SampleColumns]:
        """Return the requested token ranges, request by request, for a constructor in another process."""
        self._read_unread(requests)
        with self._lock:
            return self._machine.slices_of(requests)

    def ranges(self, requests: Sequence[SliceRequest]) -> ColumnRanges:
        """Return where the requested token ranges lie, for a constructor in this process."""
        self._read_unread(requests)
        with self._lock:
            return self._machine.ranges_of(requests)

    def release(self, command: ReleaseSamples) -> None:
        """Release samples that no plan needs any more."""
        with self._lock:
            self._machine.handle(command)
        self._count_held()
        self._readers.look(command.ahead)

    def close(self) -> None:
        """Stop reading: a read gives up at its next part, or at its next attempt if its store does not answer."""
        # A flag, not a lock, because a read that hangs in a store's client ends only with its process.
        self._closed = True
        self._reading_again.close(0.0)
        self._readers.close()

    def keep_costs(self) -> None:
        """Save the costs of reading its sources for later starts, a last time; it also happens regularly by itself.

        If the folder hangs, this is logged, and given up after some seconds.
        """
        if not wait([self._keeping.submit(self._keep)], _KEEP_S).done:
            told = "the measured cost of reading is not saved: %s did not answer within %.0f s"
            _LOG.warning(told, self._cache_dir, _KEEP_S)
        self._keeping.close(0.0)

    def _keep(self) -> None:
        try:
            self._costs.keep()
        except Exception as error:  # noqa: BLE001 -- nobody waits for this thread
            with self._activity.speaking():
                _LOG.error("costs are not kept: %s", project_error(error, "a source loader"))

    def _count_held(self) -> None:
        """Subtract the held samples from the memory for decoded blocks."""
        with self._lock:
            held_bytes = self._machine.held_bytes
        # Both share one limit, because ``loader.memory`` is the limit of the process.
        self._memory.set_others(held_bytes)
        self._activity.figures.note(held_bytes=held_bytes, **self._caches.figures())

    def _read_unread(self, requests: Sequence[SliceRequest]) -> None:
        """Read requested samples at once that only the previous loader had read."""
        with self._lock:
            unread = self._machine.unread(requests)
        for read in unread:
            self._read_now(read)

    def _read_now(self, read: Read) -> None:
        at = read.start
        # Part by part, so that other requests are served between two parts.
        while at < read.stop:
            rest = ReadAhead(source=read.source, start=at, stop=read.stop, without=read.without)
            at = self.read_ahead(rest).table.stop

    def _read_again(self, left: deque[Read]) -> None:
        """Read from the shared queue, together with other threads, until it is empty."""
        try:
            while not self._closed and (read := _next_of(left)) is not None:
                self._read_now(read)
        except OmniloadError as error:
            # Other threads continue with the rest. A request for these samples reads them again, and gets the error.
            with self._activity.speaking():
                _LOG.warning("blocks that another loader held are not read ahead: %s", error)

    def _sleep(self, duration_s: float) -> None:
        self._activity.figures.count(REPEATED)
        try:
            self._clock.sleep(duration_s)
        finally:
            self._activity.figures.count(REPEATED, -1)
        if self._closed:
            raise UnavailableError("the data plane was closed while a store did not answer")


def _next_of(left: deque[Read]) -> Read | None:
    """Take the first read of the queue; ``None`` if it is empty."""
    try:
        return left.popleft()
    except IndexError:
        return None
