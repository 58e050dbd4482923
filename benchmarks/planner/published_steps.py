"""Cost of a step for a planner with its shell: planned, cut, sent over Ray, and taken by all ranks.

python -m benchmarks.planner.published_steps --help
"""

import asyncio
import queue
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import click
import numpy as np
import psutil
from typing_extensions import override

from benchmarks.planner.plan_time import Case, soaked
from benchmarks.planner.planned_steps import Lengths, table_at
from benchmarks.report import Table, print_table, write_report
from omniload.actors import planner_journal
from omniload.actors.heartbeat_board import Activity
from omniload.actors.ray.cluster import PrivateCluster
from omniload.actors.ray.environment import ray
from omniload.actors.ray.links.of_planner import RayConstructorLink
from omniload.actors.roles import planner as shell_module
from omniload.actors.roles.build_order import BuildOrder
from omniload.actors.roles.links import LoaderLink
from omniload.actors.roles.planner import PlannerShell
from omniload.machine.messages import (
    ReadAhead,
    ReleaseSamples,
    ReleaseSteps,
    SamplesReported,
    StepsTaken,
    TakeOver,
)
from omniload.machine.planner import Planner
from omniload.plan.records import StepPlan
from omniload.plan.world import RanksServed

__all__ = ["Published", "main", "memory_of", "row_of"]

_PROCESSES = 2
"""Processes that stand for all data constructors: on few cores more processes would only compete."""
_STORE_BYTES = 256 << 20
_LIMIT_S = 3_600.0
_WARM_UP = 8
"""Steps planned while sources are first read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Processor seconds of the planner for one step."""

    thread_s: float
    """Time of its thread, from one published step to the next."""
    process_s: float
    """Time of all threads of its process, including Ray's, without the stand-in for loaders."""
    resident_bytes: int
    """Memory of its process after the step."""
    parts_s: dict[str, float]
    """Time of its thread by part: ``handle``, ``parts_of``, ``calls`` of constructors, ``keep`` of the journal."""


class _Constructors:
    """Many data constructors in one process."""

    def __init__(self) -> None:
        self._words: asyncio.Queue[tuple[Sequence[int], int]] = asyncio.Queue()
        self._number = 0

    async def carry_out(self, packed: bytes) -> int | tuple[int, StepsTaken]:
        """Let the ranks take the steps of an order, and return their reports if the order asks for them."""
        order = BuildOrder.unpacked(packed)
        if order.plans:
            await self._words.put((order.served.dp_ranks, order.plans[-1].step))
        return len(order.plans) if order.heard is None else await self.told(order.heard)

    async def release(self, command: ReleaseSteps) -> None:
        """Release nothing."""

    async def told(self, heard: int, served: object = None) -> tuple[int, StepsTaken]:
        """Return the report of the ranks of one constructor; the numbers in the question do not matter here."""
        del heard, served
        dp_ranks, step = await self._words.get()
        self._number += 1
        steps = {(rank, 0): step for rank in dp_ranks}
        return self._number, StepsTaken(steps=steps, is_whole=True)


@dataclass(slots=True)
class _Spent:
    """Processor seconds of the planner's thread since the last step, by part."""

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def timed(self, what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a call whose seconds are counted."""

        def counted(*args: Any, **named: Any) -> Any:  # noqa: ANN401 -- of the call
            began_s = time.thread_time()
            try:
                return call(*args, **named)
            finally:
                self.seconds[what] += time.thread_time() - began_s

        return counted


class _Loader(LoaderLink):
    """A source loader that answers at once, in its own thread and not in the planner's."""

    name = "loader-0"

    def __init__(self, lengths: Sequence[Lengths]) -> None:
        self._lengths, self.spent_s = lengths, 0.0
        self._asked: queue.SimpleQueue[tuple[ReadAhead, Future[SamplesReported]] | None] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=self._answer, daemon=True).start()

    @override
    def read_ahead(self, command: ReadAhead) -> "Future[SamplesReported]":
        report: Future[SamplesReported] = Future()
        self._asked.put((command, report))
        return report

    def _answer(self) -> None:
        while (asked := self._asked.get()) is not None:
            command, report = asked
            table = table_at(
                self._lengths[command.source], command.start, command.stop - command.start
            )
            report.set_result(SamplesReported(source=command.source, table=table))
            self.spent_s = time.thread_time()

    def close(self) -> None:
        """Stop answering."""
        self._asked.put(None)

    @override
    def take_over(self, command: TakeOver) -> "Future[None]":
        raise AssertionError("no loader is lost")

    @override
    def release(self, command: ReleaseSamples) -> None:
        """Release nothing."""


