"""Arguments of the verbs that change a mix: weights and amounts as words, a source as a file, a first step."""

import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from pydantic import Field, ValidationError
from pydantic_core import ErrorDetails
from typing_extensions import override

from omniload.base.cli import FiniteRange
from omniload.base.config import StrictModel, load_yaml
from omniload.base.errors import ConfigError
from omniload.base.settings.faults import said_of_fault
from omniload.commands.options import json_option
from omniload.mix.edits.edit import SetAmounts, SetWeights
from omniload.mix.schema.amounts import Amount
from omniload.mix.schema.messages import MessageTransform
from omniload.mix.schema.transforms import TransformConfig
from omniload.mix.sources import Name, SourceBase, SourceConfig

__all__ = [
    "amount_of",
    "change_options",
    "checked",
    "declared_in",
    "real_path",
    "what_is_set",
    "with_absolute_paths",
    "with_real_paths",
]

_PATTERN = re.compile(r"[*?\[{]")
"""Matches the first character of a glob, or a brace."""
_AMOUNT = re.compile(r"([0-9][0-9_.]*[A-Za-z]{0,2}?)\s*(epoch|sample|token)s?")
Source = TypeVar("Source", bound=SourceBase)


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
        # int() would accept digits of every script, and any number of them.
        if str(value).isdecimal() and str(value).isascii() and len(str(value)) < 10:
            return int(value)
        raise click.BadParameter(f"{value!r} is neither next nor a step", ctx, param)


def change_options(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that every change has."""
    at = click.option(
        "--at",
        type=_At(),
        default="next",
        show_default=True,
        help="First step of the change; next is the first step that no rank has yet.",
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


def checked(kind: type[StrictModel], fields: dict[str, object]) -> Any:  # noqa: ANN401 -- the kind's own
    """Build a change from arguments.

    Raises:
        ConfigError: A name or a weight is invalid.
    """
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise ConfigError(_faults_of(error)) from error


def what_is_set(texts: tuple[str, ...]) -> SetWeights | SetAmounts:
    """Return the change that ``web=0.2 code=0.8`` or ``web=2epochs code=5Gtokens`` asks for.

    Raises:
        ConfigError: A text is neither a weight nor an amount, a source is named twice, or both kinds are given.
    """
    weights: dict[str, float] = {}
    amounts: dict[str, Amount] = {}
    for text in texts:
        name, _, value = text.rpartition("=")
        weight, amount = _weight_of(value), amount_of(value)
        if not name or (weight is None and amount is None):
            raise ConfigError(
                f"{text!r} is no weight of a source; say NAME=NUMBER, as web=0.2, or of a run that draws amounts "
                "NAME=AMOUNT, as web=2epochs, code=5Gtokens or chat=50ksamples"
            )
        if name in weights or name in amounts:
            before = f"{weights[name]:g}" if name in weights else str(amounts[name])
            raise ConfigError(f"source {name!r} has two weights, {before} and {value}; give it one")
        if amount is not None:
            amounts[name] = amount
        elif weight is not None:
            weights[name] = weight
    if weights and amounts:
        raise ConfigError(
            f"{next(iter(weights))} is given a weight and {next(iter(amounts))} an amount; a run has one or the other"
        )
    fields: dict[str, object] = {"amounts": amounts} if amounts else {"weights": weights}
    found: SetWeights | SetAmounts = checked(SetAmounts if amounts else SetWeights, fields)
    return found


def _faults_of(error: ValidationError) -> str:
    """Return what is wrong with each argument of a change: the value found, and what to give."""
    return "; ".join(map(_fault, error.errors()))


def _fault(fault: ErrorDetails) -> str:
    where = ".".join(map(str, fault["loc"]))
    return f"{where}: {said_of_fault(fault)}"


def _weight_of(value: str) -> float | None:
    try:
        weight = float(value)
    except ValueError:
        return None
    # float() accepts nan as a number, and no limit refuses it, because it is neither below nor above a limit.
    return None if math.isnan(weight) else weight


def amount_of(value: str) -> Amount | None:
    """Return the amount that a text such as ``2epochs`` or ``5Gtokens`` means; ``None`` if the text is no amount.

    Raises:
        ConfigError: It is an amount that a mix file may not give.
    """
    found = _AMOUNT.fullmatch(value)
    if found is None:
        return None
    number, kind = found[1], f"{found[2]}s"
    try:
        # Epochs may be a fraction; for samples and tokens, the field itself reads 50k and 5G.
        return Amount.model_validate({kind: float(number) if kind == "epochs" else number})
    except ValueError as error:  # includes ValidationError
        said = said_of_fault(error.errors()[0]) if isinstance(error, ValidationError) else error
        raise ConfigError(f"{value!r:.60} is no amount: {said}; say 2epochs or 5Gtokens") from error


class _Fragment(StrictModel):
    """Sources, as a mix file declares them."""

    sources: dict[Name, SourceConfig] = Field(min_length=1)


def declared_in(file: Path, name: str) -> SourceConfig:
    """Return the source that a file declares under a name.

    Raises:
        ConfigError: The file is no YAML of sources, for instance the data itself, or declares no source of that name.
    """
    try:
        sources = load_yaml(file, _Fragment).sources
    except ConfigError as error:
        error.add_note(
            "it declares sources as a mix file does, and nothing else: "
            f"sources: {{{name}: {{type: jsonl, path: data/*.jsonl}}}}"
        )
        raise
    if name not in sources:
        raise ConfigError(
            f"{file}: sources has {', '.join(sources)}, not {name!r}; declare it there, or correct the name"
        )
    return sources[name]


def with_absolute_paths(source: Source, folder: Path) -> Source:
    """Return a source whose relative paths, which start at ``folder``, are absolute; URLs stay as they are."""
    return _with_paths(source, lambda path: str(folder / path))


def with_real_paths(source: Source) -> Source:
    """Return a source with each absolute path in one spelling, without links and ``..``; it reads the same files."""
    return _with_paths(source, real_path)


def real_path(path: str) -> str:
    """Return one spelling of a local path; for a pattern, of the folders in front of it."""
    parts = Path(path).parts
    fixed = next((i for i, part in enumerate(parts) if _PATTERN.search(part)), len(parts))
    # realpath does not refuse links in a circle, and leaves a folder that does not exist yet as it is written.
    return str(Path(os.path.realpath(Path(*parts[:fixed])), *parts[fixed:]))


def _with_paths(source: Source, placed: Callable[[str], str]) -> Source:
    paths = tuple(path if "://" in path else placed(path) for path in source.paths)
    transforms = tuple(_placed(transform, placed) for transform in source.transforms)
    path = paths[0] if len(paths) == 1 else paths
    drawn = source.drawn_before and placed(source.drawn_before)
    return source.model_copy(update={"path": path, "transforms": transforms, "drawn_before": drawn})


def _placed(transform: TransformConfig, placed: Callable[[str], str]) -> TransformConfig:
    if isinstance(transform, MessageTransform) and transform.template:
        return transform.model_copy(update={"template": placed(transform.template)})
    return transform
