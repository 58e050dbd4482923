"""Steps per second and waits as a mix shifts to slow sources: few loaders, many, and the number of the scaler.

python -m benchmarks.planner.scaling --help
"""

import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click
import psutil
import pyarrow as pa
import yaml

from benchmarks.loaders.mixed_sources import MixedSources, build_sources
from benchmarks.report import Table, print_table, write_report
from omniload.actors.heartbeat_board import FolderBoard
from omniload.actors.plane import PlaneSpec
from omniload.actors.ray.plane import RayPlane
from omniload.actors.ray.scaling.shell import SCALER
from omniload.client import Client
from omniload.commands.edits.asking import change_mix
from omniload.mix.config import MixConfig, load_mix
from omniload.mix.edits.edit import SetWeights
from omniload.mix.run_record import write_run_record
from omniload.plan.place_tree import ClientPlaceTree

__all__ = ["Job", "Seen", "main", "slowly", "table_of"]

_LIGHT = 2
"""Sources without a delay; the rest wait for each document."""
_RANKS, _ROWS, _LENGTH, _STEP_S = 2, 4, 2_048, 0.1
_DOCUMENT_TOKENS = 650
_BEFORE, _AFTER = 0.1, 0.9
"""Share of slow sources in the mix."""
_WAIT_S = 120.0
_LOOK_S = 0.5
_FEW, _MANY = 1, 4
_KINDS = ((_FEW, False, True), (_MANY, False, True), (_FEW, True, True), (_FEW, True, False))
"""Loaders at first, whether the scaler changes their number, and whether the shift is scheduled.

Only the scaler knows the schedule in advance.
"""
_SPANS = ((-30.0, 0.0), (0.0, 60.0))
"""Spans for figures, in seconds from the shift; the last 40 s follow."""
_LAST_S = 40.0


