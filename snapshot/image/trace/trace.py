"""Traces: the bytes of an image that a start touched, in order of first touch; JSON lines.

::

    {"omniload_trace": 1, "image": "sha256:...", "command": ["python", "train.py"], "runs": 2}
    {"path": "usr/bin/python3.11", "offset": 0, "size": 131072, "at_ms": 3, "runs": 2}
    {"path": "usr/lib/libc.so.6", "offset": 4096, "size": 8192, "at_ms": 5, "runs": 1}

Ranges are of files, not of blocks, so a trace is valid for every form of an image that has
the same files, and survives a conversion. Lines of one file do not overlap, and all are
in the order of first touch.
"""

import hashlib
import heapq
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from typing import Any

import orjson

from omniload.base.errors import IntegrityError, StateError
from snapshot.image.layer.index import BlockRef, LayerIndex, block_refs
from snapshot.image.tree.tree import Node, Tree
from snapshot.oci.digest import check_digest

__all__ = [
    "MAX_TRACE_BYTES",
    "VERSION",
    "Touch",
    "Trace",
    "begins_trace",
    "command_key",
    "decode_trace",
    "encode_trace",
    "hot_blocks",
    "merge_traces",
    "most_run",
    "nearest",
    "trace_of",
]

VERSION = 1
_KEY = "omniload_trace"
_MAX_LINES = 4_000_000
# Enough for the most lines at the usual length of a path.
MAX_TRACE_BYTES = 1 << 30
_MAX_OFFSET = 1 << 44


