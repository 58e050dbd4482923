"""Processes of a running data plane are killed and stopped at random: every step must come, and be the same.

python -m benchmarks.faults.chaos --help
"""

import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click
import fsspec
import numpy as np
from numpy.typing import NDArray

from benchmarks.faults.full_disk import full_for
from benchmarks.faults.machine_stops import MachineStops, seconds_within
from benchmarks.loaders.mixed_sources import MixedSources, build_sources, mix_of
from benchmarks.report import Table, print_table, write_report
from omniload.actors.local.plane import LocalPlane
from omniload.actors.opening import open_ray_plane
from omniload.actors.plane import PlaneSpec
from omniload.actors.ray.plane import RayPlane
from omniload.batch.digest import batch_digest, combined
from omniload.client import Client
from omniload.mix.config import MixConfig
from omniload.plan.place_tree import ClientPlaceTree

__all__ = ["Faults", "Ordeal", "Wait", "main", "schedule_of", "survive"]

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_FULL = "full"
_FULL_S = 5.0
"""How long a disk is full: a small part of what a planner waits for room."""
_RECOVERED_WITHIN_S = 120.0
_FIRST_STEPS = 10
_CALM_STEPS = 10
"""Behind each fault, once the plane has recovered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What is done to which roles, and how often."""

    count: int
    roles: tuple[str, ...]
    """Beginnings of the names of roles: ``loader``, ``planner``, ``constructor``."""
    kinds: tuple[str, ...] = ("kill",)
    disk: Path | None = None
    """Where the run's folder lies, which faults of kind ``full`` fill up, whatever the role."""
    whole: bool = True
    """Wait with the next fault until every role is held and every shadow stands ready."""
    seed: int = 0


@dataclass(frozen=True, slots=True, order=True)
class Wait:
    """How long the rank waited that waited longest for a step."""

    seconds: float
    begin_s: float
    """When the first rank asked for the step: seconds of ``time.monotonic``."""
    end_s: float
    """When the last one had it."""


@dataclass(slots=True)
class Ordeal:
    """What came of it."""

    digests: list[int] = field(default_factory=list)
    """Of each step, whatever the ranks."""
    start: list[Wait] = field(default_factory=list)
    """For the first steps, while shadows are being started."""
    calm: list[Wait] = field(default_factory=list)
    """For steps in which nothing was amiss."""
    struck: dict[str, list[list[Wait]]] = field(default_factory=dict)
    """For all steps after each fault until the plane had recovered, by what was done to which role."""


