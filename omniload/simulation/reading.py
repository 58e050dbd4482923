"""Measures the cost of reading on this machine: a part of each source of a mix, and threads that read in parallel.

All figures are processor time, so that other work on the machine has little effect.
"""

import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from omniload.actors.plane import PlaneSpec
from omniload.base.errors import ConfigError
from omniload.base.linux.cores import cores_here
from omniload.base.linux.kept_waiting import kept_waiting_s
from omniload.simulation.profile import Profile, SourceCosts
from omniload.source.formats.opening import open_format
from omniload.source.parts.sample_block import SampleBlock, merged
from omniload.source.parts.share import Part
from omniload.source.record_source import RecordSource, open_source
from omniload.source.source import Source
from omniload.source.spec import SourceSpec

__all__ = [
    "Shown",
    "cores_of",
    "line_through",
    "measure_sources",
    "measure_threads",
    "measured_sources",
    "spent_s",
]

Shown = Callable[[str, float], AbstractContextManager[Callable[[float], None]]]
"""Shows progress: receives the name and the amount of work; its value receives each part that is done."""

_SMALL_READ, _LARGE_READ = 16, 256
"""Records of the two sizes of reads."""
_REPEATS = 9
_MOST_RECORDS, _MOST_TOKENS = 2_048, 1 << 20
"""Most records and tokens of a source whose samples are looked at."""
_THREADS_S = 0.15


