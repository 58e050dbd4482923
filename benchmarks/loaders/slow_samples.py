"""Waits of steps when samples of one of several sources are slow at times, or when its store is slow.

python -m benchmarks.loaders.slow_samples --help
"""

import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from typing_extensions import override

from benchmarks.loaders.baseline_loaders import Tokens, packed, slices_of
from benchmarks.loaders.mixed_sources import MixedSources, build_sources, mix_of
from benchmarks.report import Table, print_table, write_report

__all__ = ["CONTENDERS", "Work", "main", "slowly", "table_of"]

_LENGTH, _ROWS = 4_096, 2
"""Length of a row in tokens, and rows of a step."""
_SLOW = "s001"
"""The slow source: a fifth of the tokens."""
_REQUEST_S, _TIMES = 0.004, 50
"""Time of a request to a store, and the factor by which the slow source's store is slower."""
_BATCHES_AHEAD = 2
"""Batches ahead of each worker of a DataLoader, the default; omniload builds as many as all of them together."""
_WARM_UP_STEPS = 400
_SEED = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Work of the loaders."""

    folder: Path
    corpus: MixedSources
    sample_s: float = 0.0
    """Time of a slow sample."""
    every: int = 80
    """One in ``every`` samples of the slow source is slow."""
    in_stores: bool = False
    """Whether files lie in stores, those of the slow source in a slow store; otherwise on this machine."""

    def url_of(self, name: str) -> str:
        """Return the URL of the files of a source."""
        store = ("far://" if name == _SLOW else "near://") if self.in_stores else ""
        return f"{store}{self.folder}/{name}"


def slowly(tokens: pa.LargeListArray, *, every: int, milliseconds: int) -> pa.LargeListArray:
    """Return documents unchanged, after a delay for each one whose token sum is divisible by ``every``."""
    for document in slices_of(tokens):
        _take_time(document, every, milliseconds / 1e3)
    return tokens


def _take_time(document: Tokens, every: int, seconds: float) -> None:
    if int(document.sum(dtype=np.int64)) % every == 0:
        time.sleep(seconds)


class _Store(LocalFileSystem):
    """Files of this machine as if in a store: each request takes time, and the requests of one call run in parallel."""

    protocol = "near"
    request_s = _REQUEST_S

    @classmethod
    @override
    def _strip_protocol(cls, path: str) -> str:
        return str(path).partition("://")[2] or str(path)

    @override
    def _open(
        self, path: str, mode: str = "rb", block_size: int | None = None, **kwargs: Any
    ) -> Any:
        # Only the requested bytes are fetched: a cache would fetch the whole of a small file.
        return AbstractBufferedFile(self, path, mode, cache_type="none")

    @override
    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any
    ) -> bytes:
        time.sleep(self.request_s)
        return self._bytes_of(path, start, end)

    @override
    def cat_ranges(
        self, paths: Sequence[str], starts: Sequence[int], ends: Sequence[int], **kwargs: Any
    ) -> list[bytes]:
        time.sleep(self.request_s)
        return [self._bytes_of(*each) for each in zip(paths, starts, ends, strict=True)]

    def _bytes_of(self, path: str, start: int | None, end: int | None) -> bytes:
        with Path(self._strip_protocol(path)).open("rb") as file:
            file.seek(start or 0)
            return file.read() if end is None else file.read(end - (start or 0))


class _FarStore(_Store):
    """A store as slow as that of the slow source."""

    protocol = "far"
    request_s = _TIMES * _REQUEST_S


def _register(folder: Path) -> None:
    """Register both stores and ``slowly`` in this process."""
    fsspec.register_implementation("near", _Store, clobber=True)
    fsspec.register_implementation("far", _FarStore, clobber=True)
    about = folder / "lab-1.0.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: lab\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[omniload.transforms]\nslowly = {__name__}:slowly\n")
    sys.path.insert(0, str(folder))


class _MixedRows(IterableDataset[torch.Tensor]):
    """Rows of the mix; every worker reads its own shards of every source."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work

    @override
    def __iter__(self) -> Iterator[torch.Tensor]:
        _register(self._work.folder)  # a worker is spawned, as its parent was
        info, corpus = get_worker_info(), self._work.corpus
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        chosen = random.Random(worker)
        documents = [self._documents(name, worker, workers) for name in corpus.names]
        # Draws are by documents, because their lengths are alike in all sources.
        drawn = (next(chosen.choices(documents, corpus.weights)[0]) for _ in iter(int, 1))
        return packed(drawn, _LENGTH)

    def _documents(self, name: str, worker: int, workers: int) -> Iterator[Tokens]:
        store, path = fsspec.core.url_to_fs(self._work.url_of(name))
        files = sorted(store.glob(f"{path}/*.parquet"))[worker::workers]
        while True:
            for file in files:
                with store.open(file) as opened:
                    shard = pq.ParquetFile(opened)
                    for group in range(shard.num_row_groups):
                        for document in slices_of(shard.read_row_group(group)["tokens"].chunk(0)):
                            if name == _SLOW:
                                _take_time(document, self._work.every, self._work.sample_s)
                            yield document


