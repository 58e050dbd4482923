"""Source loaders under a virtual clock, the further readers of their sources, and their shadows.

The shares of a loader and of each reader follow from the units of the source's blocks, as in a run (``source.parts``).
A reader without a unit of a block contributes nothing to it.

Shape suffixes:
    B  blocks      R  readers of a source, its loader first
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from omniload.machine.messages import ReadAhead, ReleaseSamples, SamplesReported, SliceRequest
from omniload.machine.readers import ReadBegun, ReadEnded, ReaderScaler, TimePassed
from omniload.machine.source_loader import SamplesRead, SourceLoader
from omniload.mix.columns import SampleColumns
from omniload.mix.samples import SampleTable
from omniload.simulation.clock import Lane, Process, Then
from omniload.simulation.hollow import HollowSource, hollow_columns
from omniload.simulation.profile import BuildCosts, SourceCosts
from omniload.simulation.wire import Wire

__all__ = [
    "SimulatedLoader",
    "SimulatedReader",
    "SimulatedShadow",
    "parts_of_blocks",
    "size_of_request",
    "size_of_table",
]

_SAMPLE_BYTES = 16  # position 8, sub 4, length 4
_REQUESTED_BYTES = 20  # position 8, sub, first and last token 4 each
_RANGE_BYTES = 16  # first and last position
_STANDING_S = 1.0  # time between reports of the plane's position to shadows


def size_of_table(table: SampleTable) -> int:
    """Return the bytes of a loader's report."""
    return _SAMPLE_BYTES * len(table)


def size_of_request(request: SliceRequest) -> int:
    """Return the bytes of a constructor's request to a source."""
    return _REQUESTED_BYTES * len(request.positions_N)