def schedule_of(faults: Faults, roles: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield kind and role of each fault: a seed gives the same ones again."""
    chance = random.Random(faults.seed)
    struck = sorted(role for role in roles if role.startswith(faults.roles))
    for _ in range(faults.count):
        yield chance.choice(faults.kinds), chance.choice(struck)


def survive(
    plane: RayPlane, clients: Sequence[Client], mix: MixConfig, faults: Faults, *, step_s: float
) -> Ordeal:
    """Take steps of ``step_s`` seconds each, and strike a role whenever the plane has recovered.

    Raises:
        TimeoutError: A role was not replaced in time.
    """
    ordeal, built_ahead = Ordeal(), mix.steps_ahead + mix.steps_at_once

    def take() -> Wait:
        begin_s = time.monotonic()
        batches = [client.next_batch() for client in clients]
        end_s = time.monotonic()
        assert None not in batches, "the mix has no end"
        ordeal.digests.append(combined(batch_digest(batch) for batch in batches if batch))
        time.sleep(step_s)  # the trainer's own time
        return Wait(max(client.last_wait_s for client in clients), begin_s, end_s)

    while len(ordeal.start) < _FIRST_STEPS or not plane.is_whole():
        ordeal.start.append(take())
    for kind, role in schedule_of(faults, list(plane.holders())):
        if kind == _FULL:
            assert faults.disk is not None, "asked for with the kind"
            waits = _through_a_full_disk(faults.disk, take, built_ahead)
            ordeal.struck.setdefault("full disk", []).append(waits)
            ordeal.calm += [take() for _ in range(_CALM_STEPS)]
            continue
        struck = plane.holders()[role]
        os.kill(plane.pids()[role], _SIGNALS[kind])
        until_s, waits, after = time.monotonic() + _RECOVERED_WITHIN_S, list[Wait](), 0
        while after < built_ahead or (faults.whole and not plane.is_whole()):
            waits.append(take())
            # Steps that were built before the fault say nothing of it.
            after += plane.holders()[role] != struck
            if time.monotonic() > until_s:
                raise TimeoutError(f"{role} was not replaced within {_RECOVERED_WITHIN_S:.0f} s")
        ordeal.struck.setdefault(f"{kind} {role.partition('-')[0]}", []).append(waits)
        ordeal.calm += [take() for _ in range(_CALM_STEPS)]
    return ordeal


def _through_a_full_disk(disk: Path, take: Callable[[], Wait], built_ahead: int) -> list[Wait]:
    """Take steps while the disk is full, and those that were built by then."""
    waits, after = [], 0
    with full_for(disk, _FULL_S) as has_room:
        while after < built_ahead:
            had_room = has_room.is_set()
            waits.append(take())
            after += had_room
    return waits


def unbroken(spec: PlaneSpec, steps: int) -> list[int]:
    """Return the digests of the same steps of a plane in one process to which nothing is done."""
    with LocalPlane(spec) as plane, Client(plane.handle(0)) as client:
        found = []
        for _ in range(steps):
            batch = client.next_batch()
            assert batch is not None
            found.append(batch_digest(batch))
        return found


def table_of(
    ordeal: Ordeal, same: bool, shadows: int, stops: Sequence[tuple[float, float]]
) -> Table:
    """Return the waits by what was done; a fault counts with its longest.

    Args:
        ordeal: What came of the faults.
        same: Whether all samples were those of an unbroken run.
        shadows: How many each loader had.
        stops: When the machine stood still, as ``MachineStops.spans`` has it.
    """
    spans = list(stops)

    def longest_s(waits: Sequence[Wait]) -> tuple[float, float]:
        return max(waits).seconds, max(
            max(0.0, wait.seconds - seconds_within(spans, wait.begin_s, wait.end_s))
            for wait in waits
        )

    rows = []
    for what, done in (
        ("its start", [[wait] for wait in ordeal.start]),
        ("nothing", [[wait] for wait in ordeal.calm]),
        *sorted(ordeal.struck.items()),
    ):
        felt_s, own_s = np.array([longest_s(waits) for waits in done]).T
        rows.append((what, str(len(done)), *_spread(felt_s), *_spread(own_s)))
    verdict = "the same samples as" if same else "OTHER SAMPLES THAN"
    return Table(
        columns=(
            *("what was done", "times", "median ms", "p99 ms", "longest ms"),
            *("less stops: median", "p99", "longest"),
        ),
        rows=tuple(rows),
        caption=f"Longest wait of a rank for a step, shadows {shadows}; "
        f"{len(ordeal.digests)} steps, {verdict} in an unbroken run",
    )


def _spread(waits_s: NDArray[np.float64]) -> tuple[str, ...]:
    return tuple(f"{1000 * float(np.quantile(waits_s, q)):.0f}" for q in (0.5, 0.99, 1.0))


def mix_for(
    corpus: MixedSources, *, ranks: int, loaders: int, shadows: int, url: str | None = None
) -> MixConfig:
    """Return a mix of small steps over the corpus, which lies below a URL or beside the mix."""
    mix = mix_of(
        corpus.names,
        corpus.weights,
        rows=8 * ranks,
        micro_rows=8,
        length=1024,
        runtime={"kind": "ray", "loaders": loaders, "shadows": shadows, "prefetch_steps": 4},
    )
    if url is None:
        return mix
    sources = {
        name: source.model_copy(update={"path": f"{url.rstrip('/')}/{source.path}"})
        for name, source in mix.sources.items()
    }
    return mix.model_copy(update={"sources": sources})


def put_sources(folder: Path, corpus: MixedSources, url: str) -> None:
    """Copy the shards of the corpus to a store."""
    for name in corpus.names:
        for path in sorted((folder / name).iterdir()):
            with fsspec.open(f"{url.rstrip('/')}/{name}/{path.name}", "wb") as out:
                out.write(path.read_bytes())


READING = """\
{count} faults from seed {seed}, each once the plane had recovered from the one before; {ranks} ranks, {loaders} source
loaders with {shadows} shadows each, {sources} sources of pre-tokenised parquet, steps of {tokens:,} tokens,
{step_ms:g} ms of the trainer's own time a step. A wait is that of `next_batch` in the rank that waited longest, over
all steps from the fault until the lost role was held again, every shadow stood ready and what was built before was
used up; of a start, that for each step until every shadow stood ready; of nothing, that for each of {calm} steps behind
a recovery. Less stops: without the time in which the machine did not run one of its cores, as one process a core{how}
saw it; in all {stops}. A sample that is lost or comes twice would show in the digest of its
step, which is compared with an unbroken run in one process."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--faults", "count", default=50, show_default=True, help="Faults in all.")
@click.option("--role", "roles", multiple=True, default=("loader",), show_default=True)
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    default=("kill",),
    show_default=True,
    type=click.Choice([*sorted(_SIGNALS), _FULL]),
)
@click.option(
    "--disk",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A small file system: the run's folder lies there, and --kind full fills it.",
)
@click.option("--shadows", default=1, show_default=True, type=click.IntRange(0, 2))
@click.option("--ranks", default=4, show_default=True, type=click.IntRange(1))
@click.option("--loaders", default=2, show_default=True, type=click.IntRange(1))
@click.option("--sources", default=8, show_default=True, type=click.IntRange(1))
@click.option("--sources-at", "url", help="Read them from here: they are put there first.")
@click.option("--step-ms", default=20.0, show_default=True, help="The trainer's own time a step.")
@click.option("--seed", default=0, show_default=True)
@click.option("--report/--no-report", default=True, show_default=True, help="Write the report.")
def main(  # noqa: PLR0913 -- options
    *,
    count: int,
    roles: tuple[str, ...],
    kinds: tuple[str, ...],
    disk: Path | None,
    shadows: int,
    ranks: int,
    loaders: int,
    sources: int,
    url: str | None,
    step_ms: float,
    seed: int,
    report: bool,
) -> None:
    """Strike processes of a running plane and compare every step with an unbroken run.

    \b
    Example:
      python -m benchmarks.faults.chaos --faults 20 --kind kill --kind stop --no-report
    """  # noqa: D301 -- click's own marker
    corpus = MixedSources(sources=sources, documents=2_000)
    if _FULL in kinds and disk is None:
        raise click.UsageError("--kind full needs --disk, a small file system that it may fill")
    faults = Faults(count=count, roles=roles, kinds=kinds, seed=seed, disk=disk)
    with tempfile.TemporaryDirectory() as made:
        build_sources(Path(made), corpus)
        if url is not None:
            put_sources(Path(made), corpus, url)
        mix = mix_for(corpus, ranks=ranks, loaders=loaders, shadows=shadows, url=url)
        tree, run_dir = ClientPlaceTree.of(dp=ranks), disk and disk / "run"
        spec = PlaneSpec(mix=mix, base_dir=Path(made), tree=tree, run_dir=run_dir)
        with MachineStops() as machine, open_ray_plane(spec) as plane:
            clients = [Client(plane.handle(rank)) for rank in range(ranks)]
            begun_s = time.monotonic()
            ordeal = survive(plane, clients, mix, faults, step_s=step_ms / 1000)
            took_s = time.monotonic() - begun_s
            stops, first = machine.spans(), machine.real_time
        whole = PlaneSpec(mix=mix, base_dir=Path(made), tree=ClientPlaceTree.of(dp=1))
        same = unbroken(whole, len(ordeal.digests)) == ordeal.digests
    table = table_of(ordeal, same, shadows, stops)
    stood = (
        f"{len(stops)} stops of {sum(end_s - begin_s for begin_s, end_s in stops):.1f} s "
        f"within {took_s:.0f} s"
    )
    print_table(table)
    click.echo(stood)
    if report:
        options = " ".join(
            [f"--faults {count}", *(f"--role {r}" for r in roles), *(f"--kind {k}" for k in kinds)]
            + [f"--ranks {ranks} --loaders {loaders} --sources {sources}"]
            + ([] if url is None else [f"--sources-at {url}"])
            + ([] if disk is None else ["--disk DISK"])
        )
        path = write_report(
            __file__, "chaos" if url is None else f"chaos_{url.partition('://')[0]}",
            "Waits of ranks while processes of the data plane are killed",
            f"python -m benchmarks.faults.chaos {options} --shadows {shadows} --step-ms {step_ms:g} --seed {seed}",
            [table],
            READING.format(
                count=count, seed=seed, ranks=ranks, loaders=loaders, shadows=shadows, sources=sources,
                tokens=mix.batch.tokens, step_ms=step_ms, calm=_CALM_STEPS, stops=stood,
                how=", before all others," if first else ", none of which goes before others,",
            ).replace("\n", " "),
        )  # fmt: skip
        click.echo(f"wrote {path.name}")
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
