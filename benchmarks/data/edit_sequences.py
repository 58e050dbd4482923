"""Runs that are edited, killed and resumed elsewhere again and again: whether samples are lost or repeated.

python -m benchmarks.data.edit_sequences --help
"""

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import click

from benchmarks.report import Table, print_table, write_report
from tests.support.plane.edits.edit_sequences import EditedRun, run_sequence

__all__ = ["Found", "found_in", "main"]


@dataclass(slots=True)
class Found:
    """Findings of the sequences that ran."""

    sequences: int = 0
    edits: Counter[str] = field(default_factory=Counter)
    """Edits that took effect, by kind."""
    refused: int = 0
    lives: int = 0
    killed: int = 0
    steps: int = 0
    """Steps that were trained on; a step that another life trained on again counts once."""
    tokens: int = 0
    broken: dict[int, str] = field(default_factory=dict)
    """Broken promises, by seed."""

    def take(self, run: EditedRun) -> None:
        """Count a sequence that kept its promises."""
        self.edits.update(edit.change.kind for edit in run.history.edits)
        self.refused += run.refused
        self.lives += run.lives
        self.killed += run.killed
        self.steps += len(run.steps)
        self.tokens += run.found().total()

    def table(self) -> Table:
        """Return the events and their numbers."""
        return Table(
            caption=f"{self.sequences:,} sequences, {len(self.broken):,} of them lost or repeated a token",
            columns=("what came about", "times"),
            rows=(
                ("lives of a run", f"{self.lives:,}"),
                ("a role is killed", f"{self.killed:,}"),
                *(
                    (f"an edit: {kind.replace('_', ' ')}", f"{count:,}")
                    for kind, count in self.edits.most_common()
                ),
                ("an edit is refused", f"{self.refused:,}"),
                ("steps trained on", f"{self.steps:,}"),
                ("tokens in them, each compared", f"{self.tokens:,}"),
            ),
        )


def found_in(seeds: Iterable[int]) -> Found:
    """Run the sequence of each seed."""
    found = Found()
    for seed in seeds:
        found.sequences += 1
        try:
            found.take(run_sequence(seed))
        except Exception as error:  # noqa: BLE001 -- whatever breaks a sequence is what is looked for
            found.broken[seed] = f"{type(error).__name__}: {str(error)[:300]}"
            click.echo(f"sequence {seed}: {found.broken[seed]}", err=True)
        if found.sequences % 100 == 0:
            click.echo(f"{found.sequences:,} sequences, {len(found.broken)} broken", err=True)
    return found


READING = """\
A sequence is a run of two or more lives. Each life resumes from a state that an earlier life saved, in a world of
another size. Roles are killed in it, and the mix is changed while steps are planned and while nothing runs. A model
without a planner goes through the records of every source by position and computes which tokens are due. Each token
must be in one step, wait for a row, or be in a step that was skipped. {seconds:,.0f} s of one processor."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--sequences", default=1_000, show_default=True, type=click.IntRange(1))
@click.option("--first", default=0, show_default=True, type=click.IntRange(0), help="First seed.")
@click.option("--report/--no-report", default=True, show_default=True, help="Write the report.")
def main(sequences: int, first: int, report: bool) -> None:
    """Edit, kill and resume random runs, and compare each token with a model.

    \b
    Example:
      python -m benchmarks.data.edit_sequences --sequences 20 --no-report
    """  # noqa: D301 -- click's own marker
    began = time.process_time()
    found = found_in(range(first, first + sequences))
    table = found.table()
    print_table(table)
    if report:
        path = write_report(
            __file__,
            "edit_sequences",
            "Random sequences of edits with kills and other worlds",
            f"python -m benchmarks.data.edit_sequences --sequences {sequences} --first {first}",
            [table],
            READING.format(seconds=time.process_time() - began).replace("\n", " "),
        )
        click.echo(f"wrote {path.name}")
    if found.broken:
        raise click.ClickException(f"{len(found.broken)} sequences broke: {sorted(found.broken)}")


if __name__ == "__main__":
    main()
