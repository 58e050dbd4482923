"""A change of the mix of a running job: when it is answered, and when every rank has it.

python -m benchmarks.data.live_change --help
"""

import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import click
import yaml

from benchmarks.loaders.mixed_sources import MixedSources, build_sources, mix_of
from benchmarks.report import Table, print_table, write_report
from omniload.actors.local.plane import LocalPlane
from omniload.actors.plane import DataPlane, PlaneSpec
from omniload.actors.ray.plane import RayPlane
from omniload.client import Client
from omniload.commands.edits.asking import change_mix
from omniload.mix.config import load_mix
from omniload.mix.edits.edit import SetWeights
from omniload.mix.run_record import write_run_record
from omniload.plan.place_tree import ClientPlaceTree

__all__ = ["Change", "Rank", "main", "table_of"]

_CORPUS = MixedSources(sources=4, documents=2_000)
_LENGTH, _BEGUN = 4_096, 6
"""Steps that ranks take before the first change."""
_TIMES_S = (0.02, 0.1, 0.25, 1.0, 5.0)
_ROWS = 2
"""Rows of a rank in a step."""
_WAIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change, and its results."""

    answered_s: float
    """Time from the request to the answer."""
    given: int
    """Steps that ranks had when the change took effect, counted from the next step of the slowest rank."""
    effective_s: float
    """Time from the request until every rank had its batch of the first step with the change."""
    agreed: bool
    """Whether ranks agree on that step and on the step before it: the first has the new mix, the second the old one."""


@dataclass(slots=True)
class Rank:
    """Record of a rank: for each step, the time of its batch, and the tokens of the whole step by source."""

    seen: dict[int, tuple[float, Mapping[str, int]]] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def train(self, client: Client, step_s: float, ended: threading.Event) -> None:
        """Take a batch every ``step_s`` until ``ended``."""
        while not ended.wait(step_s):
            batch = client.next_batch(_WAIT_S)
            assert batch is not None, "the run has no end"
            with self.changed:
                self.seen[batch.step] = time.perf_counter(), batch.tokens_by_source
                self.changed.notify_all()

    def at(self, step: int) -> tuple[float, Mapping[str, int]]:
        """Wait for a step; return the time of its batch, and the tokens of its sources."""
        with self.changed:
            if not self.changed.wait_for(lambda: step in self.seen, _WAIT_S):
                raise click.ClickException(f"no batch of step {step} within {_WAIT_S:g} s")
            return self.seen[step]


def changed(run: Path, ranks: Sequence[Rank], names: Sequence[str], turn: int) -> Change:
    """Exchange one half of the sources for the other; return when that took effect."""
    half = names[turn % 2 :: 2]
    weights = {name: float(name in half) for name in names}
    began_s = time.perf_counter()
    taken = change_mix(run, SetWeights(weights=weights), None, _WAIT_S)
    answered_s = time.perf_counter() - began_s
    step = taken.edit.step
    first = [rank.at(step) for rank in ranks]
    before = [rank.at(step - 1)[1] for rank in ranks]
    return Change(
        answered_s=answered_s,
        given=step - taken.slowest,
        effective_s=max(had_s for had_s, _ in first) - began_s,
        agreed=all(tokens == first[0][1] for _, tokens in first)
        and all(tokens == before[0] for tokens in before)
        and _part_of(half, before[0]) < 0.5 < _part_of(half, first[0][1]),
    )


def _part_of(names: Sequence[str], tokens: Mapping[str, int]) -> float:
    return sum(tokens[name] for name in names) / sum(tokens.values())


def changes_of(
    folder: Path,
    step_s: float,
    num_ranks: int,
    changes: int,
    open_plane: Callable[[PlaneSpec], DataPlane],
) -> list[Change]:
    """Run a job of ``num_ranks`` ranks and change its mix again and again."""
    run = folder / f"run-{open_plane.__name__}-{step_s:g}"
    path = folder / "mix.yaml"
    mix = mix_of(
        _CORPUS.names,
        (1.0,) * _CORPUS.sources,
        rows=_ROWS * num_ranks,
        micro_rows=_ROWS,
        length=_LENGTH,
    )
    path.write_text(yaml.safe_dump(mix.model_dump(mode="json")), encoding="utf-8")
    write_run_record(run, path, {"dp": num_ranks})
    mix, base_dir = load_mix(path)
    tree = ClientPlaceTree.of(dp=num_ranks)
    spec = PlaneSpec(mix=mix, base_dir=base_dir, tree=tree, run_dir=run)
    ranks, ended = [Rank() for _ in range(num_ranks)], threading.Event()
    with open_plane(spec) as plane:
        threads = [
            threading.Thread(
                target=rank.train, args=(Client(plane.handle(i)), step_s, ended), daemon=True
            )
            for i, rank in enumerate(ranks)
        ]
        for thread in threads:
            thread.start()
        try:
            for rank in ranks:
                rank.at(_BEGUN)
            # The first change is left out, because the mix before it has all sources.
            found = [changed(run, ranks, _CORPUS.names, turn) for turn in range(changes + 1)]
            return found[1:]
        finally:
            ended.set()
            for thread in threads:
                thread.join(_WAIT_S)


def table_of(found: Mapping[float, Sequence[Change]], ranks: int, where: str) -> Table:
    """Return medians and the most, by the time of a rank's step."""
    rows = []
    for step_s, changes in found.items():
        answered = [change.answered_s for change in changes]
        effective = [change.effective_s for change in changes]
        given = [change.given for change in changes]
        rows.append(
            (
                f"{step_s:g}",
                len(changes),
                f"{median(answered):.2f} ({max(answered):.2f})",
                f"{median(given):g} ({max(given)})",
                f"{median(effective):.2f} ({max(effective):.2f})",
                f"{sum(change.agreed for change in changes)} of {len(changes)}",
            )
        )
    return Table(
        columns=(
            *("a step, s", "changes", "answered after, s", "steps that ranks had"),
            *("every rank has it after, s", "held from its step on, on every rank"),
        ),
        rows=tuple(rows),
        caption=f"{ranks} ranks {where}, medians, the most in brackets",
    )


