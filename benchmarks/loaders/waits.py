"""Time of a training loop's steps with the loader in its process, in workers, and on a data plane through Ray.

python -m benchmarks.loaders.waits --help
"""

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import torch

from benchmarks.loaders.baseline_loaders import Rows, dataloader_rows, torchdata_nodes_rows
from benchmarks.loaders.mixed_sources import MixedSources, build_sources, mix_of
from benchmarks.report import Table, print_table, write_report

__all__ = ["CONTENDERS", "IN_PROCESS", "NOTHING", "Steps", "main", "table_of"]

_ROW_TOKENS = 4_096
_WARM_UP_STEPS = 4
_TURN_S = 1.0
"""Approximate training time of a loader before the next one takes over."""
_LEAST_STEPS = 10
"""Least number of steps of a turn."""
_WIDTH = 256
_CALIBRATION_TURNS = 30

Batches = Generator["tuple[np.ndarray, np.ndarray]", None, None]
"""Tokens and labels of a step's rows, ``[R, T]`` each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Seconds of each step, in order."""

    waits_s: Sequence[float]
    """Time from the request of a batch until its tokens and labels are there."""
    wholes_s: Sequence[float]
    """Times of the wait and the computing together."""


def _nothing(work: Rows) -> Batches:
    rows = np.zeros((work.rows, work.length), np.int32)
    while True:
        yield rows, rows


def _tensors(rows: Iterator[torch.Tensor]) -> Batches:
    for tokens in rows:
        yield tokens.numpy(), tokens.numpy()  # a model of such a loader shifts the labels itself


def _plane(kind: str, work: Rows) -> Batches:
    from omniload.actors.opening import open_plane  # noqa: PLC0415
    from omniload.actors.plane import PlaneSpec  # noqa: PLC0415
    from omniload.batch.microbatch import Microbatch  # noqa: PLC0415
    from omniload.client import Client  # noqa: PLC0415
    from omniload.plan.place_tree import ClientPlaceTree  # noqa: PLC0415

    mix = mix_of(
        work.corpus.names,
        work.corpus.weights,
        rows=work.rows,
        micro_rows=work.rows,
        length=work.length,
        runtime={"kind": kind},
    )
    spec = PlaneSpec(mix=mix, base_dir=work.folder, tree=ClientPlaceTree.of(dp=1))
    with open_plane(spec) as plane, Client(plane.handle(0)) as client:
        for batch in client:
            (rows,) = batch.microbatches
            assert isinstance(rows, Microbatch), "no cp peers share them"
            yield rows.tokens_RT, rows.labels_RT


NOTHING, IN_PROCESS = "the same rows again", "omniload, in the process"
CONTENDERS: Mapping[str, Callable[[Rows], Batches]] = {
    NOTHING: _nothing,
    IN_PROCESS: lambda work: _plane("local", work),
    "DataLoader, in the process, numpy views": lambda work: _tensors(
        dataloader_rows(work, "arrays", 0)
    ),
    "torchdata.nodes, threads of the process, numpy views": lambda work: _tensors(
        torchdata_nodes_rows(work)
    ),
    "DataLoader, 2 workers, numpy views": lambda work: _tensors(dataloader_rows(work, "arrays", 2)),
    "omniload, Ray": lambda work: _plane("ray", work),
}


