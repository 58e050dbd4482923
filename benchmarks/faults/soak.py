"""Many small steps through a running data plane: memory, descriptors, threads and /dev/shm must not grow.

python -m benchmarks.faults.soak --help
"""

import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import psutil

from benchmarks.loaders.mixed_sources import MixedSources, build_sources, mix_of
from benchmarks.report import Table, print_table, write_report
from omniload.actors.opening import open_ray_plane
from omniload.actors.plane import PlaneSpec
from omniload.actors.ray.plane import RayPlane
from omniload.client import Client
from omniload.mix.config import MixConfig
from omniload.plan.place_tree import ClientPlaceTree

__all__ = ["Held", "grown", "looks_over", "main"]

_SHM = Path("/dev/shm")
_EVERY_PART = 100
"""Number of looks."""
_WARM, _EARLY, _LATE = 0.5, 0.65, 0.85
"""Parts of the run.

Before the first, caches fill and allocators find the memory that they keep. The figures between the first and the
second are compared with those after the third.
"""
_MORE_BYTES, _MORE_PART, _MORE = 4 << 20, 0.05, 2
"""Growth that counts as none: in bytes, as a part of the earlier memory, and in descriptors or threads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Memory, descriptors and threads of one process, or of several of one kind together."""

    pss_bytes: int = 0
    descriptors: int = 0
    threads: int = 0

    def with_more(self, other: "Held") -> "Held":
        """Return the sums of both."""
        return Held(
            pss_bytes=self.pss_bytes + other.pss_bytes,
            descriptors=self.descriptors + other.descriptors,
            threads=self.threads + other.threads,
        )


def held_by(pid: int) -> Held:
    """Return the figures of a process; zeros if it has ended."""
    folder = Path("/proc") / str(pid)
    try:
        lines = (folder / "smaps_rollup").read_text(encoding="ascii").splitlines()
        return Held(
            pss_bytes=sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:")),
            descriptors=len(list((folder / "fd").iterdir())),
            threads=len(list((folder / "task").iterdir())),
        )
    except OSError:
        return Held()


def look(roles: Mapping[int, str]) -> dict[str, Held]:
    """Return the figures of each role, of this process as the ranks, and of Ray's own processes by their names."""
    own = psutil.Process()
    names = {own.pid: "ranks and opener"}
    for child in own.children(recursive=True):
        try:
            names[child.pid] = roles.get(child.pid) or f"Ray: {child.name()}"
        except psutil.NoSuchProcess:
            continue
    found: dict[str, Held] = defaultdict(Held)
    for pid, name in names.items():
        found[name] = found[name].with_more(held_by(pid))
    return dict(found)


def shared_memory() -> Held:
    """Return the contents of ``/dev/shm``: bytes, and the number of names as descriptors."""
    told = os.statvfs(_SHM)
    used = (told.f_blocks - told.f_bfree) * told.f_frsize
    return Held(pss_bytes=used, descriptors=len(list(_SHM.iterdir())))


