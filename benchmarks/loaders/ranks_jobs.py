"""Jobs of several ranks that are measured: ranks on the data plane, and ranks with a torch loader each.

A job is a tree of processes, including those that Ray starts. The imports of a process count as memory, so each
process imports only the modules that its part needs.
"""

import ctypes
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from typing_extensions import override

from benchmarks.loaders.mixed_sources import MixedSources, mix_of

__all__ = ["DATALOADER", "JOBS", "OURS", "Job", "Pss", "RunningJob", "build_corpus", "running"]

_ROW_TOKENS = 4_096
_PR_SET_CHILD_SUBREAPER = 36
_REAPER_S = 15.0
_WARM_UP_S = 600.0
"""Longest time of a job until every source was read."""
_RANKS = ("bench-rank", "pt_data_worker")
"""Names of the processes of ranks; workers of torch's loader change their names."""
_DISTINCT = 4
"""Files with distinct tokens; all sources link to them, because the content does not change the cost of reading."""


class EvenSources(MixedSources):
    """Sources of equal weight, so each one is soon read."""

    @property
    @override
    def weights(self) -> tuple[float, ...]:
        return (1 / self.sources,) * self.sources


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job that reads a corpus."""

    folder: Path
    sources: int
    ranks: int
    workers: int = 2
    """Workers of each rank that has its own ``DataLoader``."""
    rows: int = 2
    """Rows of 4,096 tokens of a rank and step."""
    has_torch: bool = True
    """Whether our ranks load torch, as a trainer does: without it, many ranks fit on a small machine."""

    @property
    def corpus(self) -> MixedSources:
        """The sources; readers take 500 documents at a time."""
        return EvenSources(sources=self.sources)

    @property
    def documents(self) -> int:
        """Documents after which a reader has most likely read from every source."""
        return int(self.sources * (np.log(self.sources) + 4))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pss:
    """Proportional set sizes, in bytes: a shared page counts once over all processes."""

    ranks: int
    """Size of the ranks' own processes, and of the workers of their loaders."""
    others: int
    """Size of all others: Ray's processes, and the roles of the data plane."""
    by_name: Mapping[str, int]
    """Sizes by the title of the process; for an actor, its class."""

    @property
    def total(self) -> int:
        """Size of all processes."""
        return self.ranks + self.others


