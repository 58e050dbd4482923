"""``omniload mix set``, ``add``, ``retire``, ``undo``: changes of a run's mix during training."""

from pathlib import Path

import click

from omniload.base.errors import ConfigError
from omniload.commands.edits.arguments import (
    amount_of,
    change_options,
    checked,
    declared_in,
    what_is_set,
    with_absolute_paths,
)
from omniload.commands.edits.taken import change_and_say
from omniload.commands.options import run_argument
from omniload.mix.edits.edit import AddSource, RetireSource, Undo

__all__ = ["add", "retire", "set_weights", "undo"]


@click.command("set")
@run_argument
@click.argument("values", metavar="NAME=WEIGHT|AMOUNT...", nargs=-1, required=True)
@change_options
def set_weights(
    run: Path, values: tuple[str, ...], at: int | None, timeout_s: float, as_json: bool
) -> None:
    """Give sources of RUN new weights or amounts, from a step on.

    Weights are in the scale of the mix file. Sources that are not named keep their weights, and later stages of the
    file stay as declared. If the run draws amounts, an amount is how much of a source the whole run draws, including
    what it has drawn already. The rest of all amounts is then spread anew over the rest of the run. If you give weights
    to such a run, they divide the joint amount of the named sources.

    \b
    Example:
      omniload mix set demo/run modules=1 functions=3
      omniload mix set demo/run notices=0 --at 50
      omniload mix set runs/sft chats=2epochs code=5Mtokens
    """  # noqa: D301 -- click's own marker
    change_and_say(run, what_is_set(values), at, timeout_s, as_json)


@click.command("add")
@run_argument
@click.argument("name")
@click.option(
    "--from",
    "fragment",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="YAML file that declares the source under sources, like a mix file.",
)
@click.option(
    "--weight", type=float, help="Weight of the source, in the scale of the present weights."
)
@click.option("--amount", help="In place of a weight, if the run draws amounts: 2epochs, 5Gtokens.")
@change_options
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
    """Add source NAME to RUN from a step on, with the same share in all later stages of the file.

    The source is opened first, and refused if `omniload mix check` would refuse it. Paths in the file are relative to
    the file.

    \b
    Example:
      omniload mix add demo/run books --from books.yaml --weight 0.3
      omniload mix add runs/sft books --from books.yaml --amount 2epochs
    """  # noqa: D301 -- click's own marker
    source = with_absolute_paths(declared_in(fragment, name), fragment.resolve().parent)
    how_much = amount_of(amount) if amount is not None else None
    if (weight is None) == (how_much is None):
        both = "" if weight is None else "--weight and --amount are both given; "
        raise ConfigError(
            f"{both}say how much of {name!r} is drawn: --weight 0.3, or of a run that draws amounts --amount 2epochs"
        )
    given = {"weight": weight, "amount": how_much}
    asked = checked(AddSource, {"name": name, "source": source, **given})
    change_and_say(run, asked, at, timeout_s, as_json)


@click.command("retire")
@run_argument
@click.argument("name")
@change_options
def retire(run: Path, name: str, at: int | None, timeout_s: float, as_json: bool) -> None:
    """Stop drawing from source NAME of RUN, from a step on, and in all later stages of the file.

    Documents that were already drawn and wait for a row are still trained on.

    \b
    Example:
      omniload mix retire demo/run notices
    """  # noqa: D301 -- click's own marker
    change_and_say(run, checked(RetireSource, {"name": name}), at, timeout_s, as_json)


@click.command("undo")
@run_argument
@change_options
def undo(run: Path, at: int | None, timeout_s: float, as_json: bool) -> None:
    """Undo the latest edit of RUN that is in effect, from a step on.

    \b
    Example:
      omniload mix undo demo/run
    """  # noqa: D301 -- click's own marker
    change_and_say(run, Undo(), at, timeout_s, as_json)
