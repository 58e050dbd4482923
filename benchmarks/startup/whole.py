"""A whole start of the included trainer, to the end of its first step: the plain way and ours.

    python -m benchmarks.startup.whole --help

One machine, one job, one image, the same packages, the same checkpoint. Starts of the two ways alternate in rounds,
each from an empty node.

- *plain*: ``skopeo copy`` and ``umoci unpack`` of the gzip image; ``pip install`` of what the job
  needs besides, from an index of wheels; the checkpoint fetched by one stream; then the trainer.
- *ours*: one command, ``omniload image run ... -- omniload env run ... -- python job.py``: the image
  mounted, with the trace of an earlier start on another node; the packages restored from a
  snapshot; the checkpoint read by many streams into the tensors (``checkpoint.folder: omnifs://``).

Registry, index and snapshots lie behind one link of ``--mbit`` and ``--delay-ms``. The checkpoint's store has no such
link, but each of its connections is limited to ``--stream-mb`` MB/s, as HDFS readers are by a data node. The first
step's loss, gradient and samples must be equal in all starts, which shows that both ways computed from the same
bytes.

Needs root, skopeo, umoci, docker-registry, fuse3, moto and for HDFS a JDK 17.
"""

import importlib.util
import os
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import click
from pyarrow import fs
from rich.console import Console

from benchmarks.report import Table, print_table, write_report
from benchmarks.startup.place import Relay, Shape, running_registry
from benchmarks.startup.whole_job import REQUIREMENTS, Job
from benchmarks.startup.whole_place import (
    IMAGE_PACKAGES,
    KEYS,
    build_images,
    checkpoint_store,
    free_port,
    object_store,
    s3_url,
    serving,
    wheels,
)
from benchmarks.startup.whole_ways import Places, Start, begin, ours, plain
from snapshot.commands.startup import format_moved, print_difference, write_trace
from snapshot.startup.attempts import BETWEEN, Attempt, attempts_of, difference_of
from snapshot.startup.reading import read_events
from tests.support.hdfs.cluster import why_not

__all__ = ["Bench", "Link", "Round", "check_machine", "main", "tables_of", "timelines"]