def looks_over(
    plane: RayPlane, clients: Sequence[Client], steps: int
) -> Iterator[tuple[int, dict[str, Held]]]:
    """Take steps; yield from time to time the number of steps taken and the present figures."""
    roles = {pid: role for role, pid in plane.pids().items()}
    every = max(1, steps // _EVERY_PART)
    for step in range(1, steps + 1):
        for client in clients:
            assert client.next_batch() is not None, "the mix has no end"
        if step % every == 0:
            yield step, look(roles) | {str(_SHM): shared_memory()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Early and late figures, each a median."""

    early: Held
    late: Held

    @property
    def is_some(self) -> bool:
        """Whether the growth is more than chance."""
        early, late = self.early, self.late
        more_bytes = max(_MORE_BYTES, round(_MORE_PART * early.pss_bytes))
        return (
            late.pss_bytes - early.pss_bytes > more_bytes
            or late.descriptors - early.descriptors > _MORE
            or late.threads - early.threads > _MORE
        )


def grown(looks: Sequence[Mapping[str, Held]]) -> dict[str, Growth]:
    """Compare the figures after caches were full with those at the end, for processes that are in both."""
    count = len(looks)
    early = looks[int(_WARM * count) : max(1, int(_EARLY * count))]
    late = looks[int(_LATE * count) :]
    names = [name for name in early[-1] if name in late[-1]]
    return {name: Growth(early=_middle(early, name), late=_middle(late, name)) for name in names}


def _middle(looks: Sequence[Mapping[str, Held]], name: str) -> Held:
    held = [each[name] for each in looks if name in each]
    return Held(
        pss_bytes=round(statistics.median(each.pss_bytes for each in held)),
        descriptors=round(statistics.median(each.descriptors for each in held)),
        threads=round(statistics.median(each.threads for each in held)),
    )


def table_of(found: Mapping[str, Growth], steps: int, seconds: float) -> Table:
    """Return the early and late figures of each."""

    def pair(early: float, late: float) -> str:
        return f"{early:,.0f} → {late:,.0f}"

    return Table(
        columns=("process", "PSS, MiB", "descriptors", "threads", "verdict"),
        rows=tuple(
            (
                name,
                f"{of.early.pss_bytes / 2**20:,.1f} → {of.late.pss_bytes / 2**20:,.1f}",
                pair(of.early.descriptors, of.late.descriptors),
                pair(of.early.threads, of.late.threads),
                "GREW" if of.is_some else "as it was",
            )
            for name, of in sorted(found.items())
        ),
        caption=f"{steps:,} steps in {seconds:,.0f} s, {steps / seconds:,.0f} a second",
    )


def mix_for(corpus: MixedSources, *, ranks: int, loaders: int, length: int) -> MixConfig:
    """Return a mix of steps with one row for each rank."""
    runtime = {"kind": "ray", "loaders": loaders, "shadows": 1}
    return mix_of(
        corpus.names, corpus.weights, rows=ranks, micro_rows=1, length=length, runtime=runtime
    )


READING = """\
{ranks} ranks in one process, {loaders} source loaders with a shadow each, {sources} sources of pre-tokenised parquet,
steps of {tokens:,} tokens, a journal in a folder. All processes are looked at {looks} times. A row compares the
median of the figures after half of the steps, over 15 % of the steps, with that of the last 15 %, because allocators
take many steps to find the memory that they keep. An increase counts as growth if it is over 4 MiB and a twentieth,
or over two descriptors or threads. For /dev/shm the columns have the bytes in use and the number of names instead of
PSS and descriptors."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--steps", default=200_000, show_default=True, type=click.IntRange(100))
@click.option("--ranks", default=4, show_default=True, type=click.IntRange(1))
@click.option("--loaders", default=2, show_default=True, type=click.IntRange(1))
@click.option("--sources", default=8, show_default=True, type=click.IntRange(1))
@click.option(
    "--length", default=256, show_default=True, type=click.IntRange(1), help="Tokens of a row."
)
@click.option("--report/--no-report", default=True, show_default=True, help="Write the report.")
def main(*, steps: int, ranks: int, loaders: int, sources: int, length: int, report: bool) -> None:
    """Take many small steps and look for growth.

    \b
    Example:
      python -m benchmarks.faults.soak --steps 5000 --no-report
    """  # noqa: D301 -- click's own marker
    corpus = MixedSources(sources=sources, documents=2_000)
    looks: list[dict[str, Held]] = []
    with tempfile.TemporaryDirectory() as made:
        build_sources(Path(made), corpus)
        mix = mix_for(corpus, ranks=ranks, loaders=loaders, length=length)
        spec = PlaneSpec(
            mix=mix,
            base_dir=Path(made),
            tree=ClientPlaceTree.of(dp=ranks),
            run_dir=Path(made) / "run",
        )
        with open_ray_plane(spec) as plane:
            clients = [Client(plane.handle(rank)) for rank in range(ranks)]
            began_s = time.monotonic()
            for step, held in looks_over(plane, clients, steps):
                looks.append(held)
                total = sum(each.pss_bytes for name, each in held.items() if name != str(_SHM))
                passed_s = time.monotonic() - began_s
                click.echo(f"step {step:,}: {total / 2**20:,.0f} MiB in all, {passed_s:,.0f} s")
            seconds = time.monotonic() - began_s
    found = grown(looks)
    table = table_of(found, steps, seconds)
    print_table(table)
    if report:
        path = write_report(
            __file__, "soak",
            "What a data plane holds over many steps",
            f"python -m benchmarks.faults.soak --steps {steps} --ranks {ranks} --loaders {loaders} --sources {sources} "
            f"--length {length}",
            [table],
            READING.format(
                ranks=ranks, loaders=loaders, sources=sources, tokens=mix.batch.tokens, looks=len(looks)
            ).replace("\n", " "),
        )  # fmt: skip
        click.echo(f"wrote {path.name}")
    if any(each.is_some for each in found.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
