"""The short profile: real sources, machines and processes of this machine, each measured alone.

Everything is processor time, so that other work on the machine counts for little; what a message waits
on its way is all that is measured by the clock.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from omniload.actors.heartbeats import Activity
from omniload.actors.plane import PlaneSpec
from omniload.actors.planning import make_planner
from omniload.actors.roles.loader import LoaderShell
from omniload.base.concurrency.threads import DaemonPool
from omniload.batch.microbatch import Batch
from omniload.machine.data_constructor import (
    BuildSteps,
    DataConstructor,
    FetchSlices,
    SlicesFetched,
)
from omniload.machine.messages import (
    EndOfData,
    PlannerEvent,
    PublishPlans,
    ReadAhead,
    ReleaseSamples,
    Started,
    StepTaken,
)
from omniload.mix.columns import ColumnRanges
from omniload.plan.place_tree import ClientPlaceTree
from omniload.plan.records import StepPlan
from omniload.simulation.hollow import size_of_batch
from omniload.simulation.profile import (
    BuildCosts,
    MessageCosts,
    SourceCosts,
)
from omniload.simulation.scale import with_tokens
from omniload.source.formats.opening import open_format
from omniload.source.index import IndexCache
from omniload.source.parts.blocks import SampleBlock
from omniload.source.source import Source, open_source

__all__ = ["measure_builds", "measure_messages", "measure_sources", "measure_threads"]


_SMALL_READ, _LARGE_READ = 16, 256
"""Records of the two sizes of reads."""
_REPEATS = 5
_MOST_RECORDS, _MOST_TOKENS = 2_048, 1 << 20
"""Of a source whose samples are looked at."""
_WINDOWS, _WARM_WINDOWS = 8, 2
_TOKENS_BUILT = 16 << 20
"""Tokens that are read to measure building, about."""
_CALLS, _SAMPLED = 200, 64
_THREADS_S = 0.15


def _spent_s(call: Callable[[], Any]) -> tuple[float, Any]:
    began_s = time.process_time()
    found = call()
    return time.process_time() - began_s, found


def measure_sources(spec: PlaneSpec, advance: Callable[[int], object]) -> dict[str, SourceCosts]:
    """Read a little of every source; ``advance`` is called as each is done.

    Raises:
        OmniloadError: As for ``open_source``.
    """
    found = {}
    for name in spec.mix.names:
        found[name] = _measure_source(spec, name)
        advance(1)
    return found


def _opened(spec: PlaneSpec, name: str) -> Source:
    mix = spec.mix
    return open_source(
        name,
        mix.sources[name].using(mix.batch.columns_used),
        seed=mix.seed,
        tokenizer=mix.tokenizer,
        base_dir=spec.base_dir,
        cache_dir=spec.cache_dir,
        row_length=mix.pack.length,
    )


def _block_positions(spec: PlaneSpec, name: str) -> int:
    """Return the records of a block of a source, on average."""
    config = spec.mix.sources[name]
    cache = IndexCache(folder=spec.cache_dir, source=name) if spec.cache_dir else None
    rows_U = open_format(name, config, base_dir=spec.base_dir, cache=cache).format.units().rows_U
    units = config.shuffle.block_units if config.shuffle.method == "block" else 1
    filled_U = rows_U[rows_U > 0]
    return max(1, round(float(filled_U.mean()) * min(units, len(filled_U))))


def _measure_source(spec: PlaneSpec, name: str) -> SourceCosts:
    source, block = _opened(spec, name), _block_positions(spec, name)
    epoch = source.positions_per_epoch
    if block < epoch:  # what is loaded once is paid for by the block after this one
        source.read(block, min(block + _SMALL_READ, epoch))
    decode_s, _ = _spent_s(lambda: source.read(0, min(_SMALL_READ, epoch)))
    small_s, small = _reads(source, _SMALL_READ, min(block, epoch))
    large_s, large = _reads(source, _LARGE_READ, min(block, epoch))
    token_s = max(0.0, large_s - small_s) / max(1, large - small)
    if large <= small:
        token_s = large_s / max(1, large)
    seen = _looked_at(source, min(block, epoch, _MOST_RECORDS))
    table = seen.table
    counts = np.bincount(table.positions_N, minlength=table.stop)
    tokens = max(1, len(seen.tokens.values_V))
    size = sum(column.values_V.nbytes for column in (seen.tokens, *seen.others.values()))
    return SourceCosts(
        read_s=max(0.0, small_s - small * token_s),
        token_s=token_s,
        block_s=max(0.0, decode_s - small_s),
        block_positions=block,
        block_bytes=round(size / table.stop * block),
        bytes_per_token=max(4.0, size / tokens),
        positions_per_epoch=epoch,
        counts=counts.tolist(),
        lengths=table.lengths_N.tolist(),
    )


def _reads(source: Source, records: int, end: int) -> tuple[float, int]:
    """Return the seconds and tokens of a read of so many records within the block at hand."""
    found = []
    for number in range(_REPEATS):
        start = number * records % max(1, end - records)
        seconds, read = _spent_s(lambda: source.read(start, min(start + records, end)))  # noqa: B023 -- called here
        found.append((seconds, len(read.tokens.values_V)))
    return median(s for s, _ in found), round(median(tokens for _, tokens in found))


def _looked_at(source: Source, records: int) -> SampleBlock:
    """Read the first records, fewer where they are long."""
    first = source.read(0, min(_SMALL_READ, records))
    each = max(1.0, len(first.tokens.values_V) / first.table.stop)
    found = source.read(0, max(first.table.stop, min(records, int(_MOST_TOKENS / each))))
    return found if len(found.table) else source.read(0, records)


def measure_threads(spec: PlaneSpec) -> float:
    """Return how many cores two threads of a process get that read; the best of some tries."""
    sources = [_opened(spec, name) for name in [*spec.mix.names, *spec.mix.names][:2]]
    for source in sources:
        source.read(0, 1)
    got = max(_cores_of_two(sources) for _ in range(_REPEATS))
    return float(np.clip(got, 1.0, len(os.sched_getaffinity(0))))


def _cores_of_two(sources: Sequence[Source]) -> float:
    until_s = time.perf_counter() + _THREADS_S

    def read(source: Source) -> None:
        end = max(1, source.positions_per_epoch - _LARGE_READ)
        at = 0
        while time.perf_counter() < until_s:
            source.read(at, at + _LARGE_READ)
            at = (at + _LARGE_READ) % end

    began_s, spent_s = time.perf_counter(), time.process_time()
    threads = [threading.Thread(target=read, args=(source,)) for source in sources]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return (time.process_time() - spent_s) / (time.perf_counter() - began_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """What building a window took."""

    slices_s: float
    rows_s: float
    requests: int
    tokens: int


def measure_builds(
    spec: PlaneSpec, runtime: str, *, ranks: int, tokens: int
) -> tuple[BuildCosts, tuple[Batch, ...]]:
    """Build windows of steps as one constructor does.

    Args:
        spec: The mix as the profile has it.
        runtime: Within a process samples are copied once, across processes twice.
        ranks: Ranks of the constructor.
        tokens: Of a step of all of them.

    Returns:
        What it took, and batches of one rank.
    """
    rows = max(4, ranks, tokens // spec.mix.pack.length)
    large, batches = _windows_of(spec, runtime, ranks, rows)
    small, _ = _windows_of(spec, runtime, max(1, ranks // 4), max(1, ranks // 4, rows // 4))
    rows_s, rows_token_s = _line(small.tokens, small.rows_s, large.tokens, large.rows_s)
    fixed_s, slices_token_s = _line(small.tokens, small.slices_s, large.tokens, large.slices_s)
    return (
        BuildCosts(
            slices_request_s=fixed_s / large.requests,
            slices_token_s=slices_token_s,
            rows_s=rows_s,
            rows_token_s=rows_token_s,
        ),
        batches,
    )


def _line(x0: float, y0: float, x1: float, y1: float) -> tuple[float, float]:
    """Return offset and slope of the line through two points, neither below 0."""
    slope = max(0.0, (y1 - y0) / (x1 - x0)) if x1 > x0 else y1 / max(1.0, x1)
    offset = y0 - slope * x0
    return (offset, slope) if offset >= 0 else (0.0, y1 / max(1.0, x1))


def _windows_of(
    spec: PlaneSpec, runtime: str, ranks: int, rows: int
) -> tuple[_Window, tuple[Batch, ...]]:
    """Plan, read and build some windows for real; return the medians, and the batches of the last."""
    ahead = spec.mix.steps_ahead
    mix = with_tokens(spec.mix, rows * spec.mix.pack.length)
    held = mix.runtime.model_copy(update={"prefetch_steps": ahead})
    mix = mix.model_copy(update={"runtime": held})
    per_window = mix.batch.tokens * mix.steps_at_once
    windows = int(np.clip(_TOKENS_BUILT // per_window, 2, _WINDOWS)) + _WARM_WINDOWS
    spec = replace(spec, mix=mix, tree=ClientPlaceTree.of(dp=ranks), num_steps=None)
    found: list[_Window] = []
    batches: tuple[Batch, ...] = ()
    for plans, loader in _planned(spec):
        window, batches = _built(spec, plans, loader, runtime)
        found.append(window)
        if len(found) == windows:
            break
    measured = found[_WARM_WINDOWS:] or found[-1:]
    return (
        _Window(
            slices_s=median(each.slices_s for each in measured),
            rows_s=median(each.rows_s for each in measured),
            requests=round(median(each.requests for each in measured)),
            tokens=round(median(each.tokens for each in measured)),
        ),
        batches,
    )


def _planned(spec: PlaneSpec) -> Iterator[tuple[Sequence[StepPlan], LoaderShell]]:
    """Plan window after window over a loader of all sources."""
    mix = spec.mix
    loader = LoaderShell(
        mix,
        range(len(mix.names)),
        base_dir=spec.base_dir,
        cache_dir=spec.cache_dir,
        activity=Activity("loader-0"),
    )
    try:
        facts = loader.facts()
        planner = make_planner(spec, [facts[s] for s in range(len(mix.names))])
        events: deque[PlannerEvent] = deque([Started()])
        while events:
            for command in planner.handle(events.popleft()):
                match command:
                    case ReadAhead():
                        events.append(loader.read_ahead(command))
                    case PublishPlans(plans=plans):
                        yield plans, loader
                        taken = plans[-1].step
                        ranks = range(spec.tree.size_of("dp"))
                        events.extend(StepTaken(step=taken, dp_rank=rank) for rank in ranks)
                    case ReleaseSamples():
                        loader.release(command)
                    case EndOfData():
                        return
                    case _:
                        pass
    finally:
        loader.close()


def _built(
    spec: PlaneSpec, plans: Sequence[StepPlan], loader: LoaderShell, runtime: str
) -> tuple[_Window, tuple[Batch, ...]]:
    machine = DataConstructor.of(spec.mix, range(spec.tree.size_of("dp")))
    begun_s, (fetch,) = _spent_s(lambda: machine.handle(BuildSteps(plans=plans)))
    assert isinstance(fetch, FetchSlices), "the steps are new"
    if runtime == "ray":
        slices_s, answer = _spent_s(lambda: loader.slices(fetch.requests))
        joined_s, slices = _spent_s(lambda: ColumnRanges.of(answer))
    else:
        joined_s = 0.0
        slices_s, slices = _spent_s(lambda: loader.ranges(fetch.requests))
    fetched = SlicesFetched(steps=fetch.steps, slices=slices)
    built_s, _ = _spent_s(lambda: machine.handle(fetched))
    return (
        _Window(
            slices_s=slices_s,
            rows_s=begun_s + joined_s + built_s,
            requests=len(fetch.requests),
            tokens=int(slices.tokens.lengths_N.sum()),
        ),
        tuple(machine.batch_of(plan.step, 0) for plan in plans),
    )


def measure_messages(runtime: str, batches: Sequence[Batch]) -> MessageCosts:
    """Measure messages between roles: threads of this process, or processes of a Ray of our own.

    Raises:
        ConfigError: Ray is asked for and not installed.
        UnavailableError: Ray did not start.
    """
    if runtime == "local":
        return _between_threads()
    from omniload.actors.ray.scaling.probe import probe  # noqa: PLC0415 -- an extra, absent for local users

    size = sum(map(size_of_batch, batches))
    found = probe([None, tuple(batches)], _CALLS)
    small, large = found.calls
    # There and back are two messages with two ends each.
    end_s = (small.asking_s + small.answering_s) / 4
    waits_s = [each / 2 for each in small.waits_s]
    return MessageCosts(
        latencies_s=tuple(np.quantile(waits_s, np.linspace(0, 1, _SAMPLED)).tolist()),
        end_s=end_s,
        node_s=small.others_s / 2,
        send_byte_s=max(0.0, large.answering_s - small.answering_s) / size,
        receive_byte_s=max(0.0, large.asking_s - small.asking_s) / size,
        node_byte_s=max(0.0, large.others_s - small.others_s) / size,
        process_bytes=found.process_bytes,
        node_bytes=found.node_bytes,
    )


def _between_threads() -> MessageCosts:
    pool = DaemonPool(1, "omniload-probe")
    try:
        pool.submit(_nothing).result()
        rounds_s = []
        began_s = time.process_time()
        for _ in range(_CALLS):
            asked_s = time.perf_counter()
            pool.submit(_nothing).result()
            rounds_s.append(time.perf_counter() - asked_s)
        spent_s = (time.process_time() - began_s) / _CALLS
    finally:
        pool.close(1.0)
    waits_s = sorted(max(0.0, (each - spent_s) / 2) for each in rounds_s)
    return MessageCosts(
        latencies_s=tuple(np.quantile(waits_s, np.linspace(0, 1, _SAMPLED)).tolist()),
        end_s=spent_s / 4,
        node_s=0.0,
        send_byte_s=0.0,
        receive_byte_s=0.0,
        node_byte_s=0.0,
        process_bytes=0,
        node_bytes=0,
    )


def _nothing() -> None:
    """Do nothing, in another thread."""
