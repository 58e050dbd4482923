"""Strict configuration: closed frozen models, faults that name file, line and key.

``load_yaml`` composes the YAML node tree beside the values, so that every fault,
wherever pydantic found it, is reported as ``file:line: key: reason``, all at once.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from omniload.base.errors import ConfigError

__all__ = ["StrictModel", "checked", "load_yaml", "parse_yaml"]

Location = tuple[str | int, ...]


class StrictModel(BaseModel):
    """Base of every configuration model: immutable, and closed to unknown keys."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True
    )


Model = TypeVar("Model", bound=BaseModel)


def load_yaml(path: str | Path, model: type[Model]) -> Model:
    """Read a YAML file into ``model``.

    Args:
        path: The file.
        model: What it must hold.

    Returns:
        The validated model.

    Raises:
        ConfigError: The file is missing, is not YAML, or breaks the model; the message
            lists every fault on a line of its own as ``file:line: key: reason``.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such file; give the path of a YAML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read as UTF-8 text: {error}") from error
    return parse_yaml(text, model, name=str(file))


def parse_yaml(text: str, model: type[Model], *, name: str) -> Model:
    """Read YAML text into ``model``; ``name`` stands for the file in messages.

    Raises:
        ConfigError: As for ``load_yaml``.
    """
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        duplicates = [] if node is None else list(_duplicate_keys(node, (), frozenset()))
        if duplicates:
            raise ConfigError(
                "\n".join(
                    f"{name}:{line}: {_dotted(loc)}: key given twice" for line, loc in duplicates
                )
            )
        value = yaml.safe_load(text)
    # Not only YAMLError: the loader passes on the ValueError of a date such as 2024-13-45.
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark is not None else 1
        problem = getattr(error, "problem", None) or error
        raise ConfigError(f"{name}:{line}: not valid YAML: {problem}") from error
    try:
        return model.model_validate({} if value is None else value)
    except ValidationError as error:
        raise ConfigError("\n".join(_faults(error, model, node, name))) from error


def checked(fields: Mapping[str, object], model: type[Model], *, name: str) -> Model:
    """Build ``model`` from what a program gives; ``name`` stands for it in messages.

    Raises:
        ConfigError: It breaks the model; every fault on a line of its own as ``name: key: reason``.
    """
    try:
        return model.model_validate(dict(fields))
    except ValidationError as error:
        faults = (f"{name}: {_dotted(loc)}: {said}" for loc, _, said in _found(error, model))
        raise ConfigError("\n".join(faults)) from error


def _duplicate_keys(
    node: yaml.Node, location: Location, above: frozenset[int]
) -> Iterator[tuple[int, Location]]:
    """Walk the tree; ``above`` are the nodes around ``node``, to find one that holds itself."""
    if id(node) in above:
        raise yaml.constructor.ConstructorError(
            problem=f"{_dotted(location)} refers to what holds it", problem_mark=node.start_mark
        )
    above |= {id(node)}
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    problem="a key is a list or a mapping; write a word",
                    problem_mark=key.start_mark,
                )
            here = (*location, key.value)
            if key.value in seen:
                yield key.start_mark.line + 1, here
            seen.add(key.value)
            yield from _duplicate_keys(value, here, above)
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            yield from _duplicate_keys(value, (*location, i), above)


def _found(error: ValidationError, model: type[BaseModel]) -> list[tuple[Location, bool, str]]:
    """Return of each fault its place, whether a key is missing there, and what to say."""
    found = []
    for fault in error.errors():
        loc, said = tuple(fault["loc"]), fault["msg"].removeprefix("Value error, ")
        near = _near(model, loc) if fault["type"] == "extra_forbidden" else None
        said += f"; did you mean {near!r}?" if near else ""
        found.append((loc, fault["type"] == "missing", said))
    # A list whose items fail is also reported itself; the items say it better.
    return [
        (loc, is_missing, said)
        for loc, is_missing, said in found
        if not any(other != loc and other[: len(loc)] == loc and loc for other, *_ in found)
    ]


def _near(model: type[BaseModel], location: Location) -> str | None:
    """Return the key that an unknown one may have been meant as, there or one level deeper."""
    models = {model}
    for part in location[:-1]:
        # An index, a key of a dictionary and the tag of a union are no fields: they stay with the models.
        fields = [known.model_fields[part] for known in models if part in known.model_fields]
        if fields:
            models = {inner for field in fields for inner in _models_in(field.annotation)}
    known = {name: name for above in models for name in above.model_fields}
    for above in models:
        for name, field in above.model_fields.items():
            if get_origin(field.annotation) not in {None, Union, UnionType}:
                continue  # of a list: no dotted name says which item
            for inner in _models_in(field.annotation):
                for deeper in inner.model_fields:
                    known.setdefault(deeper, f"{name}.{deeper}")
    near = difflib.get_close_matches(str(location[-1]), sorted(known), n=1)
    return known[near[0]] if near else None


def _models_in(annotation: object) -> set[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {annotation}
    return {model for inner in get_args(annotation) for model in _models_in(inner)}


def _faults(
    error: ValidationError, model: type[BaseModel], root: yaml.Node | None, name: str
) -> Iterator[str]:
    placed = sorted(
        {
            (*_place(root, loc, is_missing=is_missing), message)
            for loc, is_missing, message in _found(error, model)
        },
        key=lambda fault: (fault[0], str(fault[1])),
    )
    for line, location, message in placed:
        key = f" {_dotted(location)}:" if location else ""
        yield f"{name}:{line}:{key} {message}"


def _dotted(location: Sequence[str | int]) -> str:
    return ".".join(str(part) for part in location)


def _place(root: yaml.Node | None, location: Location, *, is_missing: bool) -> tuple[int, Location]:
    """Find the line of ``location`` and the part of it that exists in the file.

    Pydantic puts the tag of a union into its locations; a part that the file does
    not hold is left out, unless it is the key that is missing.
    """
    node, line, shown = root, 1, []
    for i, part in enumerate(location):
        step = _child(node, part)
        if step is not None:
            line, node = step
            shown.append(part)
        elif is_missing and i == len(location) - 1:
            shown.append(part)
    return line, tuple(shown)


def _child(node: yaml.Node | None, part: str | int) -> tuple[int, yaml.Node] | None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == str(part):
                return key.start_mark.line + 1, value
    elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        value = node.value[part]
        return value.start_mark.line + 1, value
    return None
