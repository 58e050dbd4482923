"""Strict configuration: closed frozen models, and faults that name file, line and key.

``load_yaml`` keeps the YAML tree together with the values. Therefore every fault is reported as
``file:line: key: reason``, all of them at once, wherever pydantic found it. A rule that concerns several keys is a
validator of the model around them, and names the key to change with ``fault_at``.
"""

import codecs
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from typing import (
    Annotated,
    Any,
    NamedTuple,
    Self,
    TypeAlias,
    TypeVar,
)

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError
from typing_extensions import override

from omniload.base.errors import ConfigError
from omniload.base.reading import read_small_file
from omniload.base.settings.faults import (
    joined,
    said_of_fault,
    said_of_unknown,
    tags_at,
    value_shown,
    written_out,
)
from omniload.base.settings.paths import unnamed, why_no_text
from omniload.base.settings.tree import LARGEST_TEXT_BYTES, Node, compose

__all__ = [
    "LocalPath",
    "StrictModel",
    "checked",
    "every_fault",
    "fault_at",
    "line_of",
    "load_yaml",
    "parse_yaml",
    "raise_faults",
    "read_text",
    "validated",
]

_MOST_FAULTS = 50
_most_faults = ContextVar("most_faults", default=_MOST_FAULTS)
"""Number of faults that are reported of one file."""

Location = tuple[str | int, ...]


@contextmanager
def every_fault() -> Iterator[None]:
    """Report every fault of a file inside, instead of only as many as a person reads."""
    before = _most_faults.set(sys.maxsize)
    try:
        yield
    finally:
        _most_faults.reset(before)


class StrictModel(BaseModel):
    """Base of every configuration model: immutable, and closed to unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    @override
    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with new values for some fields; cached values computed from fields are computed again."""
        copied = super().model_copy(update=update, deep=deep)
        for name in copied.__dict__.keys() - type(self).model_fields.keys():
            del copied.__dict__[name]
        return copied


Model = TypeVar("Model", bound=BaseModel)


def load_yaml(path: str | Path, model: type[Model]) -> Model:
    """Read a YAML file into ``model``.

    Args:
        path: The file.
        model: Model of its content.

    Returns:
        The validated model.

    Raises:
        ConfigError: The file is missing, is not YAML, or breaks the model; the message
            lists every fault on a line of its own as ``file:line: key: reason``.
    """
    file = Path(path)
    return parse_yaml(read_text(file), model, name=str(file))


