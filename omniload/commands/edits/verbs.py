"""``omniload mix set``, ``add``, ``retire``, ``undo``: the mix of a run, changed while it is trained on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from pydantic import Field, ValidationError
from rich.console import Console
from rich.text import Text
from typing_extensions import override

from omniload.base.cli import FiniteRange
from omniload.base.config import StrictModel, load_yaml
from omniload.base.errors import ConfigError
from omniload.base.units import decimal_of
from omniload.commands.display import Cell, colour_of, emit_json, output, say, table
from omniload.commands.edits.arguments import amount_of, faults_of, what_is_set, with_absolute_paths
from omniload.commands.edits.asking import change_mix
from omniload.commands.options import json_option, run_argument
from omniload.mix.edits.answers import EditTaken
from omniload.mix.edits.edit import (
    AddSource,
    Change,
    RetireSource,
    SkipShard,
    SkipSteps,
    Undo,
    said_of,
)
from omniload.mix.edits.edits_file import read_history
from omniload.mix.run_record import read_run_record
from omniload.mix.schema.stages import said_epochs
from omniload.mix.sources import Name, SourceConfig

__all__ = ["add", "retire", "set_weights", "skip", "undo"]

_SHOWN = 40
"""Sources that a table has at most: those whose share changes most."""


class _At(click.ParamType[int | None]):
    """``next`` or a step."""

    name = "at"

    @override
    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return "[next|STEP]"

    @override
    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | None:
        if isinstance(value, int):
            return value
        if value == "next":
            return None
        # int() takes digits of every script, and as many as there are.
        if str(value).isdecimal() and str(value).isascii() and len(str(value)) < 10:
            return int(value)
        raise click.BadParameter(f"{value!r} is neither next nor a step", ctx, param)


def _options(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that every change has."""
    at = click.option(
        "--at",
        type=_At(),
        default="next",
        show_default=True,
        help="First step that it holds at; next is the first that is not planned yet.",
    )
    timeout = click.option(
        "--timeout",
        "timeout_s",
        type=FiniteRange(min=0, min_open=True),
        default=60.0,
        show_default=True,
        help="Seconds to wait for the data plane's answer.",
    )
    return at(timeout(json_option(verb)))


@click.command("set")
@run_argument
@click.argument("values", metavar="NAME=WEIGHT|AMOUNT...", nargs=-1, required=True)
@_options
def set_weights(
    run: Path, values: tuple[str, ...], at: int | None, timeout_s: float, as_json: bool
) -> None:
    """Give sources of RUN new weights or amounts, from a step on.

    Weights are in the scale of the mix file; sources that are not named keep theirs. Stages of the
    file that begin later hold as they are declared. Of a run that draws amounts, an amount is how much
    of a source the whole run draws: what was drawn stays, and the rest of all amounts is spread anew.

    \b
    Example:
      omniload mix set demo/run modules=1 functions=3
      omniload mix set demo/run notices=0 --at 1200
      omniload mix set demo/run modules=2epochs functions=5Mtokens
    """  # noqa: D301 -- click's own marker
    _change(run, what_is_set(values), at, timeout_s, as_json)