class _Link(RayConstructorLink):
    """A link to a data constructor whose calls are timed; the last link's call marks that a step is published."""

    def __init__(
        self,
        actor: Any,  # noqa: ANN401 -- Ray's handle has no static type
        dp_ranks: Sequence[int],
        on_published: Callable[[], object],
    ) -> None:
        super().__init__(actor, dp_ranks, 0)
        self._on_published = on_published

    @override
    def build(
        self, plans: Sequence[StepPlan], served: RanksServed, released_to: int
    ) -> "Future[int] | Future[StepsTaken]":
        built = super().build(plans, served, released_to)
        self._on_published()
        return built


def published_steps(case: Case, steps: int, folder: Path) -> list[Published]:
    """Let the planner's shell publish steps to data constructors over a Ray of this process.

    Args:
        case: The size of the job.
        steps: Steps to publish.
        folder: Folder of the journal.
    """
    planner = case.planner()
    with ExitStack() as opened:
        cluster = PrivateCluster(object_store_bytes=_STORE_BYTES, workers=_PROCESSES)
        opened.callback(lambda: cluster.close(is_used=True))
        remote: Any = ray.remote
        actors = [
            remote(num_cpus=0, max_concurrency=4 * case.dp)(_Constructors).remote()
            for _ in range(_PROCESSES)
        ]
        loader = opened.enter_context(closing(_Loader(case.lengths())))
        spent, found, done = _Spent(), list[Published](), threading.Event()
        at = [0.0, 0.0]

        def published() -> None:
            now = time.thread_time(), time.process_time() - loader.spent_s
            thread_s, process_s = (each - before for each, before in zip(now, at, strict=True))
            found.append(
                Published(
                    thread_s=thread_s,
                    process_s=process_s,
                    parts_s=dict(spent.seconds),
                    resident_bytes=psutil.Process().memory_info().rss,
                )
            )
            spent.seconds.clear()
            at[:] = now
            if len(found) >= steps:
                done.set()

        dealt = [list(word.steps) for word in case.words(0)]
        links = [
            _Link(actors[n % _PROCESSES], [dp for dp, _ in ranks], list)
            for n, ranks in enumerate(dealt[:-1])
        ]
        links.append(_Link(actors[-1], [dp for dp, _ in dealt[-1]], published))
        journal = planner_journal.open_journal(folder, planner)
        opened.enter_context(_timed(spent))
        shell = PlannerShell(planner, lambda _: loader, links, journal, Activity("planner"))
        opened.callback(shell.close)
        shell.start()
        if not done.wait(_LIMIT_S):
            shell.check()
            raise TimeoutError(f"{len(found)} of {steps} steps were published in {_LIMIT_S:.0f} s")
    return found[:steps]


@contextmanager
def _timed(spent: _Spent) -> Iterator[None]:
    """Count the time that the planner's thread spends on each part."""
    parts: list[tuple[str, Any, str]] = [
        ("handle", Planner, "handle"),
        ("parts_of", StepPlan, "parts_of"),
        ("keep", shell_module, "keep"),
        *(("calls", RayConstructorLink, name) for name in ("build", "release", "told")),
    ]
    with ExitStack() as patches:
        for what, owner, name in parts:
            timed = spent.timed(what, getattr(owner, name))
            patches.enter_context(mock.patch.object(owner, name, timed))
        yield


