"""A script of faults, or random ones, strikes a running data plane: every step must come, and be the same.

python -m benchmarks.faults.chaos --help
"""

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import click
import fsspec

from benchmarks.faults.ailing_store import AilingStore
from benchmarks.faults.hosts import Hosts, run_on_two_hosts
from benchmarks.faults.machine_stops import MachineStops
from benchmarks.faults.ordeal import CALM_STEPS, Ordeal, survive, table_of
from benchmarks.faults.schedule import (
    KINDS,
    OF_JOURNALS,
    OF_ROLES,
    OF_STORES,
    Fault,
    Faults,
    drawn,
    written,
)
from benchmarks.faults.striking import Job
from benchmarks.loaders.mixed_sources import MixedSources, build_sources, mix_of
from benchmarks.report import print_table, write_report
from omniload.actors.local.plane import LocalPlane
from omniload.actors.plane import PlaneSpec
from omniload.batch.digest import batch_digest
from omniload.client import Client
from omniload.mix.config import MixConfig
from omniload.plan.place_tree import ClientPlaceTree

__all__ = ["main", "mix_for", "put_sources", "unbroken"]

_FULL, _NETWORK = "full", "network"
_ANSWERS_AFTER_S = 0.02
"""Time of an answer of an object store."""
_FEW_ROWS, _ROWS = 100, 500
"""Documents of a row group: few if the store is struck, so that it is read all the time."""


def unbroken(spec: PlaneSpec, steps: int) -> list[int]:
    """Return the digests of the same steps of an undisturbed plane in one process."""
    with LocalPlane(spec) as plane, Client(plane.handle(0)) as client:
        found = []
        for _ in range(steps):
            batch = client.next_batch()
            assert batch is not None
            found.append(batch_digest(batch))
        return found