WANTED = 0.5
TARGET = 0.3
WAYS = {"plain": plain, "ours": ours}
CHECKPOINT = "checkpoint_load"
ENVIRONMENT = "environment"
_BEFORE = "(before the first stage)"
_TOOLS = ("skopeo", "umoci", "docker-registry", "unshare", "fusermount3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Figures of one start of one way."""

    start: Start
    attempt: Attempt

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of each stage on the critical path; they sum to the wall seconds."""
        found = {stage.name: stage.path_s for stage in self.attempt.stages}
        before = self.start.wall_s - self.attempt.seconds
        return {_BEFORE: before, **found, BETWEEN: self.attempt.between_s}


class Link:
    """One link to several ports of this machine."""

    def __init__(self, mbit: float, delay_ms: float) -> None:
        self._rate, self._delay_s = mbit * 1e6 / 8, delay_ms / 1e3
        self._shapes = Shape(self._rate, self._delay_s), Shape(self._rate, self._delay_s)
        self._relays: list[Relay] = []

    @contextmanager
    def to(self, port: int) -> Iterator[int]:
        """Yield the port that leads to another port over the link."""
        relay = Relay(port, self._rate, self._delay_s, shapes=self._shapes)
        self._relays.append(relay)
        with relay.running() as mine:
            yield mine

    def sent(self) -> int:
        """Return the number of bytes that came back over it."""
        return sum(relay.bytes_back for relay in self._relays)


class Bench:
    """Everything that runs while starts are measured."""

    def __init__(self, folder: Path, scratch: Path, job: Job, store: str, stream_mb: float) -> None:
        self.folder, self.scratch, self.job = folder, scratch, job
        self.kind, self.stream_rate = store, stream_mb * 1e6
        self.rounds: dict[str, list[Round]] = {name: [] for name in WAYS}
        self.trace: Path | None = None
        self._number = 0

    @contextmanager
    def running(self, link: Link) -> Iterator[None]:
        """Run registry, index and stores; make image, wheels and checkpoints that are missing."""
        index = wheels(self.folder, REQUIREMENTS)
        with ExitStack() as stack:
            registry = stack.enter_context(running_registry(self.folder))
            build_images(self.folder, f"127.0.0.1:{registry}", IMAGE_PACKAGES)
            s3 = stack.enter_context(object_store())
            port = free_port()
            words = ("-m", "http.server", str(port), "--bind", "127.0.0.1", "--directory")
            stack.enter_context(serving(*words, str(index), port=port))
            far = {
                name: stack.enter_context(link.to(p))
                for name, p in (("registry", registry), ("index", port), ("s3", s3))
            }
            self.link = link
            self.image = f"127.0.0.1:{far['registry']}/job"
            self.snapshots = s3_url(far["s3"], "environments")
            self._kept = fs.SubTreeFileSystem(
                str(self.folder / "environments"), fs.LocalFileSystem()
            )
            self._environments = _bucket(s3, "environments")
            self.store = stack.enter_context(checkpoint_store(self.kind, self.stream_rate, s3))
            self._prepare(far["index"])
            yield

    def start(self, name: str) -> Round:
        """Start the job once, on an empty node."""
        self._number += 1
        here = self.scratch / f"start-{self._number}"
        log = here / "startup.jsonl"
        (here / "node").mkdir(parents=True)
        run_dir = self.job.folder / f"run-{name}"
        shutil.rmtree(run_dir, ignore_errors=True)
        places = Places(
            node=here / "node",
            job=self.job.folder,
            plain=f"{self.image}/plain:v",
            lazy=f"{self.image}/lazy:v",
            trace=self.trace,
            snapshots=self.snapshots,
            checkpoint=self.store.at("plain"),
            variables={**KEYS, **self.store.variables},
            binds=(f"{self.job.folder}/pip.conf:/etc/pip.conf:ro", *self.store.binds),
        )
        command = WAYS[name](places, log, f"{name}.yaml")
        done = begin(command, log, run_dir, sent=self.link.sent)
        (attempt,) = attempts_of(read_events([log]).events)
        click.echo(f"{name}: {done.wall_s:.1f} s, CPU {done.cpu_s:.1f} s", err=True)
        for line in _worth_telling(here):
            click.echo(f"    {line}", err=True)
        return Round(start=done, attempt=attempt)

    def forget(self) -> None:
        """Remove the traces of the last start on its node."""
        shutil.rmtree(self.scratch / f"start-{self._number}" / "node", ignore_errors=True)

    def _prepare(self, index_port: int) -> None:
        job, store = self.job, self.store
        job.write()
        config = f"[global]\nindex-url = http://127.0.0.1:{index_port}/simple\n"
        (job.folder / "pip.conf").write_text(config)
        job.training_file("plain", "/node/checkpoints")
        job.training_file("ours", f"omnifs://ckpt::{store.at('striped')}")
        local = self.scratch / "checkpoints"
        job.save("plain", str(local), {})
        filesystem, root = fs.FileSystem.from_uri(store.filled_at("plain"))
        fs.copy_files(str(local), root, fs.LocalFileSystem(), filesystem)
        shutil.rmtree(local)
        job.save("ours", f"omnifs://ckpt::{store.filled_at('striped')}", store.variables)
        (self.folder / "environments").mkdir(exist_ok=True)
        _copy(self._kept, self._environments)
        # If no snapshot is kept yet, the first start installs, so its trace differs from that of later starts.
        while self.trace is None:
            first = self.start("ours")
            restored = any(
                "store" in s.bytes for s in first.attempt.stages if s.name == ENVIRONMENT
            )
            if restored:
                (trace,) = (self.scratch / f"start-{self._number}/node/image/traces").rglob(
                    "*.trace"
                )
                self.trace = Path(shutil.copy(trace, self.scratch / "trace"))
            elif self._number > 1:
                raise RuntimeError("the second start of ours found no snapshot of the first")
            self.forget()
        _copy(self._environments, self._kept)


def _worth_telling(start: Path) -> list[str]:
    """Return the origin of the packages, and the waits of the image's mount."""
    log = start / "node" / "image.log"
    said = (start / "startup.output").read_text(errors="replace").splitlines()
    said += log.read_text(errors="replace").splitlines() if log.exists() else []
    return [line for line in said if "restored (" in line or "bytes by tier" in line]


def _bucket(port: int, name: str) -> fs.FileSystem:
    url = s3_url(port, name) + "&allow_bucket_creation=true"
    filesystem, root = fs.FileSystem.from_uri(url)
    filesystem.create_dir(root)
    return fs.SubTreeFileSystem(root, filesystem)


def _copy(source: fs.FileSystem, target: fs.FileSystem) -> None:
    fs.copy_files("", "", source, target)


def tables_of(rounds: dict[str, list[Round]]) -> list[Table]:
    """Return the tables of the stages of both ways, and the ratios."""
    names: dict[str, None] = {}
    for each in (*rounds["ours"], *rounds["plain"]):
        names |= dict.fromkeys(each.parts)
    ordered = sorted(names, key=lambda name: (name == BETWEEN, name != _BEFORE))
    rows = [(name, *_row([_median(rounds[way], name) for way in WAYS])) for name in ordered]
    walls = {way: [each.start.wall_s for each in rounds[way]] for way in WAYS}
    rows.append(("total", *_row([statistics.median(walls[way]) for way in WAYS])))
    without = {
        way: [r.start.wall_s - r.parts.get(CHECKPOINT, 0.0) for r in rounds[way]] for way in WAYS
    }
    others = [
        (
            way,
            f"{statistics.median(r.start.cpu_s for r in found):.1f}",
            f"{statistics.median(r.start.wire_bytes for r in found) / 1e6:.0f}",
            format_moved(found[-1].attempt.bytes),
            " / ".join(f"{s:.1f}" for s in walls[way]),
        )
        for way, found in rounds.items()
    ]
    goal = f"<= {WANTED}, target {TARGET}"
    return [
        Table(
            columns=("stage", "plain, s", "ours, s", "ours / plain"),
            rows=tuple(rows),
            caption="Critical path to the end of the first step, medians of rounds:",
        ),
        Table(
            columns=(
                "way",
                "processor s",
                "MB on the link",
                "bytes by tier, last round",
                "total of each round, s",
            ),
            rows=tuple(others),
        ),
        Table(
            columns=("ours over plain", "each round", "median", "wanted"),
            rows=(
                ("whole start", *_ratios(walls), goal),
                ("without the checkpoint stage", *_ratios(without), ""),
            ),
        ),
    ]


def _median(rounds: Sequence[Round], name: str) -> float:
    return statistics.median(each.parts.get(name, 0.0) for each in rounds)


def _row(seconds: Sequence[float]) -> tuple[str, str, str]:
    before, after = seconds
    return f"{before:.2f}", f"{after:.2f}", f"{after / before:.2f}" if before >= 0.05 else "-"


def _ratios(seconds: dict[str, list[float]]) -> tuple[str, str]:
    found = [o / p for o, p in zip(seconds["ours"], seconds["plain"], strict=True)]
    return " / ".join(f"{ratio:.2f}" for ratio in found), f"{statistics.median(found):.2f}"


def timelines(rounds: dict[str, list[Round]], folder: Path) -> None:
    """Write the timeline of the last start of each way."""
    for way in WAYS:
        path = folder / f"whole_startup-{way}.json"
        write_trace(path, rounds[way][-1].attempt)
        click.echo(f"timeline: {path}")


def check_machine(store: str) -> str:
    """Return the store of checkpoints, HDFS if it is available; raise an error if something is missing.

    Raises:
        click.ClickException: Something is missing.
    """
    if os.geteuid() != 0:
        raise click.ClickException(f"user {os.geteuid()} may not mount; run it as root")
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        raise click.ClickException(
            f"{', '.join(missing)} not found; run scripts/system_packages.sh"
        )
    if importlib.util.find_spec("moto") is None:
        raise click.ClickException("moto is not installed; run make setup")
    if store == "hdfs" and (why := why_not()):
        raise click.ClickException(f"{why}; or give --store s3")
    return ("s3" if why_not() else "hdfs") if store == "auto" else store


@click.command()
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    help="Folder that keeps image and wheels between runs.",
)
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("--mbit", default=200.0, show_default=True, help="Rate of the link, each direction.")
@click.option(
    "--delay-ms", default=5.0, show_default=True, help="Delay of the link, each direction."
)
@click.option("--checkpoint-mib", default=512, show_default=True, type=click.IntRange(min=8))
@click.option(
    "--stream-mb",
    default=16.0,
    show_default=True,
    help="MB/s of one connection to the checkpoint's store.",
)
@click.option(
    "--store",
    type=click.Choice(["auto", "hdfs", "s3"]),
    default="auto",
    show_default=True,
    help="Size of the checkpoint.",
)
@click.option(
    "--perfetto",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for both timelines.",
)
@click.option(
    "--write-report", "reading", default="", help="Write a dated report with this reading."
)
def main(  # noqa: PLR0913, PLR0917 -- one for each option
    folder: Path | None,
    rounds: int,
    mbit: float,
    delay_ms: float,
    checkpoint_mib: int,
    stream_mb: float,
    store: str,
    perfetto: Path | None,
    reading: str,
) -> None:
    """Measure, print, and write a report if asked.

    \b
    Example:
      python -m benchmarks.startup.whole --folder ~/whole --perfetto timelines
      python -m benchmarks.startup.whole --rounds 1 --checkpoint-mib 64 --store s3
    """  # noqa: D301 -- click's own marker
    kind = check_machine(store)
    with tempfile.TemporaryDirectory(prefix="whole-startup-") as text:
        scratch = Path(text)
        kept = (folder or scratch / "kept").absolute()
        kept.mkdir(parents=True, exist_ok=True)
        bench = Bench(kept, scratch, Job(scratch / "job", checkpoint_mib), kind, stream_mb)
        with bench.running(Link(mbit, delay_ms)):
            for number in range(rounds):
                for name in WAYS if number % 2 == 0 else reversed(WAYS):
                    bench.rounds[name].append(bench.start(name))
                    bench.forget()
    if len(seen := {each.start.first for found in bench.rounds.values() for each in found}) != 1:
        raise click.ClickException(f"the first steps differ, so what was loaded does: {seen}")
    tables = tables_of(bench.rounds)
    for table in tables:
        print_table(table)
    print_difference(
        Console(width=160), difference_of(*(bench.rounds[w][-1].attempt for w in WAYS))
    )
    if perfetto is not None:
        perfetto.mkdir(parents=True, exist_ok=True)
        timelines(bench.rounds, perfetto)
    if reading:
        line = f"python -m benchmarks.startup.whole --rounds {rounds} --mbit {mbit:g} --delay-ms {delay_ms:g}"
        line += f" --checkpoint-mib {checkpoint_mib} --stream-mb {stream_mb:g} --store {kind}"
        title = "A whole start of a job: image, environment, checkpoint, first step"
        write_report(__file__, "whole_startup", title, line, tables, reading)


if __name__ == "__main__":
    main()