@dataclass(frozen=True, slots=True, order=True)
class Touch:
    """A range of a file, the time of its first touch, and the number of starts that touched it."""

    at_ms: int
    """Milliseconds since the start began; the least over several starts."""
    path: str
    offset: int
    size_bytes: int
    runs: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The ranges that starts of one image with one command touched."""

    image: str
    """Digest of the manifest."""
    command: tuple[str, ...]
    runs: int
    """Number of starts in the trace."""
    touches: tuple[Touch, ...]
    """Touches in order; ranges of one file do not overlap."""


def trace_of(image: str, command: Sequence[str], reads: Iterable[Touch]) -> Trace:
    """Make the trace of one start from all its reads, in any order, overlapping or not.

    Returns:
        A trace of one run; each byte that was read is in one touch, with its earliest time.
    """
    touches = tuple(_settled(reads, most_runs=1))
    return Trace(image=check_digest(image), command=tuple(command), runs=1, touches=touches)


def merge_traces(traces: Sequence[Trace]) -> Trace:
    """Make one trace of several starts.

    For each byte, the runs add up and the earliest time counts. So the result depends neither
    on the order of the traces nor on how they are grouped.

    Raises:
        ValueError: They are of different images or commands, or there are none.
    """
    keys = {(trace.image, trace.command) for trace in traces}
    if len(keys) != 1:
        raise ValueError(f"traces of {len(keys)} images or commands do not merge: {sorted(keys)}")
    ((image, command),) = keys
    runs = sum(trace.runs for trace in traces)
    touches = (touch for trace in traces for touch in trace.touches)
    merged = tuple(_settled(touches, most_runs=runs))
    return Trace(image=image, command=command, runs=runs, touches=merged)


def encode_trace(trace: Trace) -> bytes:
    """Return the JSON lines of a trace."""
    head = {
        # First, because this key identifies a trace, see ``begins_trace``.
        _KEY: VERSION,
        "image": trace.image,
        "command": list(trace.command),
        "runs": trace.runs,
    }
    lines = [json.dumps(head)]
    # Not orjson, which cannot write names that are not UTF-8; json writes them as ASCII escapes.
    lines += [
        json.dumps(
            {
                "path": touch.path,
                "offset": touch.offset,
                "size": touch.size_bytes,
                "at_ms": touch.at_ms,
                "runs": touch.runs,
            }
        )
        for touch in trace.touches
    ]
    return ("\n".join(lines) + "\n").encode("ascii")


def begins_trace(data: bytes) -> bool:
    """Return whether bytes begin like a trace of any version, whatever follows."""
    return data.startswith(f'{{"{_KEY}":'.encode())


def decode_trace(data: bytes, *, name: str) -> Trace:
    """Read a trace; keys that this version does not know are ignored.

    Raises:
        IntegrityError: A line is malformed, or its numbers are impossible.
        StateError: Another version wrote it.
    """
    lines = data.splitlines()
    head = _line(lines[0] if lines else b"", name, 1)
    if _KEY not in head:
        raise IntegrityError(f"trace {name}: its first line is no head of a trace")
    if head[_KEY] != VERSION:
        raise StateError(f"trace {name} has version {head[_KEY]!r}, this code reads {VERSION}")
    if len(lines) > _MAX_LINES:
        raise IntegrityError(f"trace {name}: {len(lines)} lines, more than {_MAX_LINES}")
    touches = [_touch(_line(text, name, n), name, n) for n, text in enumerate(lines[1:], start=2)]
    try:
        command, runs = tuple(map(str, head["command"])), max(int(head["runs"]), 1)
        # Settle it again, because a trace from elsewhere may break the rules, which this one must keep.
        settled = tuple(_settled(touches, most_runs=runs))
        image = check_digest(head["image"])
        return Trace(image=image, command=command, runs=runs, touches=settled)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise IntegrityError(f"trace {name}: breaks its format: {error!r}") from error


def hot_blocks(trace: Trace, tree: Tree, indexes: Sequence[LayerIndex]) -> tuple[BlockRef, ...]:
    """Return the blocks that hold the touches of a trace, each once, in the order of first touch.

    Touches of fewer than a quarter of the starts, and files that the image lacks, are left out.
    """
    # One of many starts may have searched through all files, which would otherwise stay hot for ever.
    least_runs = -(-trace.runs // 4)
    refs: dict[str, BlockRef] = {}
    for touch in trace.touches:
        if touch.runs < least_runs:
            continue
        if (node := tree.lookup(touch.path)) is None:
            continue  # the trace is a hint, and may be of another image
        index = indexes[node.layer]
        for ref in block_refs(index, _blocks_of(node, touch, index)):
            refs.setdefault(ref.digest, ref)
    return tuple(refs.values())


def _blocks_of(node: Node, touch: Touch, index: LayerIndex) -> Iterator[int]:
    for extent in node.entry.extents:
        start = max(touch.offset, extent.file_offset)
        end = min(touch.offset + touch.size_bytes, extent.file_offset + extent.size_bytes)
        if start < end:
            at = extent.stream_offset + start - extent.file_offset
            yield from (part.block for part in index.ranges(at, end - start))


def _settled(touches: Iterable[Touch], *, most_runs: int) -> Iterator[Touch]:
    """Yield touches without overlaps: for each byte the runs add up, and the earliest time counts."""
    by_path: dict[str, list[Touch]] = {}
    for touch in touches:
        if touch.size_bytes:
            by_path.setdefault(touch.path, []).append(touch)
    found = [piece for path in by_path for piece in _pieces(path, by_path[path], most_runs)]
    yield from sorted(found)


def _pieces(path: str, touches: Sequence[Touch], most_runs: int) -> list[Touch]:
    """Cut the ranges of one file at every begin and end, and join equal neighbours again."""
    found: list[Touch] = []
    for piece in _cut(path, touches, most_runs):
        last = found[-1] if found else piece
        at = last.offset + last.size_bytes
        if (at, last.at_ms, last.runs) == (piece.offset, piece.at_ms, piece.runs):
            found[-1] = replace(last, size_bytes=last.size_bytes + piece.size_bytes)
        else:
            found.append(piece)
    return found


def _cut(path: str, touches: Sequence[Touch], most_runs: int) -> Iterator[Touch]:
    """Yield the pieces between places where a range begins or ends, in order."""
    more_runs: defaultdict[int, int] = defaultdict(int)
    for touch in touches:
        more_runs[touch.offset] += touch.runs
        more_runs[touch.offset + touch.size_bytes] -= touch.runs
    waiting = sorted(touches, key=lambda touch: touch.offset, reverse=True)
    # Order the open ranges by time, and drop those that have ended when they come first: to look at all open ranges
    # at each place would take quadratic time for nested ranges, which a stranger's trace may have.
    earliest: list[tuple[int, int]] = []
    runs = 0
    for start, end in pairwise(sorted(more_runs)):
        runs += more_runs[start]
        while waiting and waiting[-1].offset == start:
            begun = waiting.pop()
            heapq.heappush(earliest, (begun.at_ms, begun.offset + begun.size_bytes))
        while earliest and earliest[0][1] <= start:
            heapq.heappop(earliest)
        if runs:
            # A stranger's trace may count a range more often than there were starts.
            yield Touch(earliest[0][0], path, start, end - start, min(runs, most_runs))


def _line(text: bytes, name: str, number: int) -> Mapping[str, Any]:
    try:
        # Our lines are plain ASCII; orjson refuses only escapes of lone surrogates.
        value = json.loads(text) if b"\\ud" in text else orjson.loads(text)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"trace {name}:{number}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise IntegrityError(f"trace {name}:{number}: not an object")
    return value


def _touch(value: Mapping[str, Any], name: str, number: int) -> Touch:
    numbers = [value.get(key) for key in ("at_ms", "offset", "size", "runs")]
    path = value.get("path")
    whole = [n for n in numbers if isinstance(n, int) and 0 <= n <= _MAX_OFFSET]
    if len(whole) != 4 or not isinstance(path, str):
        raise IntegrityError(f"trace {name}:{number}: {dict(value)!r} is no touch")
    at_ms, offset, size, runs = whole
    return Touch(at_ms, path, offset, size, max(runs, 1))


# Each further command costs the reading of its trace before a start.
_MOST_COMMANDS = 8


def command_key(command: Sequence[str]) -> str:
    """Return the name of a command: sha256 of its words, in hex."""
    return hashlib.sha256(json.dumps(list(command)).encode()).hexdigest()


def nearest(commands: Sequence[Sequence[str]], wanted: Sequence[str]) -> int | None:
    """Return the command that starts most like another one.

    Returns:
        Place of the command that shares the most leading words, at least the first. Among equals the
        shortest wins, then the first. None if no command shares the first word.
    """
    # Compare leading words, because a job that resumes from another step differs in one of the last words.
    shared = [_num_shared(command, wanted) for command in commands]
    places = [place for place, num in enumerate(shared) if num]
    return min(places, key=lambda p: (-shared[p], len(commands[p]), p), default=None)


def most_run(runs: Sequence[int]) -> tuple[int, ...]:
    """Return the commands that make up three quarters of the starts of an image.

    Args:
        runs: Starts of each command.

    Returns:
        Places, the most started command first, among equals the first one; at most eight.
    """
    order = sorted(range(len(runs)), key=lambda place: (-runs[place], place))
    found, started = [], 0
    for place in order[:_MOST_COMMANDS]:
        # A start without a known command is then more likely than not like one of these.
        if 4 * started >= 3 * sum(runs):
            break
        found.append(place)
        started += runs[place]
    return tuple(found)


def _num_shared(one: Sequence[str], other: Sequence[str]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))