def mix_for(
    corpus: MixedSources,
    *,
    ranks: int,
    loaders: int,
    shadows: int,
    url: str | None = None,
    readers: int = 1,
) -> MixConfig:
    """Return a mix of small steps over the corpus, which lies below a URL or next to the mix.

    Its heaviest source has ``readers`` readers.
    """
    mix = mix_of(
        corpus.names,
        corpus.weights,
        rows=8 * ranks,
        micro_rows=8,
        length=1024,
        runtime={"kind": "ray", "loaders": loaders, "shadows": shadows, "prefetch_steps": 4},
        loader={"readers": {corpus.names[-1]: readers}} if readers > 1 else {},
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
{faults}, each once the plane had recovered from the one before; {trial.ranks} ranks, {trial.loaders} source loaders
with {trial.shadows} shadows each, {trial.sources} sources of pre-tokenised parquet{readers}, steps of {tokens:,}
tokens, {trial.step_ms:g} ms of the trainer's own time for a step. A wait is that of `next_batch` in the rank that
waited longest. For a fault it is counted over all steps until the lost role was held again, every shadow stood by and
the steps built before were used up. For a start it is that for each step until every shadow stood by. For nothing it
is that for each step between a recovery, {calm} steps at least, and the next fault. "Less stops" excludes the time in
which the machine did not run one of its cores, as one process on each core{how} saw it; in all {stops}. "Ended" and
"replaced within" are the longest times from the fault until the struck process had ended, and until another process
had replaced it. For a stopped process the end is when the stop was noticed; for a shadow the replacement is when the
new shadow stood by with its first blocks decoded. A starving process has neither, unless it was taken for one that
hangs. A lost or repeated sample would show in the digest of its step, which is compared with an unbroken run in one
process.{hosts}{store}{refusals}"""


@contextmanager
def _sources_at(
    folder: Path, corpus: MixedSources, url: str | None, kinds: set[str], hosts: Hosts | None
) -> Iterator[tuple[str | None, AilingStore | None]]:
    """Build the corpus, and put it where the job reads it."""
    build_sources(folder, corpus)
    if kinds & OF_STORES:
        here = () if hosts is None else (hosts.here,)
        with AilingStore(folder, _ANSWERS_AFTER_S, *here) as store:
            yield store.url, store
        return
    if url is not None:
        put_sources(folder, corpus, url)
    yield url, None


_ON_TWO_HOSTS = """\
The job was on two hosts, which are network namespaces with a node of Ray each. Shadows stood by on the other one,
which `network` cuts off. A loader that was a shadow serves from there, and is lost once it is silent for 10 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """The job of a trial, and its faults."""

    faults: Faults
    script: Sequence[Fault] | None
    """The given faults; ``None`` to draw them."""
    disk: Path | None
    url: str | None
    ranks: int
    loaders: int
    shadows: int
    sources: int
    readers: int
    step_ms: float

    @property
    def kinds(self) -> set[str]:
        """The kinds of faults that it has, or may have."""
        given = self.script
        return set(self.faults.kinds) if given is None else {fault.kind for fault in given}

    @property
    def corpus(self) -> MixedSources:
        """The corpus that the job trains on."""
        rows = _FEW_ROWS if self.kinds & OF_STORES else _ROWS
        return MixedSources(sources=self.sources, documents=2_000, group_rows=rows)

    def mix(self, url: str | None = None, hosts: Hosts | None = None) -> MixConfig:
        """Return the mix over sources that lie below a URL or next to the mix."""
        mix = mix_for(
            self.corpus,
            ranks=self.ranks,
            loaders=self.loaders,
            shadows=self.shadows,
            url=url,
            readers=self.readers,
        )
        if hosts is None:
            return mix
        on_both = mix.runtime.model_copy(update={"address": hosts.ray})
        return mix.model_copy(update={"runtime": on_both})

    def require(self) -> None:
        """Refuse options that contradict each other."""
        if _FULL in self.kinds and self.disk is None:
            raise click.UsageError("--kind full needs --disk, a small file system that it may fill")
        if _NETWORK in self.kinds and self.disk is not None:
            raise click.UsageError("--kind network has hosts that see no --disk; leave one out")
        if (of_store := self.kinds & OF_STORES) and self.url is not None:
            raise click.UsageError(
                f"--kind {min(of_store)} has a store of its own; leave --sources-at out"
            )

    def script_of(self, targets: Sequence[str]) -> Sequence[Fault]:
        """Return the faults, and print them as ``--script`` reads them."""
        try:
            script = drawn(self.faults, targets) if self.script is None else self.script
        except ValueError as error:
            raise click.UsageError(f"--role: {error}") from None
        for fault in script:
            if fault.kind in OF_ROLES and fault.role not in targets:
                there = ", ".join(targets)
                raise click.UsageError(
                    f"--script: {str(fault)!r} strikes what is not there; there are {there}"
                )
            click.echo(str(fault))
        return script

    def command(self) -> str:
        """Return the command line that repeats it."""
        drawn_by = (
            *(f"--faults {self.faults.count}", *(f"--role {r}" for r in self.faults.roles)),
            *(f"--kind {k}" for k in self.faults.kinds),
        )
        words = (
            *(drawn_by if self.script is None else ("--script SCRIPT",)),
            f"--ranks {self.ranks} --loaders {self.loaders} --sources {self.sources}",
            *([] if self.readers == 1 else [f"--readers {self.readers}"]),
            *([] if self.url is None else [f"--sources-at {self.url}"]),
            *([] if self.disk is None else ["--disk DISK"]),
            f"--shadows {self.shadows} --step-ms {self.step_ms:g} --seed {self.faults.seed}",
        )
        return f"python -m benchmarks.faults.chaos {' '.join(words)}"

    def told(self) -> str:
        """Return the faults of the trial, in words."""
        if self.script is None:
            return f"{self.faults.count} faults from seed {self.faults.seed}"
        return f"The faults of a script ({'; '.join(map(str, self.script))})"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """The result of a trial."""

    ordeal: Ordeal
    same: bool
    """Whether all samples were those of an unbroken run."""
    stops: list[tuple[float, float]]
    """Times at which the machine stood still."""
    first: bool
    """Whether the processes that watch the machine had priority over all others."""
    took_s: float
    counts: dict[str, int] | None
    """Requests that our own store answered, refused, and answered slowly."""

    def stood(self) -> str:
        """Return how long the machine stood still, in words."""
        seconds = sum(end_s - begin_s for begin_s, end_s in self.stops)
        return f"{len(self.stops)} stops of {seconds:.1f} s within {self.took_s:.0f} s"

    def of_store(self) -> str:
        """Return what happened at the store, if it is our own."""
        if self.counts is None:
            return ""
        return (
            f" The store, an HTTP server that takes {1000 * _ANSWERS_AFTER_S:.0f} ms for an answer, answered "
            f"{self.counts['answered']} requests, refused {self.counts['refused']}, and answered "
            f"{self.counts['slow']} ten times slower."
        )

    def of_refusals(self) -> str:
        """Return the refused journals, in words."""
        if not (refusals := self.ordeal.refusals):
            return ""
        return (
            f" {len(refusals)} planes refused a damaged journal by name, and another plane resumed from the "
            f"state before it, which the wait includes. The last message: {refusals[-1]}."
        )


def _outcome_of(trial: _Trial, made: Path, hosts: Hosts | None) -> _Outcome:
    """Run a trial, with its corpus in a folder."""
    with _sources_at(made, trial.corpus, trial.url, trial.kinds, hosts) as (url, store):
        mix, disk = trial.mix(url, hosts), trial.disk
        kept = made / "run" if trial.kinds & OF_JOURNALS else None
        spec = PlaneSpec(
            mix=mix,
            base_dir=made,
            tree=ClientPlaceTree.of(dp=trial.ranks),
            run_dir=kept if disk is None else disk / "run",
        )
        job_of = Job(spec, ranks=trial.ranks, store=store, disk=disk, hosts=hosts)
        with MachineStops() as machine, job_of as job:
            begun_s = time.monotonic()
            ordeal = survive(
                *(job, mix, trial.script_of),
                step_s=trial.step_ms / 1000,
                seed=trial.faults.seed,
                says=click.echo,
            )
            took_s = time.monotonic() - begun_s
            stops, first = machine.spans(), machine.real_time
        counts = None if store is None else store.counts()
        # The reference reads a copy of the sources that no fault of a store reaches.
        beside = trial.mix(None if store is not None else url)
        whole = PlaneSpec(mix=beside, base_dir=made, tree=ClientPlaceTree.of(dp=1))
        same = unbroken(whole, len(ordeal.digests)) == ordeal.digests and not ordeal.others
    return _Outcome(
        ordeal=ordeal, same=same, stops=stops, first=first, took_s=took_s, counts=counts
    )


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--script",
    type=click.File(),
    help="Faults in the printed form of drawn ones: lines of STEP ROLE KIND [SECONDS]; - for standard input.",
)
@click.option(
    "--faults", "count", default=50, show_default=True, help="Drawn faults, without --script."
)
@click.option("--role", "roles", multiple=True, default=("loader",), show_default=True)
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    default=("kill",),
    show_default=True,
    type=click.Choice(list(KINDS)),
)
@click.option(
    "--disk",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder on a small file system for the run's folder; --kind full fills it.",
)
@click.option("--shadows", default=1, show_default=True, type=click.IntRange(0, 2))
@click.option("--ranks", default=4, show_default=True, type=click.IntRange(1))
@click.option("--loaders", default=2, show_default=True, type=click.IntRange(1))
@click.option("--sources", default=8, show_default=True, type=click.IntRange(1))
@click.option(
    "--readers",
    default=1,
    show_default=True,
    type=click.IntRange(1, 8),
    help="Readers of the heaviest source.",
)
@click.option(
    "--sources-at",
    "url",
    help="Store to which the sources are copied, and from which they are read.",
)
@click.option(
    "--step-ms", default=20.0, show_default=True, help="The trainer's own time for a step."
)
@click.option("--seed", default=0, show_default=True)
@click.option("--report/--no-report", default=True, show_default=True, help="Write the report.")
@click.option(
    "--name", default="chaos", show_default=True, help="Further word in the name of the report."
)
def main(  # noqa: PLR0913 -- options
    *,
    script: IO[str] | None,
    count: int,
    roles: tuple[str, ...],
    kinds: tuple[str, ...],
    seed: int,
    report: bool,
    name: str,
    **words: Any,  # noqa: ANN401 -- fields of a trial
) -> None:
    """Strike a running plane and compare every step with an unbroken run.

    \b
    Example:
      python -m benchmarks.faults.chaos --faults 20 --kind kill --kind stop --no-report
    """  # noqa: D301 -- click's own marker
    faults = Faults(count=count, roles=roles, kinds=kinds, seed=seed)
    try:
        given = None if script is None else written(script.read())
    except ValueError as error:
        raise click.UsageError(f"--script: {error}") from None
    trial = _Trial(faults=faults, script=given, **words)
    trial.require()
    hosts = Hosts.known()
    if _NETWORK in trial.kinds and hosts is None:
        again = [sys.executable, "-m", "benchmarks.faults.chaos", *sys.argv[1:]]
        raise SystemExit(run_on_two_hosts(again, "\n".join(map(str, given or ()))))
    with tempfile.TemporaryDirectory() as made:
        outcome = _outcome_of(trial, Path(made), hosts)
    table = table_of(outcome.ordeal, outcome.same, trial.shadows, outcome.stops)
    print_table(table)
    click.echo(f"{outcome.stood()}{outcome.of_store()}{outcome.of_refusals()}")
    if report:
        path = write_report(
            __file__, name, "Waits of ranks while a data plane is struck", trial.command(), [table],
            READING.format(
                trial=trial, faults=trial.told(), calm=CALM_STEPS, tokens=8 * 1024 * trial.ranks,
                readers="" if trial.readers == 1 else f", the heaviest with {trial.readers} readers",
                stops=outcome.stood(), hosts="" if hosts is None else _ON_TWO_HOSTS,
                store=outcome.of_store(), refusals=outcome.of_refusals(),
                how=", before all others," if outcome.first else ", none of which goes before others,",
            ).replace("\n", " "),
        )  # fmt: skip
        click.echo(f"wrote {path.name}")
    if not outcome.same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