def parts_of_blocks(blocks_B: NDArray[np.int64], units: int, readers: int) -> NDArray[np.float64]:
    """Return each reader's share of each block, ``[R, B]``; the shares of a block sum to 1.

    Args:
        blocks_B: Numbers of the blocks; each begins with another reader, as in ``Share``.
        units: Units of a block.
        readers: Readers of the source.
    """
    first_RB = (np.arange(readers)[:, None] - blocks_B) % readers
    parts: NDArray[np.float64] = np.maximum(0, -(-(units - first_RB) // readers)) / units
    return parts


@dataclass(slots=True)
class SimulatedReader:
    """A further reader of a source: reads its part when its loader asks, one call at a time."""

    process: Process
    wire: Wire
    lane: Lane
    """The reader's only thread."""
    block_bytes: int = field(default=0, init=False)
    """Bytes of its part of a decoded block."""
    memory: int = field(default=0, init=False)
    """Cap of those bytes."""
    has_read: bool = field(default=False, init=False)

    def read(self, seconds: float, size_bytes: int, answered: Then) -> None:
        """Read for this time and answer this size."""
        self.has_read = True
        # Three parts of one call: the thread does nothing else from the request to the answer.
        spent_s = self.wire.end_s(self.process, _RANGE_BYTES) + seconds
        spent_s += self.wire.end_s(self.process, size_bytes)
        self.lane.call(lambda: (spent_s, answered))

    @property
    def held_bytes(self) -> int:
        """Memory of its part of a decoded block, as far as the cap has room."""
        return min(self.block_bytes, self.memory) if self.has_read else 0


@dataclass(slots=True)
class SimulatedShadow:
    """A loader that stands by: it has decoded the present block of each drawn source, and the next block."""

    process: Process
    memory: int
    """Cap of the memory of decoded blocks; the rest lies on disk."""
    _bytes: dict[int, int] = field(default_factory=dict, init=False)
    """Bytes of the decoded blocks of each source."""
    _told_s: dict[int, float] = field(default_factory=dict, init=False)

    def stand(self, source: int, costs: SourceCosts) -> None:
        """Decode the block that its loader has reached, unless a block of the source was reported a moment ago."""
        now_s = self.process.host.clock.now_s
        # Blocks that pass faster than the reports are not decoded.
        if now_s - self._told_s.get(source, -_STANDING_S) < _STANDING_S:
            return
        # Samples of the previous block are still needed, so both blocks are in memory for a while.
        held = 2 if source in self._bytes else 1
        self._told_s[source], self._bytes[source] = now_s, held * costs.block_bytes
        self.process.work(costs.block_s, lambda: None)

    @property
    def held_bytes(self) -> int:
        """Memory of its decoded blocks."""
        return min(sum(self._bytes.values()), self.memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """Each reader's part of a read."""

    seconds_R: NDArray[np.float64]
    bytes_R: NDArray[np.float64]


@dataclass(slots=True)
class SimulatedLoader:
    """A source loader: reads in some threads, and answers constructors in others."""

    process: Process
    wire: Wire
    machine: SourceLoader
    sources: Mapping[int, HollowSource]
    costs: Mapping[int, SourceCosts]
    builds: BuildCosts
    reading: Lane
    answering: Lane
    """Threads that answer constructors of other processes."""
    memory: int
    """Cap of the memory of its samples."""
    scaler: ReaderScaler
    """Decides how many readers each source has."""
    reader_process: Callable[[], Process]
    """Starts a process that reads, or returns the process that all roles share."""
    shadows: Sequence[SimulatedShadow] = ()
    readers: dict[int, list[SimulatedReader]] = field(default_factory=dict, init=False)
    """Further readers of each source that has had some."""
    _ended: list[SimulatedReader] = field(default_factory=list, init=False)
    """Readers of sources that had more before; they are reused."""
    _blocks: dict[int, int] = field(default_factory=dict, init=False)
    """Decoded block of each source."""

    def __post_init__(self) -> None:
        for source, reading in self.scaler.readings_S.items():
            self._divide(source, reading.readers)

    def _divide(self, source: int, readers: int) -> None:
        """Set the number of readers of a source, from its next read on."""
        its = self.readers.setdefault(source, [])
        self._ended += its[readers - 1 :]
        del its[readers - 1 :]
        while len(its) < readers - 1:
            its.append(self._ended.pop() if self._ended else self._reader())
        for each in its:
            # Readers share their loader's cap, as in a run.
            each.block_bytes = self.costs[source].block_bytes // readers
            each.memory, each.has_read = self.memory // readers, False

    def _reader(self) -> SimulatedReader:
        process = self.reader_process()
        return SimulatedReader(process=process, wire=self.wire, lane=Lane(process, 1))

    def _tell(self, event: TimePassed | ReadBegun | ReadEnded) -> None:
        for command in self.scaler.handle(event):
            self._divide(command.source, command.readers)

    @property
    def _now_s(self) -> float:
        return self.process.host.clock.now_s

    def release(self, command: ReleaseSamples) -> None:
        """Release samples that no plan needs any more."""
        self.machine.handle(command)
        self._tell(TimePassed(now_s=self._now_s, ahead=command.ahead))

    def read(self, command: ReadAhead, report: Callable[[SamplesReported], None]) -> None:
        """Read a range and report it."""
        self.reading.call(lambda: self._begin_read(command, report))

    def _begin_read(
        self, command: ReadAhead, report: Callable[[SamplesReported], None]
    ) -> tuple[float, Then]:
        (answer,) = self.machine.handle(command)
        asked_s = self.wire.end_s(self.process)
        if isinstance(answer, SamplesReported):
            return asked_s, lambda: report(answer)
        lacked = command.is_lacked
        self._tell(ReadBegun(now_s=self._now_s, source=command.source, is_lacked=lacked))
        read = self.sources[command.source].read(answer.start, answer.stop)
        # The present number, because the source may get other readers before this read ends.
        others = tuple(self.readers.get(command.source, ()))
        parts = self._parts(read, len(others) + 1)
        told_s = self.wire.end_s(self.process, size_of_table(read.block.table))
        hold = partial(self._hold, read, parts, report)
        if others:
            asked_s += sum(self.wire.end_s(self.process, _RANGE_BYTES) for _ in others)
            return asked_s, lambda: self._read_parts(read, others, parts, told_s, hold)
        return asked_s + float(parts.seconds_R[0]) + told_s, hold

    def _hold(
        self, read: SamplesRead, parts: _Parts, report: Callable[[SamplesReported], None]
    ) -> None:
        self._tell(
            ReadEnded(
                now_s=self._now_s,
                source=read.source,
                busy_s=float(parts.seconds_R.max()),
                tokens=int(read.block.tokens.offsets[-1]),
                readers=len(parts.seconds_R),
            )
        )
        (reported,) = self.machine.handle(read)
        assert isinstance(reported, SamplesReported)
        report(reported)

    def _read_parts(
        self,
        read: SamplesRead,
        others: Sequence[SimulatedReader],
        parts: _Parts,
        told_s: float,
        hold: Then,
    ) -> None:
        """Read a part while other readers read theirs; once all parts are there, combine them."""
        costs = self.costs[read.source]
        # A list, because the calls that count it down come later, each by itself.
        missing = [len(others) + 1]
        # The thread that reads waits for the other parts, and takes no other call meanwhile, as in a run.
        self.reading.keep()

        def ended() -> None:
            self.reading.let_go()
            hold()

        def one_is_there() -> None:
            missing[0] -= 1
            # With the last part, whichever that is, because merging needs all parts.
            if missing[0]:
                return
            received_s = sum(
                self.wire.end_s(self.process, round(each)) for each in parts.bytes_R[1:]
            )
            merged_s = costs.merge_s + int(read.block.tokens.offsets[-1]) * costs.merge_token_s
            self.process.work(received_s + merged_s + told_s, ended)

        for number, reader in enumerate(others, 1):
            size_bytes = round(float(parts.bytes_R[number]))
            carry = self.wire.carry
            back = partial(carry, reader.process, self.process, one_is_there, size_bytes)
            ask = partial(reader.read, float(parts.seconds_R[number]), size_bytes, back)
            carry(self.process, reader.process, ask, _RANGE_BYTES)
        self.process.work(float(parts.seconds_R[0]), one_is_there)

    def _parts(self, read: SamplesRead, readers: int) -> _Parts:
        """Return what each reader reads of a range, and how long it takes, including the decoding of new blocks."""
        costs, table = self.costs[read.source], read.block.table
        before = self.sources[read.source].into_block
        start, stop, size = table.start + before, table.stop + before, costs.block_positions
        if size >= costs.positions_per_epoch:  # one block for all epochs
            blocks_B, positions_B = np.zeros(1, np.int64), np.asarray([stop - start])
        else:
            blocks_B = np.arange(start // size, (stop - 1) // size + 1)
            ends_B = np.minimum(stop, (blocks_B + 1) * size)
            positions_B = ends_B - np.maximum(start, blocks_B * size)
        is_new_B = np.ones(len(blocks_B))
        is_new_B[0] = self._blocks.get(read.source) != blocks_B[0]
        if is_new_B.any():
            for shadow in self.shadows:
                shadow.stand(read.source, costs)
        # Each source keeps one decoded block, so a block that is needed again is decoded again.
        self._blocks[read.source] = int(blocks_B[-1])
        # Tokens are spread evenly over positions, because the block of each token was not measured.
        tokens_B = int(read.block.tokens.offsets[-1]) * positions_B / max(1, stop - start)
        parts_RB = parts_of_blocks(blocks_B, costs.block_units, readers)
        seconds_R = parts_RB @ (tokens_B * costs.token_s + is_new_B * costs.block_s)
        return _Parts(
            # A reader without a unit of these blocks is still asked, but opens nothing.
            seconds_R=seconds_R + costs.read_s * (parts_RB.max(axis=1) > 0),
            bytes_R=parts_RB @ tokens_B * costs.bytes_per_token,
        )

    def _readers_of(self, source: int) -> int:
        return 1 + len(self.readers.get(source, ()))

    def slices(
        self, requests: Sequence[SliceRequest], answer: Callable[[list[SampleColumns], int], None]
    ) -> None:
        """Answer a constructor of another process with a copy of the samples."""
        self.answering.call(lambda: self._begin_slices(requests, answer))

    def _begin_slices(
        self, requests: Sequence[SliceRequest], answer: Callable[[list[SampleColumns], int], None]
    ) -> tuple[float, Then]:
        # Found at the begin of the call, because the machine may release them before it ends.
        found = self.columns(requests)
        size_bytes = self.size_of(requests, found)
        asked_s = self.wire.end_s(self.process, sum(map(size_of_request, requests)))
        seconds = asked_s + self.slices_s(requests, found)
        seconds += self.wire.end_s(self.process, size_bytes)
        return seconds, lambda: answer(found, size_bytes)

    def columns(self, requests: Sequence[SliceRequest]) -> list[SampleColumns]:
        """Return the samples that a constructor asks for, as the machine finds them."""
        lengths = (self.machine.ranges_of([each]).tokens.lengths_N for each in requests)
        return [hollow_columns(each) for each in lengths]

    def slices_s(self, requests: Sequence[SliceRequest], found: Sequence[SampleColumns]) -> float:
        """Return the time to find and copy them."""
        tokens = sum(int(each.tokens.offsets[-1]) for each in found)
        costs = self.builds
        return len(requests) * costs.slices_request_s + tokens * costs.slices_token_s

    def size_of(self, requests: Sequence[SliceRequest], found: Sequence[SampleColumns]) -> int:
        """Return the bytes of an answer, including further columns."""
        return round(
            sum(
                int(columns.tokens.offsets[-1]) * self.costs[request.source].bytes_per_token
                for request, columns in zip(requests, found, strict=True)
            )
        )

    @property
    def held_bytes(self) -> int:
        """Memory of samples, and of decoded blocks as far as the cap has room; the rest is on disk."""
        # Samples stay in memory whatever the cap: it bounds decoded blocks, which go to disk if there is no room.
        samples = self.machine.held_bytes
        blocks = sum(self.costs[s].block_bytes // self._readers_of(s) for s in self._blocks)
        return max(samples, min(samples + blocks, self.memory))