def build_corpus(folder: Path, *, sources: int, group_bytes: int, groups: int = 4) -> None:
    """Write sources of two files with ``groups`` row groups of about ``group_bytes`` of token ids each.

    Lengths are log-normal, median 400, sigma 1.3, cut at 4,096 tokens.
    """
    originals = []
    for number in range(_DISTINCT):
        rng = np.random.default_rng(number)
        path = folder / f"original-{number}.parquet"
        originals.append(path)
        schema = pa.schema({"tokens": pa.list_(pa.int32())})
        with pq.ParquetWriter(path, schema, compression="zstd") as writer:
            for _ in range(groups):
                lengths = _lengths(rng, group_bytes // 4)
                tokens = (32_000 ** rng.random(int(lengths.sum()), np.float32)).astype(np.int32)
                offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
                column = pa.ListArray.from_arrays(pa.array(offsets), pa.array(tokens))
                writer.write_table(pa.table({"tokens": column}), row_group_size=len(lengths))
    for number, name in enumerate(MixedSources(sources=sources).names):
        (folder / name).mkdir()
        for shard in range(2):
            (folder / name / f"{shard:05}.parquet").hardlink_to(
                originals[(number + shard) % _DISTINCT]
            )


def _lengths(rng: np.random.Generator, tokens: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    lengths = np.clip(rng.lognormal(np.log(400), 1.3, tokens // 300), 1, 4_096).astype(np.int64)
    return lengths[: int(np.searchsorted(np.cumsum(lengths), tokens)) + 1]


@dataclass(frozen=True, slots=True)
class _Told:
    """Reports of the progress of ranks."""

    warm: Connection
    """Receives the number of each rank that has most likely read from every source."""
    tokens: Any
    """Tokens that each rank has received so far; shared memory."""


def _plane(job: Job, told: _Told) -> None:
    """Open a data plane through Ray, and its ranks; the process that opens it is no rank."""
    from omniload.actors.plane import PlaneSpec  # noqa: PLC0415
    from omniload.actors.ray.plane import RayPlane  # noqa: PLC0415
    from omniload.plan.place_tree import ClientPlaceTree  # noqa: PLC0415

    mix = mix_of(
        job.corpus.names,
        job.corpus.weights,
        rows=job.rows * job.ranks,
        micro_rows=job.rows,
        length=_ROW_TOKENS,
    )
    spec = PlaneSpec(mix=mix, base_dir=job.folder, tree=ClientPlaceTree.of(dp=job.ranks))
    steps = -(-job.documents * 400 // (job.rows * _ROW_TOKENS * job.ranks)) + 2 * mix.steps_ahead
    with RayPlane(spec) as plane:
        address = plane.address.model_dump_json()
        _run([partial(_plane_rank, address, rank, job, steps, told) for rank in range(job.ranks)])


def _plane_rank(address: str, rank: int, job: Job, steps: int, told: _Told) -> None:
    if job.has_torch:
        import torch  # noqa: F401, PLC0415 -- a trainer has it

    from omniload.actors.address import PlaneAddress  # noqa: PLC0415
    from omniload.actors.ray.rank.joining import handle_in  # noqa: PLC0415
    from omniload.batch.microbatch import Microbatch  # noqa: PLC0415
    from omniload.client import Client  # noqa: PLC0415

    _say_rank()
    with Client(handle_in(PlaneAddress.model_validate_json(address), rank)) as client:
        for number, batch in enumerate(client):
            for rows in batch.microbatches:
                assert isinstance(rows, Microbatch), "no cp peers share them"
                _ = rows.labels_RT, rows.positions_RT  # made on the first access, as in a trainer
            its = sum(batch.tokens_by_source.values()) // job.ranks  # without padding
            told.tokens[rank] += its
            if number == steps:
                told.warm.send(rank)


def _loaders(kind: Literal["lists", "arrays", "nodes"], job: Job, told: _Told) -> None:
    _run([partial(_loader_rank, kind, job, rank, told) for rank in range(job.ranks)])


def _loader_rank(
    kind: Literal["lists", "arrays", "nodes"], job: Job, rank: int, told: _Told
) -> None:
    from benchmarks.loaders.baseline_loaders import (  # noqa: PLC0415
        Rows,
        dataloader,
        torchdata_nodes,
    )

    _say_rank()
    work = Rows(folder=job.folder, corpus=job.corpus, length=_ROW_TOKENS, rows=job.rows)
    # Each worker reads every source by itself.
    workers = 1 if kind == "nodes" else job.workers
    needed = job.documents * workers * 600 // (job.rows * _ROW_TOKENS)
    stream = torchdata_nodes(work) if kind == "nodes" else dataloader(work, kind, workers)
    for number, tokens in enumerate(stream):
        told.tokens[rank] += tokens
        if number == needed:
            told.warm.send(rank)


def _run(ranks: Sequence[Callable[[], None]]) -> None:
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=rank) for rank in ranks]
    for process in processes:
        process.start()
    ended = wait([process.sentinel for process in processes])
    raise SystemExit(f"a rank has ended: {ended}")


def _say_rank() -> None:
    # Workers of a loader are forked, so they have the same name.
    Path("/proc/self/comm").write_text("bench-rank")


OURS, DATALOADER = "omniload, Ray", "DataLoader, 2 workers, numpy views"
JOBS: Mapping[str, Callable[[Job, _Told], None]] = {
    OURS: _plane,
    "DataLoader, 2 workers, lists": partial(_loaders, "lists"),
    DATALOADER: partial(_loaders, "arrays"),
    "torchdata.nodes, threads, numpy views": partial(_loaders, "nodes"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningJob:
    """A job whose ranks are warm and continue to run."""

    root: psutil.Process
    tokens_by_rank: Any
    """Tokens that each rank has received so far; shared memory."""

    @property
    def tokens(self) -> int:
        """Tokens that all ranks have received so far."""
        return sum(self.tokens_by_rank)

    def cpu_s(self) -> float:
        """Return the CPU time of all processes so far, including those that have ended."""
        used_s = 0.0
        for process in self.processes():
            try:
                used_s += sum(process.cpu_times()[:4])
            except psutil.Error:
                continue  # it has just ended
        return used_s

    def pss(self) -> Pss:
        """Measure the memory of its processes."""
        by_name: Counter[str] = Counter()
        for process in self.processes():
            try:
                by_name[_title_of(process)] += process.memory_full_info().pss
            except psutil.Error:
                continue
        ranks = sum(size for name, size in by_name.items() if name.startswith(_RANKS))
        return Pss(ranks=ranks, others=by_name.total() - ranks, by_name=by_name)

    def processes(self) -> list[psutil.Process]:
        """Return the present processes."""
        return [self.root, *self.root.children(recursive=True)]


@contextmanager
def running(name: str, job: Job) -> Iterator[RunningJob]:
    """Run a job; yield it once every rank has read from every source."""
    _adopt()
    spawn = multiprocessing.get_context("spawn")
    received, warm = spawn.Pipe(duplex=False)
    told = _Told(warm, spawn.Array("q", job.ranks, lock=False))
    process = spawn.Process(target=_lead, args=(name, job, told))
    process.start()
    ours = RunningJob(root=psutil.Process(process.pid), tokens_by_rank=told.tokens)
    try:
        for _ in range(job.ranks):
            if not received.poll(_WARM_UP_S):
                raise TimeoutError(f"{name}: a rank was not warm within {_WARM_UP_S} s")
            received.recv()
        yield ours
    finally:
        _end(ours)
        process.join()


def _lead(name: str, job: Job, told: _Told) -> None:
    _adopt()
    JOBS[name](job, told)


def _adopt() -> None:
    # A process that loses its parent stays in the tree, as some of Ray do. Its end is reported to this process.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _end(job: RunningJob) -> None:
    """Kill the ranks and the process that opened the plane, and give its reaper time to remove the others."""
    processes = job.processes()
    for process in processes:
        if process == job.root or _name_of(process).startswith(_RANKS):
            _kill(process)
    _, left = psutil.wait_procs(processes, timeout=_REAPER_S)
    for process in left:
        _kill(process)


def _name_of(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return ""


def _title_of(process: psutil.Process) -> str:
    """Return the name of a process; for an actor of Ray its class, which is longer than names may be."""
    name = process.name()
    return (process.cmdline() or [name])[0].split()[0] if name.startswith("ray::") else name


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return