def slowly(tokens: pa.LargeListArray, *, milliseconds: float) -> pa.LargeListArray:
    """Return documents unchanged, after the time of a service for each."""
    time.sleep(len(tokens) * milliseconds / 1e3)
    return tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run of a job."""

    slow: int
    """Slow sources."""
    reads: float
    """Concurrent reads of slow sources after the shift that avoid any wait of a rank."""
    loaders: int
    """Source loaders at the start."""
    scaled: bool
    """Whether the scaler changes the number of loaders."""
    scheduled: bool
    """Whether a stage shifts the mix; otherwise an edit is requested at the step of the shift."""
    shift: int
    """Step of the shift."""
    after_s: float
    """Time for which the job is observed after the shift."""

    @property
    def milliseconds(self) -> float:
        """Return the time of a document of a slow source."""
        documents_per_s = _ROWS * _LENGTH / _DOCUMENT_TOKENS / _STEP_S * _AFTER
        return 1e3 * self.reads / documents_per_s

    def weights(self, names: Sequence[str], share: float) -> dict[str, float]:
        """Return the weights of sources if the slow ones have this share together."""
        return {
            name: (1 - share) / _LIGHT if i < _LIGHT else share / self.slow
            for i, name in enumerate(names)
        }

    def mix(self, names: Sequence[str]) -> MixConfig:
        """Return its mix."""
        stages = [{"from_step": 0, "weights": self.weights(names, _BEFORE)}]
        if self.scheduled:
            stages.append({"from_step": self.shift, "weights": self.weights(names, _AFTER)})
        options = {"milliseconds": self.milliseconds}
        waits = [{"type": "map", "function": "slowly", "of": "tokens", "options": options}]
        return MixConfig.model_validate(
            {
                "version": 2,
                "seed": 1,
                "sources": {
                    name: {"type": "parquet", "path": f"{name}/*.parquet", "tokens": "tokens"}
                    | ({} if i < _LIGHT else {"transforms": waits})
                    for i, name in enumerate(names)
                },
                "mix": {"stages": stages},
                "pack": {"length": _LENGTH},
                "batch": {
                    "tokens": _ROWS * _LENGTH,
                    "micro_tokens": _ROWS * _LENGTH // _RANKS,
                },
                "runtime": {
                    "loaders": self.loaders,
                    "prefetch_steps": 8,
                    "scaling": {"mode": "auto" if self.scaled else "off"},
                },
            }
        )


@dataclass(slots=True)
class Seen:
    """Findings of a job; times are in seconds from the shift."""

    waits: list[tuple[float, float]] = field(default_factory=list)
    """Time of each step, and the longest wait of a rank for it."""
    loaders: list[tuple[float, int]] = field(default_factory=list)
    """Number of loaders at first, and after each change."""
    changes: int = 0
    """Changes of the scaler: loaders added and merged, sources moved."""
    busy_s: float = 0.0
    """Processor seconds of all roles."""
    memory_bytes: int = 0
    """Memory of all roles at the end; shared pages count once."""

    def pace(self, first_s: float, last_s: float) -> float:
        """Return the steps per second of a span."""
        return sum(first_s <= at_s < last_s for at_s, _ in self.waits) / (last_s - first_s)

    def longest(self, first_s: float, last_s: float) -> float:
        """Return the longest wait that ended in a span."""
        return max((wait_s for at_s, wait_s in self.waits if first_s <= at_s < last_s), default=0.0)

    def counted(self, plane: RayPlane, now_s: float) -> None:
        """Record the number of loaders if it has changed, and the actions of the scaler."""
        loaders = sum(role.startswith("loader-") for role in plane.holders())
        if not self.loaders or loaders != self.loaders[-1][1]:
            self.loaders.append((now_s, loaders))
        scaler = FolderBoard(plane.address.board).read().get(SCALER)
        self.changes = 0 if scaler is None else int(scaler.figures["loader_changes_total"])

    def since(self, shift_s: float) -> None:
        """Count all times from the shift on."""
        self.waits = [(at_s - shift_s, wait_s) for at_s, wait_s in self.waits]
        self.loaders = [(at_s - shift_s, loaders) for at_s, loaders in self.loaders]


def _look(plane: RayPlane, seen: Seen, ended: threading.Event) -> None:
    """Record the present loaders, until the job has ended."""
    while not ended.wait(_LOOK_S):
        seen.counted(plane, time.perf_counter())


def run_of(folder: Path, job: Job, names: Sequence[str]) -> Seen:
    """Run a job."""
    with tempfile.TemporaryDirectory() as made:
        run, path, seen = Path(made) / "run", folder / "mix.yaml", Seen()
        mix = job.mix(names).model_dump(mode="json")
        path.write_text(yaml.safe_dump(mix), encoding="utf-8")
        write_run_record(run, path, {"dp": _RANKS})
        loaded, base_dir = load_mix(path)
        tree = ClientPlaceTree.of(dp=_RANKS)
        spec = PlaneSpec(mix=loaded, base_dir=base_dir, tree=tree, run_dir=run)
        ended, shift_s = threading.Event(), 0.0
        with RayPlane(spec) as plane:
            clients = [Client(plane.handle(rank)) for rank in range(_RANKS)]
            watch = threading.Thread(target=_look, args=(plane, seen, ended))
            watch.start()
            try:
                while not shift_s or time.perf_counter() < shift_s + job.after_s:
                    batches = [client.next_batch(_WAIT_S) for client in clients]
                    assert all(batches), "the run has no end"
                    wait_s = max(client.last_wait_s for client in clients)
                    seen.waits.append((time.perf_counter(), wait_s))
                    if not shift_s and clients[0].next_step >= job.shift:
                        shift_s = time.perf_counter()
                        if not job.scheduled:
                            asked = SetWeights(weights=job.weights(names, _AFTER))
                            change_mix(run, asked, None, _WAIT_S)
                    time.sleep(_STEP_S)  # an accelerator computes
                roles = [psutil.Process(pid) for pid in plane.pids().values()]
                seen.busy_s = sum(sum(role.cpu_times()[:2]) for role in roles)
                seen.memory_bytes = sum(role.memory_full_info().pss for role in roles)
            finally:
                ended.set()
                watch.join()
        seen.since(shift_s)
        return seen


def table_of(found: Sequence[tuple[Job, Seen]]) -> Table:
    """Return step times before the shift, in the minute after it and later, the waits, and the cost."""
    rows = []
    for job, seen in found:
        (first_s, at_s), (_, minute_s) = _SPANS
        last_s = job.after_s - _LAST_S
        rows.append(
            (
                f"{job.loaders}, scaled" if job.scaled else str(job.loaders),
                "a stage" if job.scheduled else "an edit",
                f"{seen.pace(first_s, at_s):.1f}",
                f"{seen.pace(at_s, minute_s):.1f}",
                f"{seen.pace(last_s, job.after_s):.1f}",
                f"{seen.longest(first_s, at_s):.2f}",
                f"{seen.longest(at_s, minute_s):.2f}",
                f"{seen.longest(last_s, job.after_s):.2f}",
                ", ".join(f"{each} at {at_s:+.0f} s" for at_s, each in seen.loaders),
                str(seen.changes),
                f"{seen.busy_s:.0f}",
                f"{seen.memory_bytes / 2**30:.2f}",
            )
        )
    slow, reads = found[0][0].slow, found[0][0].reads
    return Table(
        columns=(
            "loaders",
            "shifted by",
            "steps a second, 30 s before it",
            "in the minute after it",
            "in the last 40 s",
            "longest wait, s, before it",
            "in the minute after it",
            "in the last 40 s",
            "loaders over time",
            "changes",
            "CPU s of all roles",
            "GiB of all roles",
        ),
        rows=tuple(rows),
        caption=f"{slow} slow sources, of which {reads:g} reads must be under way at once after the shift",
    )


READING = """\
{ranks} ranks take steps of {tokens:,} tokens, which compute for {step:g} s, in which the processor rests: 10 steps a
second at most, minus the time to take them. There are {light} sources that are read at once, and slow ones. Each
document of a slow source waits for a time that stands for a service or a far store. After the mix has shifted from
{before:.0%} of slow sources to {after:.0%}, the number of their concurrent reads must be that of the caption. A
loader does four reads at once. Waits are the longest of a rank in a step. CPU is that of the processes that existed
at the end, from the start of each to the end of the run, without Ray's own. An edit comes without warning; the
schedule announces a stage. Times of loaders are counted from the shift on. Other programs ran on both cores
meanwhile."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--sizes", default="8", show_default=True, help="Slow sources, with four jobs for each number."
)
@click.option("--before", default=120.0, show_default=True, help="Seconds before the shift.")
@click.option("--after", default=100.0, show_default=True, help="Seconds after it.")
@click.option("--report/--no-report", default=True, show_default=True, help="Write the report.")
def main(sizes: str, before: float, after: float, report: bool) -> None:
    """Measure steps per second and waits of ranks as the mix shifts to slow sources.

    \b
    Example:
      python -m benchmarks.planner.scaling --sizes 8 --before 60 --after 60 --no-report
    """  # noqa: D301 -- click's own marker
    tables = []
    with tempfile.TemporaryDirectory() as made:
        _register(Path(made) / "lab")
        for slow in map(int, sizes.split(",")):
            corpus = MixedSources(sources=_LIGHT + slow, documents=2_500, group_rows=20)
            build_sources(folder := Path(made) / str(slow), corpus)
            found: list[tuple[Job, Seen]] = []
            for loaders, scaled, scheduled in _KINDS:
                job = Job(
                    slow=slow,
                    reads=0.7 * slow,
                    loaders=loaders,
                    scaled=scaled,
                    scheduled=scheduled,
                    shift=round(before / _STEP_S),
                    after_s=after,
                )
                found.append((job, run_of(folder, job, corpus.names)))
                print_table(table_of(found))
            tables.append(table_of(found))
    if report:
        path = write_report(
            __file__,
            "scaling",
            "A mix that shifts to slow sources: few loaders, many, and those that follow it",
            f"python -m benchmarks.planner.scaling --sizes {sizes} --before {before:g} --after {after:g}",
            tables,
            READING.format(
                ranks=_RANKS,
                tokens=_ROWS * _LENGTH,
                step=_STEP_S,
                light=_LIGHT,
                before=_BEFORE,
                after=_AFTER,
            ).replace("\n", " "),
        )
        click.echo(f"wrote {path.name}")


def _register(folder: Path) -> None:
    """Register ``slowly`` in this process and in the processes that it starts."""
    about = folder / "slow-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: slow\nVersion: 1.0\n")
    name = "benchmarks.planner.scaling"
    (about / "entry_points.txt").write_text(f"[omniload.transforms]\nslowly = {name}:slowly\n")
    paths = [str(folder), str(Path.cwd()), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    sys.path.insert(0, str(folder))


if __name__ == "__main__":
    main()