@click.command("add")
@run_argument
@click.argument("name")
@click.option(
    "--from",
    "fragment",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="YAML file that declares the source under sources, as a mix file does.",
)
@click.option("--weight", type=float, help="In the scale of the present weights.")
@click.option(
    "--amount", help="Of a run that draws amounts, in place of a weight: 2epochs, 5Gtokens."
)
@_options
def add(  # noqa: PLR0913 -- one for each option
    run: Path,
    name: str,
    *,
    fragment: Path,
    weight: float | None,
    amount: str | None,
    at: int | None,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Add source NAME to RUN, from a step on; stages of the file that begin later give it the same share.

    The source is opened first: what `omniload mix check` would refuse is refused. Paths in the file
    are relative to it.

    \b
    Example:
      omniload mix add demo/run books --from books.yaml --weight 0.3
      omniload mix add demo/run books --from books.yaml --amount 2epochs
    """  # noqa: D301 -- click's own marker
    sources = load_yaml(fragment, _Fragment).sources
    if name not in sources:
        raise ConfigError(
            f"{fragment}: sources has {', '.join(sources)}, not {name!r}; declare it there, or correct the name"
        )
    source = with_absolute_paths(sources[name], fragment.resolve().parent)
    how_much = amount_of(amount) if amount is not None else None
    if (weight is None) == (how_much is None):
        both = "" if weight is None else "--weight and --amount are both given; "
        raise ConfigError(
            f"{both}say how much of {name!r} is drawn: --weight 0.3, or of a run that draws amounts --amount 2epochs"
        )
    given = {"weight": weight, "amount": how_much}
    asked = _checked(AddSource, {"name": name, "source": source, **given})
    _change(run, asked, at, timeout_s, as_json)


@click.command("retire")
@run_argument
@click.argument("name")
@_options
def retire(run: Path, name: str, at: int | None, timeout_s: float, as_json: bool) -> None:
    """Stop drawing from source NAME of RUN, from a step on, and in all later stages of the file.

    What was drawn of it and waits for a row is trained on.

    \b
    Example:
      omniload mix retire demo/run notices
    """  # noqa: D301 -- click's own marker
    _change(run, _checked(RetireSource, {"name": name}), at, timeout_s, as_json)


@click.command("skip")
@run_argument
@click.option(
    "--steps",
    metavar="A:B",
    help="Leave out what was in the steps from A to before B; the run must be at rest.",
)
@click.option(
    "--source",
    "name",
    help="Draw no more from a source, as omniload mix retire; with --shard, the source that has it.",
)
@click.option(
    "--shard",
    metavar="FILE",
    help="Draw no more from a file of a source: its path or URL, or the end of it from a / on.",
)
@_options
def skip(  # noqa: PLR0913 -- one for each option
    run: Path,
    *,
    steps: str | None,
    name: str | None,
    shard: str | None,
    at: int | None,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Leave out what made the loss of RUN jump: steps that it trained on, a shard, or a source.

    Of skipped steps, the run goes on from a checkpoint of step A or before: steps up to A are as they
    were, and step A draws what step B would have drawn. Nothing else is lost, and nothing comes twice.
    Of a shard, records that are not begun when the step comes are left out, in later epochs too, and all
    others come in the order that they have. Of a run at rest --at may be a step that was trained on.

    \b
    Example:
      omniload mix skip demo/run --steps 1200:1210
      omniload mix skip demo/run --shard docstrings/part-001.jsonl
      omniload mix skip demo/run --source notices
    """  # noqa: D301 -- click's own marker
    # --source alone is a choice of its own; beside --shard it says whose file is meant.
    if sum(each is not None for each in (steps, shard or name)) != 1 or shard == "":
        raise ConfigError(
            "say what to skip: --steps A:B, --shard FILE or --source NAME, one of them; --source beside --shard says "
            "which source has the file"
        )
    if shard is not None:
        _skip_shard(
            run, _checked(SkipShard, {"file": shard, "source": name}), at, timeout_s, as_json
        )
        return
    if name is not None:
        _change(run, _checked(RetireSource, {"name": name}), at, timeout_s, as_json)
        return
    change = _checked(SkipSteps, _range(str(steps)))
    if at not in (None, change.first):
        raise ConfigError(
            f"steps {steps} are skipped from step {change.first} on; leave --at {at} out"
        )
    taken = change_mix(run, change, None, timeout_s)
    if as_json:
        emit_json(taken.model_dump(mode="json"))
        return
    say(
        output(),
        f"edit {taken.edit.revision}: step {change.first:,} draws what step {change.stop:,} would have drawn; "
        f"{_how_to_go_back(change.first)}",
    )


def _how_to_go_back(step: int) -> str:
    """Return how a run at rest comes to draw a step anew: of step 0 there is no state."""
    if not step:
        return (
            "begin it anew in this folder, without a state: omniload.open without state=, or omniload train run FILE "
            "once its checkpoints lie elsewhere"
        )
    return (
        f"go on from a state of step {step:,} or before: omniload train run FILE --resume {step}, or state= of "
        "omniload.open"
    )


def _skip_shard(
    run: Path, change: SkipShard, at: int | None, timeout_s: float, as_json: bool
) -> None:
    taken = change_mix(run, change, at, timeout_s)
    if as_json:
        emit_json(taken.model_dump(mode="json"))
        return
    found, step = taken.edit.change, taken.edit.step
    assert isinstance(found, SkipShard), "it became this edit"
    console = output()
    say(
        console,
        f"edit {taken.edit.revision}: from step {step:,} on nothing more is drawn of {found.file}, one of {found.of} "
        f"shards of source {found.source}",
    )
    if step < taken.planned:
        say(
            console,
            f"steps from {step:,} on are planned anew; {_how_to_go_back(step)}",
        )
    _say_ahead(console, taken)
    if taken.unsure:
        say(console, taken.unsure)


def _range(steps: str) -> dict[str, object]:
    from_text, colon, to_text = steps.partition(":")
    first, stop = decimal_of(from_text), decimal_of(to_text)
    if not colon or first is None or stop is None:
        raise ConfigError(
            f"--steps {steps!r:.40} is no range of steps; say A:B, as 1200:1210 for ten of them"
        )
    if stop <= first:
        raise ConfigError(
            f"--steps {steps} are none: the second number is the first step that is not skipped; say {first}:B with a "
            f"B above {first}"
        )
    return {"first": first, "stop": stop}


@click.command("undo")
@run_argument
@_options
def undo(run: Path, at: int | None, timeout_s: float, as_json: bool) -> None:
    """Undo the latest edit of RUN that still holds: from a step on, what held before it holds again.

    \b
    Example:
      omniload mix undo demo/run
    """  # noqa: D301 -- click's own marker
    _change(run, Undo(), at, timeout_s, as_json)


class _Fragment(StrictModel):
    """Sources, as a mix file declares them."""

    sources: dict[Name, SourceConfig] = Field(min_length=1)


def _checked(kind: type[StrictModel], fields: dict[str, object]) -> Any:  # noqa: ANN401 -- the kind's own
    """Build a change from arguments.

    Raises:
        ConfigError: A name or a weight is none.
    """
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise ConfigError(faults_of(error)) from error


def _change(run: Path, change: Change, at: int | None, timeout_s: float, as_json: bool) -> None:
    taken = change_mix(run, change, at, timeout_s)
    if as_json:
        emit_json(taken.model_dump(mode="json"))
        return
    console = output()
    console.print(_amounts(taken) if taken.amounts else _shares(taken))
    edit = taken.edit
    undoes = "" if edit.undoes is None else f"undoes edit {_named(run, edit.undoes)}, and "
    say(console, f"edit {edit.revision} {undoes}holds from step {edit.step:,} on")
    _say_ahead(console, taken)
    if taken.unsure:
        say(console, taken.unsure)
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
    """Return an edit of a run by its number and its words: an undo says neither."""
    history = read_history(run, read_run_record(run).last.mix())
    return f"{revision} ({said_of(history.edits[revision - 1].change)})"


def _say_ahead(console: Console, taken: EditTaken) -> None:
    if ahead := taken.planned - taken.slowest:
        say(
            console,
            f"{ahead} steps from step {taken.slowest:,} on were planned already and keep the mix they have",
        )


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
    # Chosen by how far they move, in the order in which every table has them.
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
