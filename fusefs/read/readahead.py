"""Ranges to fetch before they are asked for. Offset streams are found by process and place, not by file handle.

Four ranks read their slices through one file, a loader's threads fault in tensors of one
mapping concurrently, and the kernel sends the parts of one read out of order. So a stream is
a process and a place. A read near the place of a stream of its process continues the stream and lets
its window grow. Any other read begins a new stream, for which nothing is fetched ahead until it is
continued. Streams that are read at the same time share one allowance for their windows, because
the bytes fetched ahead for one stream must not push out those of another.

If requests to the store are expensive, a stream that begins with a long read fetches whole blocks of the file,
so that readers of different places leave no parts of blocks behind that cost one more request each.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, assert_never

from fusefs.read.speculation import SpeculativeReads
from omniload.base.lru import Lru

__all__ = ["Closed", "Fetch", "Invalidated", "Read", "ReadAhead", "Streams"]


class Read(NamedTuple):
    """A read of a range by a process. A tuple, because one is made for every read that memory answers."""

    process: int
    """Number of the reader: a process, a handle, anything that distinguishes readers."""
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Closed:
    """A process no longer reads the file."""

    process: int


@dataclass(frozen=True, slots=True)
class Invalidated:
    """The kernel lost pages, so parts that read-ahead skipped as already in the kernel may be missing."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """Fetch bytes ``start`` to ``stop`` of the file, which may end earlier."""

    start: int
    stop: int


@dataclass(slots=True, eq=False)
class _Stream:
    process: int
    next_offset: int
    first_read_bytes: int
    run_bytes: int
    """Bytes read in this stream; more than the first read once it is known as a stream."""
    window_bytes: int
    fetched_to: int
    read_at: int
    """Number of the last read that continued the stream."""
    grows_behind: int
    """End of the bytes fetched with its first read; the window grows once reads pass it."""
    in_blocks: bool
    """Whether the stream is fetched in whole blocks."""


class Streams:
    """The streams of one version, found by process and place. Not safe in threads.

    Args:
        most: Most streams remembered; the least recently used is forgotten.
    """

    def __init__(self, most: int) -> None:
        self._all: Lru[int, _Stream] = Lru(most)
        self._of_process: dict[int, list[_Stream]] = {}
        self._standing_at: dict[tuple[int, int], _Stream] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[_Stream]:
        return iter(self._all.values())

    def at(self, process: int, offset: int, slack_bytes: int) -> _Stream | None:
        """Return the stream that a read continues, at this place or the nearest within the slack; it counts as used."""
        # Try the exact place first: a sequential reader is there, however many streams its process has.
        found = self._standing_at.get((process, offset))
        if found is None:
            distance = slack_bytes + 1
            for stream in self._of_process.get(process, ()):
                away = abs(offset - stream.next_offset)
                if away < distance:
                    found, distance = stream, away
        if found is not None:
            self._all.get(id(found))
        return found

    def add(self, stream: _Stream) -> None:
        """Remember a new stream."""
        self._of_process.setdefault(stream.process, []).append(stream)
        self._standing_at[stream.process, stream.next_offset] = stream
        for _, oldest in self._all.put(id(stream), stream):
            self._unlink(oldest)

    def move(self, stream: _Stream, offset: int) -> None:
        """Note that a stream moved to another place."""
        self._standing_at.pop((stream.process, stream.next_offset), None)
        stream.next_offset = offset
        self._standing_at[stream.process, offset] = stream

    def forget(self, process: int) -> None:
        """Forget the streams of a process."""
        for stream in list(self._of_process.get(process, ())):
            self._all.pop(id(stream))
            self._unlink(stream)

    def _unlink(self, stream: _Stream) -> None:
        place = (stream.process, stream.next_offset)
        if self._standing_at.get(place) is stream:
            del self._standing_at[place]
        streams = self._of_process[stream.process]
        streams.remove(stream)
        if not streams:
            del self._of_process[stream.process]


class ReadAhead:
    """The streams of one version of a file: a machine without I/O. Not safe in threads.

    Args:
        first_bytes: Window of a stream once it is known as one.
        largest_bytes: Largest window; 0 turns read-ahead off.
        all_bytes: Most bytes of the windows of streams that are read at the same time; if these are less than
            ``first_bytes`` for each, nothing is fetched ahead. None sets no limit.
        most_streams: Most streams remembered; the least recently used is forgotten.
        block_bytes: A first read of ``first_bytes`` or more is nearly always a part of a longer
            read, which the kernel cut and sends in any order. It fetches its whole block, so
            that the other parts wait for the same request. 0: this is off.
        speculative: Decides when a block also fetches its neighbours, with the same block size; if not
            given, never.
    """

    def __init__(
        self,
        *,
        first_bytes: int = 1 << 20,
        largest_bytes: int,
        all_bytes: int | None = None,
        most_streams: int = 128,
        block_bytes: int = 0,
        speculative: SpeculativeReads | None = None,
    ) -> None:
        self._first_bytes = min(first_bytes, largest_bytes)
        self._largest_bytes = largest_bytes
        self._all_bytes = all_bytes
        # The kernel's own read-ahead sends requests of a stream out of order, up to this far apart.
        self._slack_bytes = 4 * self._first_bytes
        self._most_streams = most_streams
        self._block_bytes = block_bytes
        self._speculative = speculative
        self.streams = Streams(most_streams)
        self._num_reads = 0

    def handle(self, event: Read | Closed | Invalidated) -> tuple[Fetch, ...]:
        """Apply one event and return the ranges to fetch now.

        Ranges fetched for one stream never overlap, unless ``Invalidated`` came between them, and
        never reach further than its window past the furthest byte it has read.
        """
        match event:
            case Read(process=process, offset=offset, size_bytes=size_bytes):
                if not self._largest_bytes or not size_bytes:
                    return ()
                self._num_reads += 1
                if self._speculative is not None and size_bytes >= self._first_bytes:
                    self._speculative.read(offset, offset + size_bytes)
                return self._observe(process, offset, size_bytes)
            case Closed(process=process):
                self.streams.forget(process)
                return ()
            case Invalidated():
                for stream in self.streams:
                    # Go back to the last read: the bytes after it may have been skipped because the kernel had them.
                    stream.fetched_to = min(stream.fetched_to, stream.next_offset)
                return ()
            case _:
                assert_never(event)

    def _observe(self, process: int, offset: int, size_bytes: int) -> tuple[Fetch, ...]:
        end = offset + size_bytes
        stream = self.streams.at(process, offset, self._slack_bytes)
        if stream is None:
            return self._begin(process, offset, size_bytes)
        stream.read_at = self._num_reads
        stream.run_bytes += size_bytes
        # The kernel sent this part out of order, and the stream has passed it.
        if end <= stream.next_offset:
            return ()
        self.streams.move(stream, end)
        if end <= stream.grows_behind:
            return ()
        if stream.grows_behind and stream.run_bytes <= self._block_bytes:
            # So far this is one long read that began inside a block, and it may end soon.
            return self._whole_blocks(stream, offset)
        # Double the window, but keep it near the bytes read so far, so that a short run does not cost a large window.
        grown = min(2 * stream.window_bytes, 4 * stream.run_bytes)
        stream.window_bytes = min(self._largest_bytes, max(self._first_bytes, grown))
        return self._advance(stream, offset)

    def _begin(self, process: int, offset: int, size_bytes: int) -> tuple[Fetch, ...]:
        # A read from the start of a file is nearly always the first of a stream.
        window = self._first_bytes if offset == 0 else 0
        in_blocks = bool(self._block_bytes) and size_bytes >= self._first_bytes
        stream = _Stream(
            process=process,
            next_offset=offset + size_bytes,
            first_read_bytes=size_bytes,
            run_bytes=size_bytes,
            window_bytes=window,
            fetched_to=0 if in_blocks else offset + size_bytes,
            read_at=self._num_reads,
            grows_behind=0,
            in_blocks=in_blocks,
        )
        self.streams.add(stream)
        if in_blocks:
            return self._whole_blocks(stream, offset)
        return self._advance(stream, offset)

    def _whole_blocks(self, stream: _Stream, offset: int) -> tuple[Fetch, ...]:
        """Fetch the blocks from ``offset`` on of the read that has just moved its stream, including that read."""
        end, block = stream.next_offset, self._block_bytes
        if not (share := self._share_bytes()):
            return ()
        start, stop = offset - offset % block, end + -end % block
        if self._speculative is not None and share >= self._speculative.wide_bytes:
            start, stop = self._speculative.widened(start, stop)
        start, stop = max(stream.fetched_to, start), min(stop, end + share)
        stream.fetched_to = max(stream.fetched_to, stop)
        stream.window_bytes = max(stream.window_bytes, stop - start)
        stream.grows_behind = stop if offset else 0
        return (Fetch(start, stop),) if start < offset or stop > end else ()

    def _share_bytes(self) -> int:
        """Return the largest window of one stream, given the other streams that are read at the same time."""
        if self._all_bytes is None:
            return self._largest_bytes
        # Count reads instead of time: a stream is active if it was read among the last reads, two per remembered
        # stream.
        since = self._num_reads - 2 * self._most_streams
        active = sum(
            # A single read is not known as a stream yet, and nothing is fetched ahead of it.
            s.run_bytes > s.first_read_bytes
            and s.next_offset > s.grows_behind
            and s.read_at >= since
            for s in self.streams
        )
        share = self._all_bytes // max(1, active)
        # With so many streams, bytes fetched for one push out those of another, so fetch nothing ahead.
        return min(self._largest_bytes, share) if share >= self._first_bytes else 0

    def _advance(self, stream: _Stream, offset: int) -> tuple[Fetch, ...]:
        start = max(stream.fetched_to, stream.next_offset)
        ahead, window = start - stream.next_offset, stream.window_bytes
        if _is_enough(ahead, window):
            return ()
        # Count the other streams only here, so that they cost nothing while enough is being fetched.
        stream.window_bytes = window = min(window, self._share_bytes())
        if _is_enough(ahead, window):
            return ()
        stop = stream.next_offset + window
        if stream.in_blocks:
            # Fetch whole blocks, because the rest of a block would cost a request of its own.
            whole = stop - stop % self._block_bytes
            # If the window is smaller than a block, something must still be fetched.
            stop = whole if whole > start else stop
            start = max(stream.fetched_to, offset - offset % self._block_bytes)
        stream.fetched_to = stop
        return (Fetch(start, stop),)


def _is_enough(ahead_bytes: int, window_bytes: int) -> bool:
    """Return whether to wait, so that half a window is one batch of ranged reads, instead of one batch per read."""
    return window_bytes - ahead_bytes < max(1, window_bytes // 2)
