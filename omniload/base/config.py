"""Strict configuration: closed frozen models, faults that name file, line and key.

``load_yaml`` composes the YAML node tree beside the values, so that every fault,
wherever pydantic found it, is reported as ``file:line: key: reason``, all at once.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from omniload.base.errors import ConfigError

__all__ = ["StrictModel", "load_yaml", "parse_yaml"]

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
        raise ConfigError("\n".join(_faults(error, node, name))) from error


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


def _faults(error: ValidationError, root: yaml.Node | None, name: str) -> Iterator[str]:
    found = [
        (
            tuple(fault["loc"]),
            fault["type"] == "missing",
            fault["msg"].removeprefix("Value error, "),
        )
        for fault in error.errors()
    ]
    placed = sorted(
        {
            (*_place(root, loc, is_missing=is_missing), message)
            for loc, is_missing, message in found
            # A list whose items fail is also reported itself; the items say it better.
            if not any(other != loc and other[: len(loc)] == loc and loc for other, *_ in found)
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