@contextmanager
def _a_core_of_its_own() -> Iterator[Callable[[], None]]:
    """Keep all processes that start inside off one core; yield a function that moves the calling thread to it."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise click.ClickException("one core is no place for a trainer and its loader; take two")
    os.sched_setaffinity(0, cores[1:])
    try:
        yield lambda: os.sched_setaffinity(0, cores[:1])
    finally:
        os.sched_setaffinity(0, cores)


class _Trainer:
    """A small model whose step is repeated until it takes the requested time."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self._table = torch.nn.Embedding(32_000, _WIDTH)
        self._layers = torch.nn.Sequential(
            torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.GELU(), torch.nn.Linear(_WIDTH, _WIDTH)
        )
        self._optimizer = torch.optim.SGD(self._layers.parameters(), lr=1e-4)

    def train(self, tokens_RT: np.ndarray, labels_RT: np.ndarray, turns: int) -> None:
        """Go ``turns`` times over the first tokens, forward and backward, and take a step."""
        tokens = torch.from_numpy(tokens_RT[0, :64].astype(np.int64))
        labels = torch.from_numpy(labels_RT[0, :64].clip(min=0).astype(np.int64))
        with torch.no_grad():
            inputs, wanted = self._table(tokens), self._table(labels)
        for _ in range(turns):
            (self._layers(inputs) - wanted).square().mean().backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()

    def turn_s(self) -> float:
        """Return the seconds of one pass, the best of a few tries."""
        rows = np.zeros((1, 64), np.int32)
        self.train(rows, rows, _CALIBRATION_TURNS)
        tries = []
        for _ in range(5):
            began_s = time.perf_counter()
            self.train(rows, rows, _CALIBRATION_TURNS)
            tries.append((time.perf_counter() - began_s) / _CALIBRATION_TURNS)
        return min(tries)


def turns_of(steps_ms: Sequence[int]) -> list[int]:
    """Return the number of turns of the model for steps of these milliseconds; called in its own process."""
    with _a_core_of_its_own() as take_core:
        take_core()
        turn_s = _Trainer().turn_s()
    return [max(1, round(step / 1e3 / turn_s)) for step in steps_ms]


class _Running:
    """A contender that stays open in its own process: it trains for a while, and waits for its next turn."""

    def __init__(self, name: str, work: Rows) -> None:
        with _a_core_of_its_own() as take_core:
            self._batches = CONTENDERS[name](work)
            next(self._batches)  # all threads and processes of the loader have started
        take_core()
        self._trainer = _Trainer()

    def steps(self, turns: int, count: int) -> Steps:
        """Train ``count`` steps after a few that are not measured."""
        waits_s, wholes_s = [], []
        for _ in range(_WARM_UP_STEPS + count):
            began_s = time.perf_counter()
            tokens_RT, labels_RT = next(self._batches)
            waits_s.append(time.perf_counter() - began_s)
            self._trainer.train(tokens_RT, labels_RT, turns)
            wholes_s.append(time.perf_counter() - began_s)
        return Steps(waits_s=waits_s[_WARM_UP_STEPS:], wholes_s=wholes_s[_WARM_UP_STEPS:])

    def close(self) -> None:
        """Close the loader."""
        self._batches.close()


_running: list[_Running] = []
"""The one contender of this process."""


def start(name: str, work: Rows) -> None:
    """Open a contender; called in a process of its own."""
    _running.append(_Running(name, work))


def steps_of(turns: int, count: int) -> Steps:
    """Train with the contender of this process."""
    return _running[0].steps(turns, count)


def stop() -> None:
    """Close the contender of this process."""
    _running.pop().close()


def table_of(step_ms: int, found: Mapping[str, Sequence[Steps]]) -> Table:
    """Return medians and 99th percentiles over all runs of each, and the increase of steps over those in the process.

    Args:
        step_ms: Intended computing time of a step.
        found: The runs of each contender.
    """
    wholes = {
        name: _percentiles([s for run in runs for s in run.wholes_s])
        for name, runs in found.items()
    }
    waits = {
        name: _percentiles([s for run in runs for s in run.waits_s]) for name, runs in found.items()
    }
    ours = wholes[IN_PROCESS]
    steps = sum(len(run.wholes_s) for run in found[IN_PROCESS])
    return Table(
        columns=(
            "loader",
            "wait p50, ms",
            "p99",
            "step p50, ms",
            "p99",
            "over the process p50",
            "p99",
        ),
        rows=tuple(
            (
                name,
                *(f"{each:.2f}" for each in waits[name]),
                *(f"{each:.1f}" for each in wholes[name]),
                *(f"{each / own - 1:+.1%}" for each, own in zip(wholes[name], ours, strict=True)),
            )
            for name in found
        ),
        caption=f"Steps of {step_ms} ms of computing; {steps} of each",
    )