def row_of(case: Case, found: Sequence[Published]) -> tuple[str, ...]:
    """Return the row of the table; the first steps, planned while sources are first read, are left out."""
    found = found[_WARM_UP:]

    def middle_ms(part: str) -> str:
        return f"{np.median([each.parts_s.get(part, 0.0) for each in found]) * 1e3:.1f}"

    times_ms = np.array([each.thread_s for each in found]) * 1e3
    return (
        f"{case.dp} x {case.microbatches}",
        str(len(list(case.words(0)))),
        f"{np.median(times_ms):.0f}",
        f"{np.quantile(times_ms, 0.9):.0f}",
        middle_ms("handle"),
        middle_ms("parts_of"),
        middle_ms("calls"),
        middle_ms("keep"),
        f"{np.median([each.process_s for each in found]) * 1e3:.0f}",
    )


def memory_of(found: Sequence[Published]) -> tuple[str, ...]:
    """Return the growth of the process's memory over the second half of the steps; pools fill in the first half."""
    before = found[len(found) // 2].resident_bytes
    grown = found[-1].resident_bytes - before
    return (f"{len(found):,}", f"{before / 2**20:.0f}", f"{grown / 2**20:+.1f}")


READING = """\
The planner's shell works as in a job. It handles reports of the loaders. It draws, packs, costs and balances a step,
records it in the journal, and cuts it into the part of each data constructor. Each part is pickled and sent by Ray.
Samples and steps are released, and reports of all ranks are handled. Messages of ranks come as in a job: each data
constructor of eight ranks answers for all of them. Two processes of Ray stand for all data constructors; they build
nothing, and report at once that their ranks took the sent steps. Loaders answer at once and from memory, in a thread
that is not counted. Figures are processor time of two kinds. One is that of the planner's thread from one published
step to the next, which other work on the machine stretches but does not add to. The other is that of all threads of
its process, including those of Ray, which run in parallel. Calls are the part of each data constructor, the release
of steps that every rank has, and the question which steps its ranks took. Other programs ran on both cores
meanwhile."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--steps", default=100, show_default=True, type=click.IntRange(20), help="Number of steps."
)
@click.option("--dp", default=4_096, show_default=True, help="Number of ranks.")
@click.option(
    "--samples",
    default=65_536,
    show_default=True,
    help="Approximate number of documents of a step.",
)
@click.option(
    "--soak",
    default=10_000,
    show_default=True,
    help="Steps for the growth of memory of the machine alone; 0 for none.",
)
@click.option("--report/--no-report", default=True, show_default=True, help="Write the report.")
def main(steps: int, dp: int, samples: int, soak: int, report: bool) -> None:
    """Time the planner with its shell, step by step.

    \b
    Example:
      python -m benchmarks.planner.published_steps --dp 64 --samples 1024 --soak 0 --no-report
    """  # noqa: D301 -- click's own marker
    case = Case(sources=16, samples=samples, dp=dp, microbatches=8)
    with tempfile.TemporaryDirectory() as folder:
        found = published_steps(case, steps, Path(folder))
    tables = [
        Table(
            columns=(
                "ranks x microbatches",
                "data constructors",
                "ms a step",
                "nine of ten below, ms",
                "of it planning and hearing, ms",
                "of it cutting, ms",
                "of it calls, ms",
                "of it the journal, ms",
                "all threads, ms",
            ),
            rows=(row_of(case, found),),
            caption=f"Medians of {len(found) - _WARM_UP} steps",
        ),
        Table(
            columns=("steps", "resident after half of them, MiB", "more at the end, MiB"),
            rows=(memory_of(found),),
            caption="Memory of the planner's process",
        ),
    ]
    if soak:
        grown = Table(
            columns=("steps", "resident after a tenth of them, MiB", "more at the end, MiB"),
            rows=(soaked(case, soak),),
            caption="Memory of the planner machine alone, of as many ranks",
        )
        tables.append(grown)
    for shown in tables:
        print_table(shown)
    if report:
        path = write_report(
            __file__,
            "published_steps",
            "A step of the planner with its shell",
            f"python -m benchmarks.planner.published_steps --steps {steps} --dp {dp} --samples {samples} --soak {soak}",
            tables,
            READING.replace("\n", " "),
        )
        click.echo(f"wrote {path.name}")


if __name__ == "__main__":
    main()