def read_text(file: Path) -> str:
    """Return the text of a YAML file.

    Raises:
        ConfigError: There is no such file, it is not a file of settings, or it is not UTF-8.
    """
    content = read_small_file(file, most_bytes=LARGEST_TEXT_BYTES, what="a YAML file")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        is_wide = content[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        coding = "UTF-16" if is_wide else "ITS-CODING"
        raise ConfigError(
            f"{file}: cannot be read as UTF-8 text: {error}; write it as UTF-8: iconv -f {coding} -t UTF-8 {file} > NEW"
        ) from error


def line_of(file: Path, *at: str | int) -> int | None:
    """Return the line of a key of a YAML file, or of the nearest key above it; None if the file has changed."""
    try:
        root = _composed(read_text(file), str(file))
    except ConfigError:
        return None  # the file changed after it was read
    return None if root is None else _place(root, at, name="", is_missing=False)[1]


@lru_cache(maxsize=1)
def _composed(text: str, name: str) -> Node | None:
    """Cache the tree of the last query, because otherwise each of a thousand faults would compose it again."""
    return compose(text, name=name)


def parse_yaml(text: str, model: type[Model], *, name: str) -> Model:
    """Read YAML text into ``model``; ``name`` stands for the file in messages.

    Raises:
        ConfigError: As for ``load_yaml``.
    """
    return validated(compose(text, name=name), model, name=name)


def validated(root: Node | None, model: type[Model], *, name: str, verb: str = "") -> Model:
    """Build ``model`` from a tree; ``name`` stands for the file if the tree has none.

    Args:
        root: The tree.
        model: Model of its content.
        name: The file, for messages.
        verb: Command that reports every fault of such a file with ``--all-faults``, if there is one.

    Raises:
        ConfigError: As for ``load_yaml``.
    """
    try:
        return _validated({} if root is None or root.content is None else root.value, model)
    except ValidationError as error:
        # Pydantic's own text says less, and would be printed above ours if the error is not caught.
        remedy = f"; {verb} --all-faults {name} says every one" if verb else ""
        raise ConfigError("\n".join(_first(_faults(error, model, root, name), remedy))) from None


def fault_at(message: str, *at: str | int) -> PydanticCustomError:
    """Return an error for a validator to raise that blames a key below the model or field that it checks.

    Args:
        message: Value found, limit and remedy.
        at: Keys and indexes from there to the value to change.
    """
    return PydanticCustomError("fault_at", "{said}", {"said": message, "at": at})


def _of_this_machine(path: str) -> str:
    if "://" in path:
        raise fault_at(
            f"{path} is a URL, where a file of this machine is read; copy it, or mount the store"
        )
    try:
        os.fsencode(path)
    except UnicodeEncodeError as error:
        if why := unnamed(error):
            raise fault_at(f"{value_shown(path)} cannot be opened: {why}") from error
    return path


LocalPath: TypeAlias = Annotated[str, AfterValidator(_of_this_machine)]
"""Path of a file or folder that is opened as such. A URL is refused: it would be taken for a path, and its password
shown."""


def raise_faults(*checks: Iterable[PydanticCustomError]) -> None:
    """Raise all faults that several checks of a validator find, together.

    Args:
        checks: Each check yields the faults that it finds, or raises one; see ``fault_at``.

    Raises:
        ValidationError: There is at least one fault.
    """
    found: list[PydanticCustomError] = []
    for check in checks:
        try:
            for fault in check:
                found.append(fault)  # noqa: PERF402 -- what came before one that is raised counts
        except PydanticCustomError as raised:
            found.append(raised)
    if found:
        details = [InitErrorDetails(type=fault, input=None) for fault in found]
        raise ValidationError.from_exception_data("faults", details)


def checked(fields: Mapping[str, object], model: type[Model], *, name: str) -> Model:
    """Build ``model`` from values of a program; ``name`` stands for them in messages.

    Raises:
        ConfigError: The values break the model; each fault is on its own line as ``name: key: reason``.
    """
    try:
        return _validated(dict(fields), model)
    except ValidationError as error:
        faults = (f"{name}: {_dotted(fault.at)}: {fault.said}" for fault in _found(error, model))
        raise ConfigError("\n".join(_first(faults))) from None


def _validated(value: object, model: type[Model]) -> Model:
    """Build ``model``, then refuse values that pydantic accepts but our code cannot use."""
    built = model.model_validate(value)
    unfit = [
        InitErrorDetails(type=fault, loc=location, input=given)
        for location, given, fault in _unfit(value, built, ())
    ]
    if unfit:
        raise ValidationError.from_exception_data(model.__name__, unfit)
    return built


_TRUTH = PydanticCustomError("truth", "Input should be a number, not a truth")


def _unfit(
    given: object, built: object, location: Location
) -> Iterator[tuple[Location, object, PydanticCustomError]]:
    """Compare the given values with the built ones, and yield booleans used as numbers and invalid texts."""
    match given:
        case bool():
            # Pydantic takes a boolean for 0 or 1.
            if isinstance(built, int | float) and not isinstance(built, bool):
                yield location, given, _TRUTH
        case str() if not given.isascii():
            # Python represents a byte of a name that is not UTF-8 as half a surrogate pair, which no file can store.
            # Such settings could be neither kept nor sent to another process.
            if given.encode(errors="replace").decode() != given:
                yield (
                    location,
                    given,
                    fault_at(
                        f"{value_shown(given)} {why_no_text(given, 'rename it, or give a relative path')}"
                    ),
                )
        case dict():
            for key, inner in given.items():
                held = built.get(key) if isinstance(built, dict) else getattr(built, str(key), None)
                yield from _unfit(inner, held, (*location, key))
        case list():
            held_items = built if isinstance(built, list | tuple) else ()
            for i, (inner, held) in enumerate(zip(given, held_items, strict=False)):
                yield from _unfit(inner, held, (*location, i))


class _Fault(NamedTuple):
    """A fault that pydantic found at a place."""

    at: Location
    is_missing: bool
    """Whether the fault is a missing key."""
    is_rule: bool
    """Whether one of our rules reports the fault, instead of the type of the value."""
    said: str


def _found(error: ValidationError, model: type[BaseModel]) -> list[_Fault]:
    """Return the message and the place of each fault."""
    found: list[_Fault] = []
    faults = error.errors(include_url=False)
    for fault in faults:
        loc = tuple(fault["loc"]) + tuple(fault.get("ctx", {}).get("at", ()))
        # Searching for a similar key takes time, so it is done only for the faults that are shown.
        unknown = fault["type"] == "extra_forbidden" and len(found) < _most_faults.get()
        tagless = fault["type"] == "union_tag_not_found"
        said = said_of_fault(fault, tags_at(model, loc) if tagless else ())
        said += said_of_unknown(model, loc) if unknown else ""
        if isinstance(fault["input"], str) and fault["type"].startswith("model_"):
            meant = written_out(model, loc, fault["input"])
            said = said.replace("{type: TYPE, key: value}", meant).replace("{key: value}", meant)
        kind = fault["type"]
        found.append(_Fault(loc, kind == "missing", kind == "fault_at", said))
    # If items of a list fail, pydantic also reports the list, which says less. Faults of our rules are kept.
    above = _above(fault.at for fault in found)
    return [fault for fault in found if fault.at not in above or fault.is_rule]


def _above(locations: Iterable[Location]) -> set[Location]:
    """Return all places above the given ones."""
    return {loc[:i] for loc in locations for i in range(1, len(loc))}


def _first(faults: Iterable[str], remedy: str = "") -> Iterator[str]:
    """Yield as many faults as a person reads, then the number of further faults and a ``remedy`` that shows them."""
    every, most = list(faults), _most_faults.get()
    yield from every[:most]
    if (more := len(every) - most) > 0:
        yield f"and {more} more faults{remedy}"


def _faults(
    error: ValidationError, model: type[BaseModel], root: Node | None, name: str
) -> Iterator[str]:
    found = [
        (*_place(root, fault.at, name=name, is_missing=fault.is_missing), fault)
        for fault in _found(error, model)
    ]
    # A union is reported as a fault of each of its types. A fault inside the value, or of one of our rules, says more.
    above = _above(location for _, _, location, _ in found)
    ruled = {location for _, _, location, fault in found if fault.is_rule}
    said: dict[tuple[str, int, Location], list[str]] = {}
    for file, line, location, fault in found:
        if fault.is_rule or (location not in ruled and (fault.is_missing or location not in above)):
            said.setdefault((file, line, location), []).append(fault.said)
    placed = sorted(
        ((*place, message) for place, every in said.items() for message in joined(every)),
        key=lambda fault: (fault[0] != name, fault[:2], str(fault[2])),
    )
    for file, line, location, message in placed:
        yield f"{file}:{line}:{f' {_dotted(location)}:' if location else ''} {message}"


def _dotted(location: Sequence[str | int]) -> str:
    # A key that consists of dots would be lost among the dots between keys.
    return ".".join(part if part.strip(".") else repr(part) for part in map(str, location))


def _place(
    root: Node | None, location: Location, *, name: str, is_missing: bool
) -> tuple[str, int, Location]:
    """Find the file and the line of ``location``, and the part of the location that exists there.

    Pydantic puts the tag of a union into its locations. A part that is not in the file is left out, unless it is the
    missing key. The last part may be deeper than the location says, in the part that a model flattens.
    """
    node, shown = root, []
    file, line = (name, 1) if root is None else (root.file, root.line)
    for i, part in enumerate(location):
        is_last = i == len(location) - 1
        below: Location = () if node is None else (part,) if node.child(part) else ()
        if node is not None and is_last and not below and not is_missing:
            below = next(_deeper(node, part), ())
        for key in below:
            assert node is not None, "its keys were found"
            step = node.child(key)
            assert step is not None, "it was found"
            line, node = step
            file = node.file
            shown.append(key)
        if is_missing and is_last and not below:
            shown.append(part)
    return file, line, tuple(shown)


def _deeper(node: Node, part: str | int) -> Iterator[Location]:
    """Yield the places of a key in the mappings below a value."""
    for key, (_, inner) in node.content.items() if isinstance(node.content, dict) else ():
        if isinstance(inner.content, dict) and part in inner.content:
            yield (key, part)
        yield from ((key, *rest) for rest in _deeper(inner, part))