def _percentiles(seconds: Sequence[float]) -> tuple[float, float]:
    p50, p99 = np.percentile(np.asarray(seconds) * 1e3, (50, 99)).tolist()
    return p50, p99


READING = """\
A step waits for {rows} rows of {length:,} tokens of {sources} sources and their labels, and computes: a small torch
model, on one thread that has a core of its own; loaders have the other cores. The computation is the same for all.
Each contender is a process of its own. All stay open at the same time and train alternately in turns of a second or
two, so a machine that is slow for a while affects all. The first line reads nothing: any excess of its time is due to
the machine. Loaders are ready long before a request, so these are waits for a batch that exists already, except for a
DataLoader in the process, which makes a batch on request."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--seconds",
    default=16.0,
    show_default=True,
    help="Measured time for each loader and size of steps.",
)
@click.option("--rows", default=2, show_default=True, help="Rows of 4,096 tokens of a step.")
@click.option(
    "--step-ms",
    "steps_ms",
    default=(50, 200),
    show_default=True,
    multiple=True,
    type=click.IntRange(1),
    help="Milliseconds of computing in a step; may be given several times.",
)
@click.option("--report/--no-report", default=True, show_default=True, help="Write the report.")
def main(seconds: float, rows: int, steps_ms: tuple[int, ...], report: bool) -> None:
    """Compare step times with loaders inside and outside the trainer's process.

    \b
    Example:
      python -m benchmarks.loaders.waits --seconds 4 --no-report
    """  # noqa: D301 -- click's own marker
    corpus = MixedSources(documents=1_000)
    counts = [max(_LEAST_STEPS, round(_TURN_S * 1e3 / step)) for step in steps_ms]
    found: list[dict[str, list[Steps]]] = [{name: [] for name in CONTENDERS} for _ in steps_ms]
    with tempfile.TemporaryDirectory() as made, ExitStack() as stack:
        build_sources(Path(made), corpus)
        work = Rows(folder=Path(made), corpus=corpus, length=_ROW_TOKENS, rows=rows)
        with _process() as alone:
            turns = alone.submit(turns_of, steps_ms).result()
        processes = {name: stack.enter_context(_process()) for name in CONTENDERS}
        for name, process in processes.items():
            process.submit(start, name, work).result()
            stack.callback(_stopped, process)
        for size, (step_ms, each, count) in enumerate(zip(steps_ms, turns, counts, strict=True)):
            for turn in range(times := max(1, round(seconds * 1e3 / step_ms / count))):
                # Forward and backward, so that the first and the last contender of a turn change.
                for name, process in list(processes.items())[:: -1 if turn % 2 else 1]:
                    found[size][name].append(process.submit(steps_of, each, count).result())
                click.echo(f"{step_ms} ms: {turn + 1} of {times} turns")
    tables = [table_of(step, runs) for step, runs in zip(steps_ms, found, strict=True)]
    for table in tables:
        print_table(table)
    if report:
        sizes = "".join(f" --step-ms {step}" for step in steps_ms)
        path = write_report(
            __file__,
            "waits",
            "Steps of a training loop, by where its loader is",
            f"python -m benchmarks.loaders.waits --seconds {seconds:g} --rows {rows}{sizes}",
            tables,
            READING.format(rows=rows, length=_ROW_TOKENS, sources=corpus.sources).replace(
                "\n", " "
            ),
        )
        click.echo(f"wrote {path.name}")


def _process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def _stopped(process: ProcessPoolExecutor) -> None:
    process.submit(stop).result()


if __name__ == "__main__":
    main()
