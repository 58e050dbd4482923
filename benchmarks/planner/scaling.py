"""What ranks wait as a mix shifts to sources whose reads wait, with loaders that follow the load and without.

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
from omniload.actors.plane import PlaneSpec
from omniload.actors.ray.plane import RayPlane
from omniload.client import Client
from omniload.commands.edits.asking import change_mix
from omniload.mix.config import MixConfig, load_mix
from omniload.mix.edits.edit import SetWeights
from omniload.mix.run_record import write_run_record
from omniload.plan.place_tree import ClientPlaceTree

__all__ = ["Job", "Seen", "main", "slowly", "table_of"]

_LIGHT = 2
"""Sources that are read at once; the rest wait for each document."""
_RANKS, _ROWS, _LENGTH, _STEP_S = 2, 4, 2_048, 0.1
_DOCUMENT_TOKENS = 650
_BEFORE, _AFTER = 0.1, 0.9
"""Share of slow sources in the mix."""
_WAIT_S = 120.0
_KINDS = ((False, False), (False, True), (True, True))
"""Whether the shift is scheduled, and whether loaders follow the load: where they do not, it is no matter which."""


def slowly(tokens: pa.LargeListArray, *, milliseconds: float) -> pa.LargeListArray:
    """Return documents as they are, after the time that a service takes for each."""
    time.sleep(len(tokens) * milliseconds / 1e3)
    return tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run of a job."""

    slow: int
    """Slow sources."""
    reads: float
    """Reads of theirs that must be under way at once, after the shift, for no rank to wait."""
    scheduled: bool
    """Whether a stage has the mix shift; else it is asked for in the step in which it does."""
    scaled: bool
    """Whether loaders follow the load."""
    shift: int
    """Step at which it shifts."""
    after_s: float
    """How long it is looked at from then on."""

    @property
    def milliseconds(self) -> float:
        """What a document of a slow source takes."""
        documents_per_s = _ROWS * _LENGTH / _DOCUMENT_TOKENS / _STEP_S * _AFTER
        return 1e3 * self.reads / documents_per_s

    def weights(self, names: Sequence[str], share: float) -> dict[str, float]:
        """Return the weights of sources where slow ones have a share together."""
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
                    "loaders": 1,
                    "prefetch_steps": 8,
                    "scaling": {"mode": "auto" if self.scaled else "off"},
                },
            }
        )


@dataclass(slots=True)
class Seen:
    """What a job came to."""

    waits: list[tuple[float, float]] = field(default_factory=list)
    """Of each step: when it was taken, from the shift on, and the longest wait of a rank."""
    added_s: list[float] = field(default_factory=list)
    """When each further loader was there, from the shift on."""
    busy_s: float = 0.0
    """Processor seconds of all roles."""
    memory_bytes: int = 0
    """Of all roles at the end, shared pages once."""

    def waited(self, first_s: float, last_s: float) -> float:
        """Return the share of a time that was waited."""
        found = [wait_s for at_s, wait_s in self.waits if first_s <= at_s < last_s]
        return sum(found) / max(1e-9, sum(found) + len(found) * _STEP_S)


def _roles_of(plane: RayPlane, seen: Seen, began_s: float, ended: threading.Event) -> None:
    """Note which loaders there are."""
    known = 1
    while not ended.wait(0.5):
        loaders = sum(role.startswith("loader-") for role in plane.pids())
        seen.added_s += [time.perf_counter() - began_s] * (loaders - known)
        known = max(known, loaders)


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
        ended, began_s, shift_s = threading.Event(), time.perf_counter(), 0.0
        with RayPlane(spec) as plane:
            clients = [Client(plane.handle(rank)) for rank in range(_RANKS)]
            watch = threading.Thread(target=_roles_of, args=(plane, seen, began_s, ended))
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
        seen.waits = [(at_s - shift_s, wait_s) for at_s, wait_s in seen.waits]
        seen.added_s = [began_s + at_s - shift_s for at_s in seen.added_s]
        return seen


def table_of(found: Sequence[tuple[Job, Seen]], last_s: float) -> Table:
    """Return what was waited before the shift, in the minute after it and later, and what it took."""
    rows = []
    for job, seen in found:
        steps = sum(at_s >= 0 for at_s, _ in seen.waits)
        rows.append(
            (
                job.slow,
                f"{job.reads:g}",
                "a stage" if job.scheduled else "an edit",
                "auto" if job.scaled else "off",
                f"{seen.waited(-30.0, 0.0):.1%}",
                f"{seen.waited(0.0, 60.0):.1%}",
                f"{seen.waited(last_s - 40.0, last_s):.1%}",
                f"{steps:,}",
                ", ".join(f"{at_s:+.0f}" for at_s in seen.added_s) or "none",
                f"{seen.busy_s:.0f}",
                f"{seen.memory_bytes / 2**30:.2f}",
            )
        )
    columns = ("slow sources", "reads at once", "shifted by", "scaling", "waited, 30 s before it")
    columns += ("in the minute after it", "in the last 40 s", "steps after it")
    columns += ("loaders added, s from it", "CPU s of all roles", "GiB of all roles")
    return Table(columns=columns, rows=tuple(rows))


READING = """\
{ranks} ranks take steps of {tokens:,} tokens, which compute for {step:g} s, in which the processor rests. One loader
serves {light} sources that are read at once and slow ones, of which each document waits for a time that stands for a
service or a far store, so that as many of their reads as the table says must be under way at once after the mix has
shifted from {before:.0%} of them to {after:.0%}. A loader does about four at once. What is waited is the longest wait
of a rank, of the time that steps take. CPU is from the start of each process to the end of the run, of those that were
there at the end, Ray's own left out. Of an edit nobody knows before; of a stage the schedule does. Without scaling both
are the same."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--sizes", default="8,16", show_default=True, help="Slow sources, one job of each.")
@click.option("--before", default=60.0, show_default=True, help="Seconds before the shift.")
@click.option("--after", default=100.0, show_default=True, help="Seconds after it.")
@click.option("--report/--no-report", default=True, show_default=True, help="Write the report.")
def main(sizes: str, before: float, after: float, report: bool) -> None:
    """Measure waits of ranks as the mix shifts to slow sources.

    \b
    Example:
      python -m benchmarks.planner.scaling --sizes 8 --before 60 --after 60 --no-report
    """  # noqa: D301 -- click's own marker
    found: list[tuple[Job, Seen]] = []
    with tempfile.TemporaryDirectory() as made:
        _register(Path(made) / "lab")
        for slow in map(int, sizes.split(",")):
            corpus = MixedSources(sources=_LIGHT + slow, documents=2_500, group_rows=20)
            build_sources(folder := Path(made) / str(slow), corpus)
            for scheduled, scaled in _KINDS:
                job = Job(
                    slow=slow,
                    reads=0.7 * slow,
                    scheduled=scheduled,
                    scaled=scaled,
                    shift=round(before / _STEP_S),
                    after_s=after,
                )
                found.append((job, run_of(folder, job, corpus.names)))
                print_table(table_of(found, after))
    if report:
        path = write_report(
            __file__,
            "scaling",
            "A mix that shifts to slow sources, with loaders that follow it and without",
            f"python -m benchmarks.planner.scaling --sizes {sizes} --before {before:g} --after {after:g}",
            [table_of(found, after)],
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
    """Have this process, and those that it starts, know ``slowly``."""
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