def _dataloader(work: Work, workers: int, *, in_order: bool) -> Iterator[object]:
    yield from DataLoader(
        _MixedRows(work),
        batch_size=_ROWS,
        num_workers=workers,
        prefetch_factor=_BATCHES_AHEAD,
        in_order=in_order,
    )


def _plane(work: Work, workers: int) -> Iterator[object]:
    from omniload.actors.opening import open_plane  # noqa: PLC0415
    from omniload.actors.plane import PlaneSpec  # noqa: PLC0415
    from omniload.client import Client  # noqa: PLC0415
    from omniload.plan.place_tree import ClientPlaceTree  # noqa: PLC0415

    corpus, ahead = work.corpus, _BATCHES_AHEAD * workers
    sources: dict[str, dict[str, Any]] = {
        name: {"type": "parquet", "path": f"{work.url_of(name)}/*.parquet", "tokens": "tokens"}
        for name in corpus.names
    }
    if work.sample_s:
        options = {"every": work.every, "milliseconds": round(work.sample_s * 1e3)}
        called = {"type": "map", "function": "slowly", "of": "tokens", "options": options}
        sources[_SLOW]["transforms"] = [called]
    mix = mix_of(
        corpus.names,
        corpus.weights,
        rows=_ROWS,
        micro_rows=_ROWS,
        length=_LENGTH,
        version=2,  # type: ignore[arg-type]
        sources=sources,
        runtime={"kind": "local", "prefetch_steps": ahead},
    )
    spec = PlaneSpec(mix=mix, base_dir=work.folder, tree=ClientPlaceTree.of(dp=1))
    with open_plane(spec) as plane, Client(plane.handle(0)) as client:
        yield from client


OURS = "omniload, in order"
CONTENDERS: Mapping[str, Callable[[Work, int], Iterator[object]]] = {
    OURS: _plane,
    "DataLoader, in_order=True": partial(_dataloader, in_order=True),
    "DataLoader, in_order=False": partial(_dataloader, in_order=False),
}


def waits_of(name: str, work: Work, workers: int, step_s: float, steps: int) -> list[float]:
    """Return the wait of each step for its batch; called in a process of its own."""
    _register(work.folder)
    waits_s = []
    with closing(CONTENDERS[name](work, workers)) as batches:  # type: ignore[type-var]
        for _ in range(_WARM_UP_STEPS + steps):
            began_s = time.perf_counter()
            next(batches)
            waits_s.append(time.perf_counter() - began_s)
            time.sleep(step_s)  # an accelerator computes, and the processor is free
    return waits_s[_WARM_UP_STEPS:]


