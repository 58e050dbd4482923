"""Strict configuration: closed frozen models, faults that name file, line and key.

``load_yaml`` keeps the YAML tree beside the values, so that every fault, wherever pydantic
found it, is reported as ``file:line: key: reason``, all at once. A rule that spans keys is
one validator of the model around them, and names the key to change with ``fault_at``.
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
"""Faults that are said of one file."""

Location = tuple[str | int, ...]


@contextmanager
def every_fault() -> Iterator[None]:
    """Have every fault of a file be said inside, and not as many as a person reads."""
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
        """Return a copy with some fields of other values; what was worked out of the fields is so anew."""
        copied = super().model_copy(update=update, deep=deep)
        for name in copied.__dict__.keys() - type(self).model_fields.keys():
            del copied.__dict__[name]
        return copied


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
    return parse_yaml(read_text(file), model, name=str(file))


def read_text(file: Path) -> str:
    """Return the text of a YAML file.

    Raises:
        ConfigError: There is no such file, it is none of settings, or not UTF-8.
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
    """Return the line of a key of a YAML file, or of the nearest one above it; None where it cannot be told now."""
    try:
        root = _composed(read_text(file), str(file))
    except ConfigError:
        return None  # it was changed since it was read
    return None if root is None else _place(root, at, name="", is_missing=False)[1]


@lru_cache(maxsize=1)
def _composed(text: str, name: str) -> Node | None:
    """Keep the tree that a line was asked of: of a thousand faults each would else compose it anew."""
    return compose(text, name=name)


def parse_yaml(text: str, model: type[Model], *, name: str) -> Model:
    """Read YAML text into ``model``; ``name`` stands for the file in messages.

    Raises:
        ConfigError: As for ``load_yaml``.
    """
    return validated(compose(text, name=name), model, name=name)


def validated(root: Node | None, model: type[Model], *, name: str, verb: str = "") -> Model:
    """Build ``model`` of a tree; ``name`` stands for the file where the tree has none.

    Args:
        root: The tree.
        model: What it must hold.
        name: The file, for messages.
        verb: Command that says every fault of such a file by ``--all-faults``, where there is one.

    Raises:
        ConfigError: As for ``load_yaml``.
    """
    try:
        return _validated({} if root is None or root.content is None else root.value, model)
    except ValidationError as error:
        # Pydantic's own text says less, and would stand above ours wherever it is not caught.
        remedy = f"; {verb} --all-faults {name} says every one" if verb else ""
        raise ConfigError("\n".join(_first(_faults(error, model, root, name), remedy))) from None


def fault_at(message: str, *at: str | int) -> PydanticCustomError:
    """Return what a validator raises to blame a key below the model or field that it checks.

    Args:
        message: Value found, limit and remedy.
        at: Keys and indexes that lead from there to the value to change.
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
"""Path of a file or folder that is opened as such: a URL would be taken for folders, its password shown with them."""


def raise_faults(*checks: Iterable[PydanticCustomError]) -> None:
    """Raise what several checks of a validator find, all of it at once.

    Args:
        checks: Each yields the faults that it finds, or raises one; see ``fault_at``.

    Raises:
        ValidationError: There is one.
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
    """Build ``model`` from what a program gives; ``name`` stands for it in messages.

    Raises:
        ConfigError: It breaks the model; every fault on a line of its own as ``name: key: reason``.
    """
    try:
        return _validated(dict(fields), model)
    except ValidationError as error:
        faults = (f"{name}: {_dotted(fault.at)}: {fault.said}" for fault in _found(error, model))
        raise ConfigError("\n".join(_first(faults))) from None


def _validated(value: object, model: type[Model]) -> Model:
    """Build ``model``; refuse afterwards what pydantic takes and nothing of ours can use."""
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
    """Walk what was given beside what was built of it, for truths as numbers and for texts that are none."""
    match given:
        case bool():
            # To pydantic a truth is 0 or 1.
            if isinstance(built, int | float) and not isinstance(built, bool):
                yield location, given, _TRUTH
        case str() if not given.isascii():
            # Python has a byte of a name that is not UTF-8 as half a surrogate pair, which no file can be
            # given: the settings could be neither kept nor sent to another process.
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
    """What pydantic found at a place."""

    at: Location
    is_missing: bool
    """Whether a key is missing there."""
    is_rule: bool
    """Whether a rule of ours says it, and not the type of the value."""
    said: str


def _found(error: ValidationError, model: type[BaseModel]) -> list[_Fault]:
    """Return what to say of each fault, and where."""
    found: list[_Fault] = []
    faults = error.errors(include_url=False)
    for fault in faults:
        loc = tuple(fault["loc"]) + tuple(fault.get("ctx", {}).get("at", ()))
        # Looking for a near key takes a while: beyond what is shown, nobody reads it.
        unknown = fault["type"] == "extra_forbidden" and len(found) < _most_faults.get()
        tagless = fault["type"] == "union_tag_not_found"
        said = said_of_fault(fault, tags_at(model, loc) if tagless else ())
        said += said_of_unknown(model, loc) if unknown else ""
        if isinstance(fault["input"], str) and fault["type"].startswith("model_"):
            meant = written_out(model, loc, fault["input"])
            said = said.replace("{type: TYPE, key: value}", meant).replace("{key: value}", meant)
        kind = fault["type"]
        found.append(_Fault(loc, kind == "missing", kind == "fault_at", said))
    # A list whose items fail is also reported itself; the items say it better. What a rule says is no such report.
    above = _above(fault.at for fault in found)
    return [fault for fault in found if fault.at not in above or fault.is_rule]


def _above(locations: Iterable[Location]) -> set[Location]:
    """Return all places that something of ``locations`` lies below."""
    return {loc[:i] for loc in locations for i in range(1, len(loc))}


def _first(faults: Iterable[str], remedy: str = "") -> Iterator[str]:
    """Yield as many faults as a person reads, how many more there are, and ``remedy``, which shows them."""
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
    # What may be of several types is reported as none of each; what is wrong in it, or a rule of ours, says it better.
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
    # A key of dots alone would be lost among those between keys.
    return ".".join(part if part.strip(".") else repr(part) for part in map(str, location))


def _place(
    root: Node | None, location: Location, *, name: str, is_missing: bool
) -> tuple[str, int, Location]:
    """Find the file and the line of ``location``, and the part of it that exists there.

    Pydantic puts the tag of a union into its locations; a part that the file does
    not hold is left out, unless it is the key that is missing. The last part may stand deeper than the
    location says, in what a model flattens.
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
    """Yield where a key stands in the mappings below a value."""
    for key, (_, inner) in node.content.items() if isinstance(node.content, dict) else ():
        if isinstance(inner.content, dict) and part in inner.content:
            yield (key, part)
        yield from ((key, *rest) for rest in _deeper(inner, part))
