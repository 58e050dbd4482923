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
"""Sources that are read again at a time by a loader that takes over: ranks wait for all of them."""
PATIENT_S = tuple(backoff_s(attempts=18))
"""Waits of about a minute in all: what a storage server takes to come back, or to hand over to another."""
_KEEP_S = 2.0
"""Longest wait, at the end, for the folder in which costs are kept: a home folder on a network may hang."""
_LOG = get_logger(__name__)


class LoaderShell:
    """Holds the only open copy of its sources. Safe to call from several threads."""

    opens_again_s: Sequence[float] = ()
    """Waits between attempts to open them from a store that does not answer; none where a user is told at once."""

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
        """Open sources; those that several read have further readers where ``start_reader`` starts them."""
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
        # Sources are many and their blocks large: what one does not need at once another may.
        self._caches = Caches.of(mix, base_dir)
        self._memory = self._caches.memory
        self._readers = SourceReaders(start_reader, activity, self._clock)
        self._readers_at_first = readers_of(
            mix, kept_profiles(cache_dir, (names[s] for s in sources))
        )
        # Arrow loads pandas, where that is installed, as it first makes a value: not in a thread that reads.
        pa.scalar(0)
        # Footers and indexes are waited for, not computed: hundreds of sources open together.
        calls = LimitedCalls("omniload-listing")
        with calls, DaemonPool(_OPENING_THREADS, "omniload-opening", reads=True) as pool:
            # In their order, whatever comes back first: what fails first by number is what a user is told.
            waits_s = self.opens_again_s
            opened = pool.map(lambda s: self._open_source(s, mix, calls, waits_s), sources)
            self._sources: dict[int, Source] = dict(zip(sources, opened, strict=True))
        self._reading_again = DaemonPool(len(_AGAIN_THREADS), "omniload-reading-again", reads=True)
        # A source decodes into its own state: one read of it at a time.
        self._reading = {s: threading.Lock() for s in sources}
        self._parts = {s: self._part_reads() for s in sources}
        self._decoded_ahead = DecodedAhead()
        self._serves = False
        """Whether it has taken over, and is a shadow no more."""

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
        """Open one source more, that an edit adds; return what was found. One that was refused then is forgotten."""
        self._readers_at_first |= readers_of(
            mix, kept_profiles(self._cache_dir, (mix.names[number],))
        )
        # Before the lock: constructors are answered from the other sources meanwhile.
        with self._readers.unless_refused(number):
            look(source := self._open_source(number, mix), mix)
        with self._lock:
            self._reading[number], self._parts[number] = threading.Lock(), self._part_reads()
            self._sources[number] = source
            self._machine.names = {**self._machine.names, number: source.name}
        return source.facts

    def open_more(self, sources: Sequence[int], mix: MixConfig) -> dict[int, SourceFacts]:
        """Open sources that another loader serves, as far as they are not open; return what was found in each."""
        missing = [s for s in sources if s not in self._sources]
        with DaemonPool(_OPENING_THREADS, "omniload-opening", reads=True) as pool:
            pool.map(lambda s: self.open_also(s, mix, as_it_is), missing)
        return {s: self._sources[s].facts for s in sources}

    def hand_over(self, command: HandedOver) -> None:
        """Answer for sources that another loader begins to serve, also for what only that one has read."""
        with self._lock:
            self._machine.handle(command)

    def drop(self, sources: Sequence[int]) -> None:
        """Let go of sources that another loader serves and nobody asks this one for."""
        with self._lock:
            for source in sources:
                self._sources.pop(source, None)
                self._machine.forget(source)
                self._decoded_ahead.forget(source)
        self._readers.drop(sources)
        self._count_held()

    def look_for_shard(self, change: SkipShard) -> ShardsFound:
        """Return the shards of its sources that a name may mean."""
        return shards_like(change, {source.name: source.shards for source in self._sources_now()})

    def place_at(self, source: int, position: int) -> tuple[str, str]:
        """Return the path of the file that holds the record of a position, and what people call the record there."""
        return self._sources[source].place_at(position)

    def _sources_now(self) -> list[Source]:
        with self._lock:
            return list(self._sources.values())

    def facts(self) -> dict[int, SourceFacts]:
        """Return what the planner must know of each source."""
        return {s: source.facts for s, source in self._sources.items()}

    def read_ahead(self, command: ReadAhead) -> SamplesReported:
        """Read and hold a range, and say what it gave; a store that does not answer is asked again for a while.

        Of a range that takes long to read it is the first part, see ``PartReads``.
        """
        source = self._sources.get(command.source)
        if source is None:
            raise UnavailableError(
                f"source {command.source} is served by another loader by now; ask that one"
            )
        doing = f"reads records {command.start} to {command.stop} of source {source.name}"
        with self._activity.doing(doing) as says, self._reading[command.source]:
            with self._lock:
                (answer,) = self._machine.handle(command)
            # A planner that took over asks for what the lost one had asked for: it is held, and not read twice.
            if isinstance(answer, SamplesReported):
                return answer
            readers = self._readers.read_by(command.source)
            began_s, at_s = (
                time.thread_time(),
                self._clock.now_s(),
            )  # waiting for a store is no work
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
                # In a thread of its own: a folder that hangs holds up no read, for which ranks wait.
                self._keeping.submit(self._keep)
            return report

    def _part_reads(self) -> PartReads:
        # Where blocks are let go of after a read, each of several reads would begin by decoding.
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
        """Return the seconds of a loader's time that reading each source has taken, and the tokens that it gave."""
        with self._lock:
            return dict(self._work)

    def _count_work(
        self, source: int, busy_s: float, part_s: float, block: SampleBlock, readers: int
    ) -> None:
        with self._lock:
            before_s, tokens = self._work.get(source, (0.0, 0))
            self._work[source] = before_s + part_s, tokens + len(block.tokens.values_V)
            name = self._machine.names.get(source)
        # Of a source that several read this thread knows its own part of the seconds, and all of the tokens.
        if name is not None and readers == 1:
            self._costs.count(name, busy_s, len(block.tokens.values_V))

    def _hold(self, asked: Read, block: SampleBlock) -> SamplesReported:
        """Hold what was read, unless the source was dropped meanwhile; return what is to be reported."""
        source, without = asked.source, asked.without
        read = SampleRange(block.table, block.tokens, block.others, frozenset(without))
        with self._lock:
            # What the planner heard of this source stands with its next loader, which reads it by itself.
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
        # Ranks that wait for it are told of what the role does, and a log of another host is not before them. Each
        # heartbeat has these words, so the whole error stands in the log alone.
        says(f"has source {source} {done} again, as its store refused ({error!s:.200}),")

    def stand_at(self, command: TakeOver) -> None:
        """Have at hand, decoded, what the first reads would draw from if ``command`` were to be carried out soon.

        A source that cannot be read there is passed over: its holder has told of it, or reads it from what it has.
        """
        for number, (floor, end) in command.ranges.items():
            source = self._sources.get(number)
            # Looked at for each source: from now on ranks wait for what is read in its place.
            if self._serves or self._closed:
                return
            if source is None or (reach := self._decoded_ahead.reach(number, floor, end)) is None:
                continue
            since, without = command.without.get(number, (0, ()))
            doing = f"decodes what record {floor} of source {source.name} lies in"
            try:
                with self._activity.doing(doing), self._reading[number]:
                    stop = source.stand_at(floor, reach, without if floor >= since else ())
                    source.give_way()
                self._decoded_ahead.note(number, range(floor, stop))
            except OmniloadError as error:
                _LOG.info("source %s is not at hand at %d: %s", source.name, floor, error)
                self._decoded_ahead.pass_over(number, floor)

    def take_over(self, command: TakeOver, *, waits_s: float = 0.0) -> None:
        """Serve what another served: it may be asked for at once, and is read again; for so long this waits for it."""
        self._serves = True
        with self._lock:
            reads = self._machine.handle(command)
        left = deque(read for read in reads if isinstance(read, Read))
        # In threads of their own: what constructors ask for meanwhile is read in theirs.
        read = [self._reading_again.submit(lambda: self._read_again(left)) for _ in _AGAIN_THREADS]
        wait(read, waits_s)

    def slices(self, requests: Sequence[SliceRequest]) -> list[SampleColumns]:
        """Return the asked token ranges, request by request: for a constructor in another process."""
        self._read_unread(requests)
        with self._lock:
            return self._machine.slices_of(requests)

    def ranges(self, requests: Sequence[SliceRequest]) -> ColumnRanges:
        """Say where the asked token ranges lie: for a constructor in this process."""
        self._read_unread(requests)
        with self._lock:
            return self._machine.ranges_of(requests)

    def release(self, command: ReleaseSamples) -> None:
        """Let go of samples that no plan needs any more."""
        with self._lock:
            self._machine.handle(command)
        self._count_held()
        self._readers.look(command.ahead)

    def close(self) -> None:
        """Read no more: a read gives up at its next part, or its next attempt where its store does not answer."""
        # A flag, not a lock: a read that hangs in a store's client is left to end with its process.
        self._closed = True
        self._reading_again.close(0.0)
        self._readers.close()

    def keep_costs(self) -> None:
        """Keep for later starts what reading its sources costs, for the last time; it does so now and then by itself.

        A folder that hangs is told of, and left after some seconds.
        """
        if not wait([self._keeping.submit(self._keep)], _KEEP_S).done:
            told = "what reading costs is not kept: %s did not answer within %.0f s"
            _LOG.warning(told, self._cache_dir, _KEEP_S)
        self._keeping.close(0.0)

    def _keep(self) -> None:
        try:
            self._costs.keep()
        except Exception as error:  # noqa: BLE001 -- of a thread for which nobody waits
            with self._activity.speaking():
                _LOG.error("costs are not kept: %s", project_error(error, "a source loader"))

    def _count_held(self) -> None:
        """Leave so much less to decoded blocks."""
        with self._lock:
            held_bytes = self._machine.held_bytes
        # One limit for both, as ``loader.memory`` says what the process takes.
        self._memory.set_others(held_bytes)
        self._activity.figures.note(held_bytes=held_bytes, **self._caches.figures())

    def _read_unread(self, requests: Sequence[SliceRequest]) -> None:
        """Read at once what is asked for and was read only by the loader before this one."""
        with self._lock:
            unread = self._machine.unread(requests)
        for read in unread:
            self._read_now(read)

    def _read_now(self, read: Read) -> None:
        at = read.start
        # Part by part: what is asked for meanwhile is read between two of them.
        while at < read.stop:
            rest = ReadAhead(source=read.source, start=at, stop=read.stop, without=read.without)
            at = self.read_ahead(rest).table.stop

    def _read_again(self, left: deque[Read]) -> None:
        """Read what is left, beside other threads that do, until nothing is."""
        try:
            while not self._closed and (read := _next_of(left)) is not None:
                self._read_now(read)
        except OmniloadError as error:
            # Others go on with what is left. Who asks for these samples has them read again, and is told the error.
            with self._activity.speaking():
                _LOG.warning("what another loader held is not read ahead: %s", error)

    def _sleep(self, duration_s: float) -> None:
        self._activity.figures.count(REPEATED)
        try:
            self._clock.sleep(duration_s)
        finally:
            self._activity.figures.count(REPEATED, -1)
        if self._closed:
            raise UnavailableError("the data plane was closed while a store did not answer")


def _next_of(left: deque[Read]) -> Read | None:
    """Take the first that is left; ``None`` where other threads took all."""
    try:
        return left.popleft()
    except IndexError:
        return None
