"""``omniload mix drawn``: the records that a run had drawn, for a later run that leaves them out."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import click

from omniload.actors.plane import PlaneSpec
from omniload.base.errors import ConfigError, StateError
from omniload.base.reading import read_small_file
from omniload.base.state import Json
from omniload.commands.display import Cell, emit_json, output, say, table
from omniload.commands.opening import open_spec
from omniload.commands.options import cache_option, json_option
from omniload.mix.edits.edits_file import read_history
from omniload.mix.journal.place import journal_of
from omniload.mix.journal.reading import read_journal
from omniload.mix.progress import state_json_at
from omniload.mix.run_record import read_run_record
from omniload.mix.state import MixState
from omniload.plan.place_tree import ClientPlaceTree
from omniload.simulation.rehearsal import Rehearsal
from omniload.source.access.index_folders import index_folder
from omniload.source.distinct.drawn_before import DrawnSoFar, drawn_so_far, write_drawn
from omniload.source.formats.opening import open_format
from omniload.source.spec import SourceSpec

__all__ = ["drawn"]

_MOST_STATE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """Report on a source."""

    source: str
    epoch: int
    """Present epoch, from 0."""
    records: int
    drawn: int
    """Records drawn in that epoch."""
    again: int
    """Records that were begun, and are drawn again from their beginning."""
    file: str | None
    """File for ``drawn_before`` to name; ``None`` if the next epoch is a whole one."""

    @classmethod
    def of(cls, name: str, found: DrawnSoFar, path: Path) -> Self:
        """Return the report on a source; ``path`` is where its file would be."""
        count, records = found.drawn.total(), found.drawn.count
        # After a completely drawn epoch comes a whole one, as before one that is not begun.
        file = str(path) if 0 < count < records else None
        return cls(
            source=name,
            epoch=found.epoch,
            records=records,
            drawn=count,
            again=found.again,
            file=file,
        )


@click.command
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--step",
    type=click.IntRange(min=0),
    help="Step of the checkpoint that the next run begins with; the steps before it count as drawn.",
)
@click.option(
    "--state",
    type=click.Path(path_type=Path),
    help="In place of --step, for a run without a folder: a state of the loader as JSON; RUN is then a mix file.",
)
@click.option(
    "--output",
    "-o",
    "folder",
    type=click.Path(path_type=Path),
    required=True,
    help="A new folder, for one file per source.",
)
@cache_option
@json_option
def drawn(
    run: Path,
    step: int | None,
    state: Path | None,
    folder: Path,
    cache_dir: Path | None,
    as_json: bool,
) -> None:
    """Write which records RUN has drawn, for a run with other rows, another batch or another tokenizer.

    RUN is the folder of a run, or its mix file with --state. For each source in the middle of an epoch, the command
    writes a file of the records that the epoch has drawn. A mix that names this file in drawn_before leaves the records
    out of its first epoch, so no record is drawn twice before all others were drawn once. A document that was drawn
    only in part, or waits for a row, is drawn again as a whole.

    \b
    Example:
      omniload mix drawn runs/short --step 12000 -o before
      omniload mix drawn mix.yaml --state state.json -o before
    """  # noqa: D301 -- click's own marker
    spec = _spec_at(run, step, state, cache_dir).with_edits()
    # The planner takes the state over, which refuses a state of another mix or data.
    left, mix = Rehearsal(spec).state, spec.history.latest
    sources = [SourceSpec.drawn(mix, name, spec.base_dir, spec.cache_dir) for name in mix.names]
    told, to_write = [], {}
    for number, source in enumerate(sources):
        found = _found(source, left, number)
        path = folder / f"{source.name}.arrow"
        told.append(_Told.of(source.name, found, path))
        if told[-1].file is not None:
            to_write[path] = found
    try:
        # A new folder is required: among files of another step, the files of this step could not be recognised.
        folder.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(f"{folder}: is there already; give a folder that is not") from None
    for path, found in to_write.items():
        write_drawn(path, found.by_shard())
    if as_json:
        emit_json({"step": left.step, "sources": [asdict(each) for each in told]})
    else:
        _print(told, left.step)


def _spec_at(run: Path, step: int | None, state: Path | None, cache_dir: Path | None) -> PlaneSpec:
    """Return a run that would continue from where the given one stopped."""
    if (step is None) == (state is None) or run.is_dir() != (state is None):
        raise ConfigError(
            f"{run}: give the folder of a run and --step, or its mix file and --state, a state of the loader as JSON"
        )
    if state is not None:
        spec = open_spec(run, dp=1, cache_dir=cache_dir)
        return PlaneSpec(
            mix=spec.mix,
            base_dir=spec.base_dir,
            tree=spec.tree,
            state=_state_in(state),
            cache_dir=spec.cache_dir,
        )
    assert step is not None, "one of them is given"
    life = read_run_record(run).life_at(step)
    mix = life.mix()
    base, records = read_journal(journal_of(run), step)
    return PlaneSpec(
        mix=mix,
        base_dir=life.base_dir,
        tree=ClientPlaceTree.of(),
        state=state_json_at(read_history(run, mix), base, records, step),
        cache_dir=cache_dir or index_folder(life.mix_path),
    )


def _state_in(path: Path) -> Mapping[str, Json]:
    content = read_small_file(path, most_bytes=_MOST_STATE_BYTES, what="a state of the loader")
    try:
        state: Mapping[str, Json] = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise StateError(
            f"{path}: is no JSON ({error!s:.100}); write json.dump(loader.state_dict(), file)"
        ) from error
    # The run that continues from it checks the content.
    return state


def _found(source: SourceSpec, left: MixState, number: int) -> DrawnSoFar:
    """Return the records drawn of a source."""
    # A source that an edit has just added may not have been drawn from.
    cursor = left.cursors_S[number] if number < len(left.cursors_S) else (0, 0, 0)
    waiting = left.carried.positions_P[left.carried.sources_P == number].tolist()
    opened = open_format(source)
    units = opened.format.units()
    return drawn_so_far(source, units, opened.files, cursor=cursor, waiting=waiting)


def _print(told: list[_Told], step: int) -> None:
    rows: list[list[Cell]] = [
        [
            each.source,
            f"{each.epoch:,}",
            f"{each.records:,}",
            f"{each.drawn:,}",
            f"{each.again:,}",
            each.file or "a whole epoch is next",
        ]
        for each in told
    ]
    columns = [("source", False), ("epoch", True), ("records", True), ("drawn", True)]
    console = output()
    console.print(table("", [*columns, ("begun", True), ("drawn_before", False)], rows))
    say(
        console,
        f"before step {step:,}; name each file by drawn_before of its source in the next mix, and keep them with it",
    )