def spent_s(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the processor seconds of this process that a call takes, and the result of the call."""
    began_s = time.process_time()
    found = call()
    return time.process_time() - began_s, found


def line_through(x0: float, y0: float, x1: float, y1: float) -> tuple[float, float]:
    """Return offset and slope of the line through two points, neither below 0."""
    slope = max(0.0, (y1 - y0) / (x1 - x0)) if x1 > x0 else y1 / max(1.0, x1)
    offset = y0 - slope * x0
    # Only noise makes the offset negative, so everything is then attributed to the slope.
    return (offset, slope) if offset >= 0 else (0.0, y1 / max(1.0, x1))


def measured_sources(spec: PlaneSpec, shown: Shown) -> Profile:
    """Return a profile of every source of a mix.

    Raises:
        OmniloadError: A source cannot be read.
    """
    with shown("measuring sources", len(spec.mix.names)) as advance:
        sources = measure_sources(spec, advance)
    return Profile(
        machine=_processor(),
        cores=cores_here(),
        load=os.getloadavg()[0],
        threads=measure_threads(spec),
        sources=sources,
    )


def measure_sources(spec: PlaneSpec, advance: Callable[[int], object]) -> dict[str, SourceCosts]:
    """Read a part of every source; ``advance`` is called after each.

    Raises:
        OmniloadError: See ``open_source``.
        ConfigError: A source has no sample among its first records.
    """
    found = {}
    for name in spec.mix.names:
        found[name] = _measure_source(spec, name)
        advance(1)
    return found


def _opened(spec: PlaneSpec, name: str) -> RecordSource:
    return open_source(SourceSpec.drawn(spec.mix, name, spec.base_dir, spec.cache_dir))


def _block_of(spec: PlaneSpec, name: str) -> tuple[int, int]:
    """Return the average numbers of records and units in a block of a source."""
    source = SourceSpec.drawn(spec.mix, name, spec.base_dir, spec.cache_dir)
    rows_U = open_format(source).format.units().rows_U
    filled_U = rows_U[rows_U > 0]
    units = max(1, min(source.config.shuffle.units_together(len(filled_U)), len(filled_U)))
    return max(1, round(float(filled_U.mean()) * units)), units


def _measure_source(spec: PlaneSpec, name: str) -> SourceCosts:
    source, (block, units) = _opened(spec, name), _block_of(spec, name)
    epoch = source.positions_per_epoch
    decode_s = _decodes(source, block)
    small_s, small = _reads(source, _SMALL_READ, min(block, epoch))
    large_s, large = _reads(source, _LARGE_READ, min(block, epoch))
    # Taken from the difference, so that the fixed cost of a read is not attributed to tokens.
    token_s = max(0.0, large_s - small_s) / max(1, large - small)
    if large <= small:
        token_s = large_s / max(1, large)
    merge_s, merge_token_s = _merges(source, min(block, epoch))
    seen = _looked_at(source, min(block, epoch, _MOST_RECORDS))
    table = seen.table
    # A simulated source repeats the records that were looked at; without a sample, the planner would read forever.
    if not len(table):
        raise ConfigError(
            f"source {name!r} gives no sample of its first {table.stop} records, so that none can be simulated; leave "
            "it out of the mix, or look at what skips them: omniload mix check says how many"
        )
    # Records after the last sample count too, with no samples.
    counts = np.bincount(table.positions_N, minlength=table.stop)
    tokens = max(1, len(seen.tokens.values_V))
    size = sum(column.values_V.nbytes for column in (seen.tokens, *seen.others.values()))
    return SourceCosts(
        read_s=max(0.0, small_s - small * token_s),
        token_s=token_s,
        block_s=max(0.0, decode_s - small_s),
        merge_s=merge_s,
        merge_token_s=merge_token_s,
        block_positions=block,
        block_units=units,
        block_bytes=round(size / table.stop * block),
        bytes_per_token=max(4.0, size / tokens),
        positions_per_epoch=epoch,
        counts=counts.tolist(),
        lengths=table.lengths_N.tolist(),
    )


def _decodes(source: Source, block: int) -> float:
    """Return the seconds of a small read whose block must be decoded; the first block is decoded afterwards."""
    epoch = source.positions_per_epoch

    def read(start: int) -> float:
        return spent_s(lambda: source.read(start, min(start + _SMALL_READ, epoch)))[0]

    if block >= epoch:
        return read(0)
    # A block has this many records only on average, so the middle of the second block is surely in no other block.
    far = min(block + block // 2, epoch - 1)
    read(far)  # this read pays for anything that is loaded once
    return median(read(start) for start in (0, far, 0))


def _reads(source: Source, records: int, end: int) -> tuple[float, int]:
    """Return the seconds and tokens of a read of ``records`` records within the decoded block."""
    found = []
    for number in range(_REPEATS):
        # Within the decoded block, because decoding another block is measured separately.
        start = number * records % max(1, end - records)
        seconds, read = spent_s(lambda: source.read(start, min(start + records, end)))  # noqa: B023 -- called here
        found.append((seconds, len(read.tokens.values_V)))
    return median(s for s, _ in found), round(median(tokens for _, tokens in found))


def _merges(source: RecordSource, end: int) -> tuple[float, float]:
    """Return the cost of merging the reads of two readers: per read, and per token."""
    reads = [(0, min(records, end)) for records in (_SMALL_READ, _LARGE_READ)]
    # One reader after another: each decodes its units of the block once.
    of_readers = [[source.read_part(*read, Part(n, 2)) for read in reads] for n in range(2)]
    found = []
    for parts in zip(*of_readers, strict=True):
        each = [spent_s(lambda: merged(parts)) for _ in range(_REPEATS)]  # noqa: B023 -- called here
        found.append((median(s for s, _ in each), len(each[0][1].tokens.values_V)))
    (small_s, small), (large_s, large) = found
    return line_through(small, small_s, large, large_s)


def _looked_at(source: Source, records: int) -> SampleBlock:
    """Read the first records, or fewer if they are long."""
    # A few records first, because 2,048 documents of a million tokens would take long.
    first = source.read(0, min(_SMALL_READ, records))
    each = max(1.0, len(first.tokens.values_V) / first.table.stop)
    found = source.read(0, max(first.table.stop, min(records, int(_MOST_TOKENS / each))))
    return found if len(found.table) else source.read(0, records)


def measure_threads(spec: PlaneSpec) -> float:
    """Return how many cores two reading threads of a process get, if nothing else wants them."""
    # Each thread has a source of its own, because a loader never reads one source in two threads.
    sources = [_opened(spec, name) for name in [*spec.mix.names, *spec.mix.names][:2]]
    for source in sources:
        source.read(0, 1)
    works = [partial(_read_next, source, cycle(_starts(source))) for source in sources]
    # Tries are summed, because a thread that got little of a busy machine says little in a single try.
    tries = [each for _ in range(_REPEATS) for each in _spent_at_once(works)]
    return float(np.clip(cores_of(tries, len(works)), 1.0, cores_here()))


def _starts(source: Source) -> range:
    return range(0, max(1, source.positions_per_epoch - _LARGE_READ), _LARGE_READ)


def _read_next(source: Source, starts: Iterator[int]) -> None:
    start = next(starts)
    source.read(start, start + _LARGE_READ)


def cores_of(tries: Sequence[tuple[float, float]], threads: int) -> float:
    """Return the cores that this number of threads gets in parallel.

    Args:
        tries: For each thread in each try, its processor seconds, and the seconds in which other work did not delay it.
        threads: Number of threads that worked in parallel.
    """
    return threads * sum(own for own, _ in tries) / max(1e-9, sum(free for _, free in tries))


def _spent_at_once(works: Sequence[Callable[[], object]]) -> list[tuple[float, float]]:
    """Work in some threads for a while; return the figures of each for ``cores_of``."""
    until_s = time.perf_counter() + _THREADS_S
    found: list[tuple[float, float]] = []

    def run(work: Callable[[], object]) -> None:
        began_s, own_s, kept_s = time.perf_counter(), time.thread_time(), kept_waiting_s()
        while time.perf_counter() < until_s:
            work()
        own_s, kept_s = time.thread_time() - own_s, kept_waiting_s() - kept_s
        # Other work of the machine is no lock that the threads wait for.
        found.append((own_s, time.perf_counter() - began_s - kept_s))

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def _processor() -> str:
    """Return the model of the processor."""
    # Other systems have no such file, and on ARM it has no such line; then the architecture is returned.
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
