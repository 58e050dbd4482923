"""What to fetch before it is asked for: offset streams found by process, not by file handle.

A loader's 64 processes share a handle's file, a process reads several tensors in turn,
and the kernel sends the parts of one read out of order. So a stream is a process and a
place: a read near where a stream of its process stands continues it and doubles its
window; any other begins a new stream and fetches nothing ahead until it is continued.
"""

from collections import OrderedDict
from dataclasses import dataclass

__all__ = ["ReadAhead"]


@dataclass(slots=True)
class _Stream:
    next_offset: int
    window_bytes: int
    fetched_to: int


class ReadAhead:
    """The streams of one file.

    Args:
        first_bytes: Window of a stream once it is known for one.
        largest_bytes: Largest window; 0 turns read-ahead off.
        most_streams: Streams remembered; the least recently used is forgotten.
    """

    def __init__(
        self, *, first_bytes: int = 1 << 20, largest_bytes: int, most_streams: int = 64
    ) -> None:
        self._first_bytes = min(first_bytes, largest_bytes)
        self._largest_bytes = largest_bytes
        self._most_streams = most_streams
        self._streams: OrderedDict[tuple[int, int], _Stream] = OrderedDict()
        self._numbered = 0

    def observe(self, process: int, offset: int, size_bytes: int) -> range:
        """Note a read and return the bytes to fetch now, a range that may be empty.

        Ranges of one stream never overlap, and never reach further than its window
        past the furthest byte read.
        """
        if self._largest_bytes == 0:
            return range(0)
        key = self._stream_at(process, offset)
        end = offset + size_bytes
        if key is None:
            # A read from the start of a file is nearly always the first of a stream.
            window = self._first_bytes if offset == 0 else 0
            return self._advance(self._remember(process, _Stream(end, window, end)))
        stream = self._streams[key]
        self._streams.move_to_end(key)
        if end <= stream.next_offset:
            return range(0)
        stream.next_offset = end
        doubled = max(self._first_bytes, stream.window_bytes * 2)
        stream.window_bytes = min(self._largest_bytes, doubled)
        return self._advance(stream)

    def _stream_at(self, process: int, offset: int) -> tuple[int, int] | None:
        best, distance = None, -1
        for key, stream in self._streams.items():
            # The kernel's own read-ahead sends requests of a stream out of order.
            slack = max(self._first_bytes, stream.window_bytes)
            away = abs(offset - stream.next_offset)
            if key[0] == process and away <= slack and (best is None or away < distance):
                best, distance = key, away
        return best

    def _remember(self, process: int, stream: _Stream) -> _Stream:
        self._numbered += 1
        self._streams[process, self._numbered] = stream
        while len(self._streams) > self._most_streams:
            self._streams.popitem(last=False)
        return stream

    @staticmethod
    def _advance(stream: _Stream) -> range:
        start = max(stream.fetched_to, stream.next_offset)
        target = stream.next_offset + stream.window_bytes
        # Half a window at a time: one batch of ranged reads, not one request per read.
        if target - start < max(1, stream.window_bytes // 2):
            return range(0)
        stream.fetched_to = target
        return range(start, target)
