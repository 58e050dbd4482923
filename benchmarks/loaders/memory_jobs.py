"""Jobs whose memory is measured: ranks on the data plane, and ranks with a torch ``DataLoader`` each.

Every process of a job carries ``JOB_ENV``, so that those which Ray starts are found as well. What a process
imports counts as memory, so each imports what its part needs.
"""

import multiprocessing
import os
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from typing_extensions import override

from benchmarks.loaders.mixed_sources import MixedSources, mix_of

__all__ = ["JOBS", "Job", "Pss", "build_corpus", "pss_of", "running"]

JOB_ENV = "OMNILOAD_BENCHMARK_JOB"
_ROW_TOKENS = 4_096
_WARM_UP_S = 600.0
"""Longest that a job may take until every source was read."""
_RANKS = ("bench-rank", "pt_data_worker")
"""Names of the processes of ranks; workers of torch's loader change theirs."""
_DISTINCT = 4
"""Files that hold tokens of their own; sources link to them: what they hold does not change what reading costs."""


class EvenSources(MixedSources):
    """Sources of equal weight: each is soon read from."""

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
    """Of each rank, where it has a ``DataLoader`` of its own."""
    rows: int = 2
    """Rows of 4,096 tokens of a rank and step."""

    @property
    def corpus(self) -> MixedSources:
        """The sources; readers take 500 documents at a time."""
        return EvenSources(sources=self.sources)

    @property
    def documents(self) -> int:
        """Documents that a reader draws until it has most likely read from every source."""
        return int(self.sources * (np.log(self.sources) + 4))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pss:
    """Proportional set sizes, in bytes: what is shared counts once over all processes."""

    ranks: int
    """Of the ranks' own processes, and of the workers of their loaders."""
    others: int
    """Of all others: Ray's, and the roles of the data plane."""
    by_name: Mapping[str, int]
    """By the name of the process."""

    @property
    def total(self) -> int:
        """Of all processes."""
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


def _plane(job: Job, warm: Connection) -> None:
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
        spawn = multiprocessing.get_context("spawn")
        ranks = [
            spawn.Process(
                target=_plane_rank,
                args=(plane.address.model_dump_json(), rank, steps, warm),
                name=f"rank-{rank}",
                daemon=True,
            )
            for rank in range(job.ranks)
        ]
        _run(ranks)


def _plane_rank(address: str, rank: int, steps: int, warm: Connection) -> None:
    import torch  # noqa: F401, PLC0415 -- a trainer has it

    from omniload.actors.address import PlaneAddress  # noqa: PLC0415
    from omniload.actors.ray.joining import handle_in  # noqa: PLC0415
    from omniload.client import Client  # noqa: PLC0415

    _say_rank()
    with Client(handle_in(PlaneAddress.model_validate_json(address), rank)) as client:
        for number, _ in enumerate(client):
            if number == steps:
                warm.send(rank)


def _loaders(job: Job, warm: Connection) -> None:
    spawn = multiprocessing.get_context("spawn")
    _run(
        [
            spawn.Process(target=_loader_rank, args=(job, rank, warm), name=f"rank-{rank}")
            for rank in range(job.ranks)
        ]
    )


def _loader_rank(job: Job, rank: int, warm: Connection) -> None:
    from benchmarks.loaders.baseline_loaders import Rows, dataloader  # noqa: PLC0415

    _say_rank()
    work = Rows(folder=job.folder, corpus=job.corpus, length=_ROW_TOKENS, rows=job.rows)
    needed = job.documents * job.workers * 600 // (job.rows * _ROW_TOKENS)
    for number, _ in enumerate(dataloader(work, "arrays", job.workers)):
        if number == needed:
            warm.send(rank)


def _run(ranks: Sequence[multiprocessing.process.BaseProcess]) -> None:
    for rank in ranks:
        rank.start()
    ended = wait([rank.sentinel for rank in ranks])
    raise SystemExit(f"a rank has ended: {ended}")


def _say_rank() -> None:
    # Workers of a loader are forked, and bear the same name.
    Path("/proc/self/comm").write_text("bench-rank")


JOBS: Mapping[str, Callable[[Job, Connection], None]] = {
    "omniload": _plane,
    "DataLoader": _loaders,
}


@contextmanager
def running(name: str, job: Job) -> Iterator[str]:
    """Run a job; give the mark of its processes once every rank has read from every source."""
    mark = uuid.uuid4().hex
    spawn = multiprocessing.get_context("spawn")
    told, warm = spawn.Pipe(duplex=False)
    os.environ[JOB_ENV] = mark
    process = spawn.Process(target=JOBS[name], args=(job, warm))
    try:
        process.start()
        for _ in range(job.ranks):
            if not told.poll(_WARM_UP_S):
                raise TimeoutError(f"{name}: a rank was not warm within {_WARM_UP_S} s")
            told.recv()
        yield mark
    finally:
        del os.environ[JOB_ENV]
        for pid in [*_pids_of(mark), process.pid]:
            _kill(pid)
        process.join()


def pss_of(mark: str) -> Pss:
    """Measure the processes of a job."""
    by_name: Counter[str] = Counter()
    for pid in _pids_of(mark):
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            name = Path(f"/proc/{pid}/comm").read_text().strip()
        except OSError:
            continue  # it has just ended
        kib = next(int(line.split()[1]) for line in rollup.splitlines() if line[:4] == "Pss:")
        by_name[name] += kib * 1024
    ranks = sum(size for name, size in by_name.items() if name.startswith(_RANKS))
    return Pss(ranks=ranks, others=by_name.total() - ranks, by_name=by_name)


def _pids_of(mark: str) -> list[int]:
    wanted = f"{JOB_ENV}={mark}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if wanted in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue  # another user's, or it has just ended
    return found


def _kill(pid: int | None) -> None:
    if pid is not None:
        try:
            os.kill(pid, 9)
        except ProcessLookupError:
            return