def table_of(caption: str, step_s: float, found: Mapping[str, Sequence[Sequence[float]]]) -> Table:
    """Return steps per second and waits of each loader, over all its turns.

    Args:
        caption: Kind of slowness.
        step_s: Computing time of a step.
        found: Waits of the steps of each turn.
    """
    rows = []
    for name, turns in found.items():
        waits_s = np.concatenate([np.asarray(each) for each in turns])
        p50, p99 = np.percentile(waits_s * 1e3, (50, 99)).tolist()
        rate = 1 / (step_s + float(waits_s.mean()))
        worst = float(waits_s.max()) * 1e3
        waited = float((waits_s > step_s / 2).mean())
        rows.append(
            (name, f"{rate:.1f}", f"{p50:.1f}", f"{p99:.1f}", f"{worst:.0f}", f"{waited:.1%}")
        )
    columns = ("loader", "steps/s", "wait p50, ms", "p99", "longest", "steps that waited")
    return Table(columns=columns, rows=tuple(rows), caption=caption)


READING = """\
Steps have {rows} rows of {length:,} tokens of {sources} sources. One source, with a fifth of the tokens, is slow. A
step computes for {step:g} ms, in which the processor rests, so no loader gives more than {most:g} steps a second. A
step waited if its batch came more than half a step late. Loaders alternate in turns of {steps} steps, each in a
process of its own, after {warm} steps that are not counted, because every loader waits for the first slow samples. A
DataLoader has {workers} workers, each with its own shards of every source. With `in_order=False` it hands out the
first batch that is ready, so no two runs have the same order; the other two loaders keep their order. All have
{ahead} batches ahead. omniload has one loader in threads of the trainer, and reads the slow source further ahead."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--steps", default=500, show_default=True, help="Counted steps of a turn.")
@click.option("--turns", default=3, show_default=True, help="Turns of each loader.")
@click.option("--step-ms", default=10, show_default=True, help="Computing time of a step.")
@click.option("--workers", default=2, show_default=True, help="Workers of a DataLoader.")
@click.option("--report/--no-report", default=True, show_default=True, help="Write the report.")
def main(steps: int, turns: int, step_ms: int, workers: int, report: bool) -> None:
    """Compare loaders if one source of several is slow.

    \b
    Example:
      python -m benchmarks.loaders.slow_samples --steps 200 --turns 1 --no-report
    """  # noqa: D301 -- click's own marker
    corpus = MixedSources(sources=4, shards=8, documents=400, group_rows=100, seed=_SEED)
    spawned = multiprocessing.get_context("spawn")
    tables = []
    with tempfile.TemporaryDirectory() as made:
        build_sources(Path(made), corpus)
        here = Work(folder=Path(made), corpus=corpus)
        slow = Work(folder=Path(made), corpus=corpus, sample_s=0.1)
        far = Work(folder=Path(made), corpus=corpus, in_stores=True)
        for caption, work in (
            ("No source is slow", here),
            (f"One of {slow.every} samples of a source takes 0.1 s", slow),
            (
                f"The store of a source answers {_TIMES} times as slowly as others, in {_TIMES * _REQUEST_S:g} s",
                far,
            ),
        ):
            found: dict[str, list[list[float]]] = {name: [] for name in CONTENDERS}
            for _ in range(turns):
                for name, waits in found.items():
                    with ProcessPoolExecutor(1, mp_context=spawned) as alone:
                        asked = name, work, workers, step_ms / 1e3, steps
                        waits.append(alone.submit(waits_of, *asked).result())
            tables.append(table_of(caption, step_ms / 1e3, found))
            print_table(tables[-1])
    if report:
        path = write_report(
            __file__,
            "slow_samples",
            "Steps over several sources, of which one is slow",
            f"python -m benchmarks.loaders.slow_samples --steps {steps} --turns {turns} --step-ms {step_ms} "
            f"--workers {workers}",
            tables,
            READING.format(
                rows=_ROWS,
                length=_LENGTH,
                sources=corpus.sources,
                step=step_ms,
                most=1e3 / step_ms,
                steps=steps,
                warm=_WARM_UP_STEPS,
                workers=workers,
                ahead=_BATCHES_AHEAD * workers,
            ).replace("\n", " "),
        )
        click.echo(f"wrote {path.name}")


if __name__ == "__main__":
    main()