READING = """\
The change is that of `omniload mix set`, timed from the request on. Ranks are threads that take a batch of {rows}
rows of {length:,} tokens whenever their step has passed. As many steps are built ahead as without `prefetch_steps`:
64. A change takes effect from the first step that no rank has received. Ranks through Ray fetch the batches of a
quarter of a second at once, at least one, and fetch the next ones meanwhile. If two steps have taken half a second or
more each, fetched batches are lent, and confirmed when a rank takes them. Ranks of one process take each batch on
request. Each change draws the sources that the previous one did not. Documents that were drawn before it and found no
row yet come with its first steps. A change is requested when the previous one has reached every rank, at the
beginning of a step, so it waits for the whole of that step."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--ranks", default=4, show_default=True, type=click.IntRange(2, 64))
@click.option("--changes", default=10, show_default=True, type=click.IntRange(1))
@click.option("--report/--no-report", default=True, show_default=True, help="Write the report.")
def main(ranks: int, changes: int, report: bool) -> None:
    """Measure how soon a change of a mix takes effect.

    \b
    Example:
      python -m benchmarks.data.live_change --changes 3 --no-report
    """  # noqa: D301 -- click's own marker
    with tempfile.TemporaryDirectory() as made:
        build_sources(Path(made), _CORPUS)
        tables = [
            table_of(
                {t: changes_of(Path(made), t, ranks, changes, plane) for t in _TIMES_S},
                ranks,
                where,
            )
            for plane, where in ((LocalPlane, "of one process"), (RayPlane, "through Ray"))
        ]
    for table in tables:
        print_table(table)
    if report:
        path = write_report(
            __file__,
            "live_change",
            "A change of the mix of a running job",
            f"python -m benchmarks.data.live_change --ranks {ranks} --changes {changes}",
            tables,
            READING.format(rows=_ROWS, length=_LENGTH).replace("\n", " "),
        )
        click.echo(f"wrote {path.name}")


if __name__ == "__main__":
    main()
