"""``omniload mix diff``: the differences between two mix files or runs, and from which step on."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from omniload.base.errors import ConfigError
from omniload.base.secrets import without_secrets
from omniload.commands.display import Cell, emit_json, output, say, table
from omniload.commands.options import json_option
from omniload.mix.config import load_mix
from omniload.mix.edits.comparison import (
    Difference,
    MixDifference,
    differences_of,
    first_other,
)
from omniload.mix.edits.edit import SkipShard
from omniload.mix.edits.edits_file import read_history
from omniload.mix.edits.history import History
from omniload.mix.edits.wanted import later_keys
from omniload.mix.journal.place import journal_of
from omniload.mix.journal.reading import read_base, read_digests
from omniload.mix.progress import fingerprint_in
from omniload.mix.run_record import read_run_record

__all__ = ["diff"]

_SHOWN = 40
_WIDTH = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    history: History
    fingerprint: dict[str, str]
    """Fingerprint; empty for a file, whose data is not looked at."""
    digests: Iterator[tuple[int, str]]
    """Digests of each step, in order, read from the journal; none for a file."""


@click.command
@click.argument("one", type=click.Path(path_type=Path))
@click.argument("other", type=click.Path(path_type=Path))
@json_option
def diff(one: Path, other: Path, as_json: bool) -> None:
    """Compare ONE with OTHER: each a mix file or the folder of a run.

    The command compares keys, sources and amounts, and finds the first step at which a source has another share, or at
    which other files are left out. For two runs, it also compares their data and finds the first step with other
    samples. It reads no data.

    \b
    Example:
      omniload mix diff examples/quickstart.yaml demo/corpus/mix.yaml
      omniload mix diff runs/a runs/b
    """  # noqa: D301 -- click's own marker
    sides = _side(one), _side(other)
    found = differences_of(sides[0].history, sides[1].history)
    data = [
        Difference(key=key, one=sides[0].fingerprint.get(key), other=sides[1].fingerprint.get(key))
        for key in sorted({*sides[0].fingerprint, *sides[1].fingerprint})
        # Nothing is known of a file's data, so a run would differ from it in every key.
        if all(side.fingerprint for side in sides)
        and sides[0].fingerprint.get(key) != sides[1].fingerprint.get(key)
    ]
    common, step = first_other(sides[0].digests, sides[1].digests)
    if as_json:
        emit_json(
            {
                "keys": [_json(each) for each in found.keys],
                "taken_at_next_start": later_keys(*(side.history.latest for side in sides)),
                "shares_differ_from_step": found.first_step,
                "shares": found.shares,
                "amounts": found.amounts,
                "left_out_differs_from_step": found.left_out_step,
                "left_out": found.left_out,
                "fingerprint": [_json(each) for each in data],
                "steps_compared": common,
                "samples_differ_from_step": step,
            }
        )
        return
    console = output()
    rows: list[list[Cell]] = [
        [each.key, _shown(each.one), _shown(each.other)] for each in (*found.keys, *data)[:_SHOWN]
    ]
    if rows:
        console.print(table("", [("key", False), (str(one), False), (str(other), False)], rows))
    else:
        say(console, "no key differs")
    if (left := len(found.keys) + len(data) - len(rows)) > 0:
        say(console, f"and {left} more; --json has all")
    for line in (_said_of_keys(sides), _said_of_draws(sides, found), _said_of_shards(sides, found)):
        if line:
            say(console, line)
    if common:
        said = (
            "all of them held the same samples"
            if step is None
            else f"step {step:,} is the first with other samples"
        )
        say(console, f"{common:,} steps are in both journals; {said}")
    elif all(side.fingerprint for side in sides):
        say(console, "no step is in both journals, so no samples were compared")


def _said_of_keys(sides: tuple[_Side, _Side]) -> str:
    later = later_keys(*(side.history.latest for side in sides))
    return f"of the keys a run takes at its next start: {', '.join(later[:_SHOWN])}" * bool(later)


def _said_of_draws(sides: tuple[_Side, _Side], found: MixDifference) -> str:
    """Return messages about differences of weights and amounts."""
    gives = [side.history.base.mix.amounts is not None for side in sides]
    if any(gives) and not all(gives):
        which = "the first gives" if gives[0] else "the second gives"
        return f"{which} amounts of sources, the other weights: their shares are not compared"
    if all(gives):
        moved = ", ".join(
            f"{n} {a or 'nothing'} and {b or 'nothing'}"
            for n, (a, b) in list(found.amounts.items())[:_SHOWN]
        )
        return f"amounts differ: {moved}" if moved else "amounts are the same"
    if found.first_step is None:
        return "shares are the same in every step"
    shares = ", ".join(
        f"{n} {a:.2%} and {b:.2%}" for n, (a, b) in list(found.shares.items())[:_SHOWN]
    )
    return f"shares differ from step {found.first_step:,} on: {shares}"


def _said_of_shards(sides: tuple[_Side, _Side], found: MixDifference) -> str:
    if found.left_out_step is None:
        return ""
    skips = [e.change for s in sides for e in s.history.edits if isinstance(e.change, SkipShard)]
    files = {(skip.source, str(skip.number)): skip.file.rpartition("/")[2] for skip in skips}

    def named(source: str, numbers: str | None) -> str:
        known = [files[source, number] for number in numbers.split(", ")] if numbers else []
        return ", ".join(without_secrets(file) for file in known) or "none"

    listed = "; ".join(
        f"of {n} {named(n, a)} and {named(n, b)}"
        for n, (a, b) in list(found.left_out.items())[:_SHOWN]
    )
    return f"from step {found.left_out_step:,} on other files are left out: {listed}"


def _side(path: Path) -> _Side:
    if not path.exists():
        raise ConfigError(f"{path}: no such file or folder; give a mix file or the folder of a run")
    # Any folder counts as a run, so that its missing parts are reported by name.
    if not path.is_dir():
        return _Side(history=History(load_mix(path)[0]), fingerprint={}, digests=iter(()))
    mix = read_run_record(path).last.mix()
    journal = journal_of(path)
    return _Side(
        history=read_history(path, mix),
        fingerprint=fingerprint_in(read_base(journal)),
        digests=read_digests(journal),
    )


def _json(each: Difference) -> dict[str, object]:
    shown = asdict(each)
    return {k: without_secrets(v) if isinstance(v, str) else v for k, v in shown.items()}


def _shown(value: object) -> str:
    return "" if value is None else without_secrets(str(value))[:_WIDTH]
