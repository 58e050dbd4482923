"""Results of a change of a run's mix, printed on the terminal."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from omniload.commands.display import Cell, colour_of, emit_json, output, say, table
from omniload.commands.edits.asking import change_mix
from omniload.mix.edits.answers import EditTaken
from omniload.mix.edits.edit import Change, said_of
from omniload.mix.edits.edits_file import read_history
from omniload.mix.run_record import read_run_record
from omniload.mix.schema.stages import said_epochs

__all__ = ["ask", "change_and_say", "say_what_stays"]

_SHOWN = 40
"""Most sources in a table: those whose share changes most."""


def ask(
    run: Path, change: Change, at: int | None, timeout_s: float, *, as_json: bool
) -> EditTaken | None:
    """Call ``change_mix`` and return the edit or, with ``as_json``, print it and return ``None``."""
    taken = change_mix(run, change, at, timeout_s)
    if not as_json:
        return taken
    emit_json(taken.model_dump(mode="json"))
    return None


def change_and_say(
    run: Path, change: Change, at: int | None, timeout_s: float, as_json: bool
) -> None:
    """Have the mix changed, and print what every source gets by the edit, and from which step on."""
    if (taken := ask(run, change, at, timeout_s, as_json=as_json)) is None:
        return
    console = output()
    # In a run that draws amounts, undoing a skip changes no amount.
    if taken.amounts or taken.after:
        console.print(_amounts(taken) if taken.amounts else _shares(taken))
    edit = taken.edit
    undoes = "" if edit.undoes is None else f"undoes edit {_named(run, edit.undoes)}, and "
    say(console, f"edit {edit.revision} {undoes}holds from step {edit.step:,} on")
    say_what_stays(console, taken)
    if taken.taken_back:
        numbers = ", ".join(map(str, taken.taken_back))
        say(
            console,
            f"a stage that had begun by epochs waits again; no longer in force: edits {numbers}",
        )
    if taken.until is not None:
        say(console, f"the stage from step {taken.until:,} on holds from there as it was declared")
    if taken.until_epochs is not None:
        waits = said_epochs(taken.until_epochs)
        say(console, f"the next stage waits until {waits}, and holds from there as it was declared")


def _named(run: Path, revision: int) -> str:
    """Return an edit of a run by its number and its words, because an undo names neither."""
    history = read_history(run, read_run_record(run).last.mix())
    return f"{revision} ({said_of(history.edits[revision - 1].change)})"


def say_what_stays(console: Console, taken: EditTaken) -> None:
    """Print which steps keep the earlier mix, and what is uncertain about the edit."""
    if taken.planned > taken.slowest:
        say(
            console,
            f"steps before {taken.planned:,} were planned already and keep the mix they have",
        )
    if taken.unsure:
        say(console, taken.unsure)


def _amounts(taken: EditTaken) -> Any:  # noqa: ANN401 -- rich's table
    rows: list[list[Cell]] = [
        [Text(name, colour_of(number)), before or "none", after or "no more"]
        for number, (name, (before, after)) in enumerate(list(taken.amounts.items())[:_SHOWN])
    ]
    columns = [("source", False), ("of the run before", True), ("of the run", True)]
    return table(f"step {taken.edit.step:,}", columns, rows)


def _shares(taken: EditTaken) -> Any:  # noqa: ANN401 -- rich's table
    names = list(taken.after)
    moved = sorted(names, key=lambda n: -abs(taken.after[n] - taken.before.get(n, 0.0)))
    # Chosen by how far they move, in the order of all tables.
    shown = sorted(moved[:_SHOWN], key=names.index)
    rows: list[list[Cell]] = [
        [
            Text(name, colour_of(names.index(name))),
            f"{taken.before.get(name, 0.0):.3%}",
            f"{taken.after[name]:.3%}",
        ]
        for name in shown
    ]
    columns = [("source", False), ("share before", True), ("share", True)]
    return table(f"step {taken.edit.step:,}", columns, rows)
