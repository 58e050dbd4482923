"""Messages for pydantic's faults: the value, the limit and what to do, if its own words say less."""

import difflib
import re
from collections.abc import Iterable
from types import UnionType
from typing import Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import ErrorDetails

__all__ = [
    "NAME_PATTERN",
    "joined",
    "said_of_fault",
    "said_of_unknown",
    "tags_at",
    "value_shown",
    "written_out",
]

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.\-]*$"
"""Pattern of names given by users, which appear in labels of metrics, file names and arguments ``NAME=WEIGHT``."""
_SHOWN_WIDTH = 60
_NEAR = 0.65
"""Least similarity for a key to be suggested for another: that of ``images`` and ``tags`` is 0.6."""

_LIMITS = {
    "greater_than_equal": ("ge", "at least {}"),
    "greater_than": ("gt", "more than {}"),
    "less_than_equal": ("le", "at most {}"),
    "less_than": ("lt", "less than {}"),
}
"""For pydantic's faults of a number beyond a limit: the key of the limit, and the words for it."""
_WANTED = {
    "bool_type": "true or false",
    "dict_type": "a mapping, as {key: value}",
    "finite_number": "a finite number",
    "float_parsing": "a number",
    "float_type": "a number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "list_type": "a list, as [first, second]",
    "model_attributes_type": "a mapping, as {type: TYPE, key: value}",
    "model_type": "a mapping, as {key: value}",
    "string_type": "a text",
    "tuple_type": "a list, as [first, second]",
}
"""Description of the right kind of value, by kind of fault."""
_EMPTY = {"string_too_short": "a text that is not empty", "too_short": "a list that is not empty"}
_MOST_KEYS = 24
"""Largest number of keys that a message lists."""
_SAID = {"extra_forbidden": "no such key", "missing": "is missing; give it"}


def said_of_fault(fault: ErrorDetails, tags: Iterable[str] = ()) -> str:
    """Return the value found, the limit and what to do, if pydantic says less.

    Args:
        fault: The fault that pydantic found.
        tags: Possible values of the key that gives the kind of a mapping, if that key is missing.
    """
    kind, context, given = fault["type"], fault.get("ctx", {}), fault["input"]
    if kind in _LIMITS and isinstance(given, int | float | str):
        key, limit = _LIMITS[kind]
        return f"found {value_shown(given)}; give {limit.format(_plain(context[key]))}"
    wanted = _WANTED.get(kind) or (None if given else _EMPTY.get(kind)) or _name_wanted(fault)
    if given is None and wanted and fault["loc"] and ":" in (key := str(fault["loc"][-1])):
        wanted = f"it behind a colon and a blank, {key.replace(':', ': ', 1)}"
    if kind == "string_type" and isinstance(given, list) and fault["loc"]:
        wanted = _one_of(fault["loc"][-1], given) or wanted
    if wanted and isinstance(given, str | int | float | list | dict | None):
        return f"found {value_shown(given)}; give {wanted}"
    if kind in _SAID:
        return _SAID[kind]
    if kind.startswith("union_tag"):
        return _tag_wanted(fault, tags)
    return _said_of_rest(fault)


def _said_of_rest(fault: ErrorDetails) -> str:
    """Return the message for an unknown word, for a text that is too long, and for any other fault."""
    kind, context, given = fault["type"], fault.get("ctx", {}), fault["input"]
    if kind == "literal_error":
        expected = str(context["expected"])
        near = difflib.get_close_matches(str(given), re.findall(r"'([^']*)'", expected), n=1)
        meant = f" (did you mean {near[0]!r}?)" if near else ""
        is_plain = isinstance(given, str | int | float | None)
        found = value_shown(given) if is_plain else f"a {type(given).__name__}"
        return f"found {found}{meant}; give {expected}"
    if kind == "string_too_long" and isinstance(given, str):
        return f"found {len(given):,} letters, {value_shown(given)}; give at most {context['max_length']}"
    return fault["msg"].removeprefix("Value error, ") + _input_shown(fault)


def _tag_wanted(fault: ErrorDetails, tags: Iterable[str]) -> str:
    """Return the possible values of the key that gives the kind of a mapping, and the most similar one."""
    context, given = fault.get("ctx", {}), fault["input"]
    key = str(context["discriminator"]).strip("'")
    if fault["type"] == "union_tag_invalid":
        tag = str(context["tag"])
        known = re.findall(r"'([^']*)'", str(context["expected_tags"]))
        near = difflib.get_close_matches(tag, known, n=1)
        meant = f"did you mean {near[0]!r}? " if near else ""
        return f"{key} is {value_shown(tag)}; {meant}choose among {', '.join(known)}"
    near = difflib.get_close_matches(key, map(str, given), n=1) if isinstance(given, dict) else []
    meant = f" (did you mean it by {near[0]!r}?)" if near else ""
    wanted = f"one of {', '.join(sorted(tags))}" if tags else "it"
    return f"{key} is missing{meant}; give {wanted}"


def _one_of(key: str | int, given: list[object]) -> str:
    """Return the line that gives one of a list of texts, for a key that takes one text; empty for any other list."""
    # A URL may contain a secret.
    texts = [each for each in given if isinstance(each, str) and "://" not in each]
    # In a union, the last part of the location is the name of the type.
    if not isinstance(key, str) or key == "str" or not texts or len(texts) < len(given):
        return ""
    first = texts[0]
    plain = first if re.fullmatch(r"[A-Za-z_]\w*", first, re.ASCII) else value_shown(first)
    return f"one text, as {key}: {plain}"


def _name_wanted(fault: ErrorDetails) -> str | None:
    """Return the rule for names and a valid name, if the fault is that of a name."""
    if fault["type"] != "string_pattern_mismatch" or fault["ctx"]["pattern"] != NAME_PATTERN:
        return None
    fit = re.sub(r"[^A-Za-z0-9_.]+", "-", str(fault["input"])).strip("-_.")
    meant = f", as {fit!r}" if fit else ""
    return f"a name of the letters a to z and A to Z, digits, _, - and . that begins with a letter or a digit{meant}"


def joined(said: Iterable[str]) -> list[str]:
    """Join messages about one value, with its possible types in one sentence."""
    wanted: dict[str, list[str]] = {}
    for each in said:
        found, gives, what = each.partition("; give ")
        wanted.setdefault(found + gives, []).extend([what] if gives else [])
    return [found + " or ".join(sorted(set(what))) for found, what in wanted.items()]


def _plain(limit: object) -> str:
    """Write a limit as people do: powers as they are, and no trailing ``.0``."""
    return f"{limit:g}" if isinstance(limit, float) else f"{limit}"


def value_shown(given: object) -> str:
    """Return a value in the form for messages."""
    shown = repr(given)
    if "://" in shown:
        return "a URL"  # which may contain a secret
    return shown if len(shown) <= _SHOWN_WIDTH else shown[:_SHOWN_WIDTH] + "..."


def _input_shown(fault: ErrorDetails) -> str:
    """Return the value found by pydantic, if its message lacks it; never a URL, which may contain a secret."""
    given = fault["input"]
    said_by_us = {
        "value_error",
        "fault_at",
        "truth",
        "missing",
        "extra_forbidden",
        "assertion_error",
    }
    if fault["type"] in said_by_us or fault["type"].startswith("union_tag"):
        return ""
    if not isinstance(given, str | int | float | None) or "://" in str(given):
        return ""
    return f", not {value_shown(given)}"


def said_of_unknown(model: type[BaseModel], location: tuple[str | int, ...]) -> str:
    """Return the remedy for an unknown key: a similar key, or the types that have the key.

    Args:
        model: Model of the whole file.
        location: Keys that lead to the unknown key, and the key itself.
    """
    tagged, key = location[:-1], location[-1]
    types = tags_at(model, tagged[:-1])
    if tagged and tagged[-1] in types:
        having = sorted(
            str(tag)
            for each in _models_at(model, tagged[:-1])
            if key in each.model_fields
            for tag in _tags_of(each)
        )
        if having:
            having_it = (
                f"types {', '.join(having[:-1])} and {having[-1]} have"
                if having[1:]
                else f"type {having[0]} has"
            )
            return f" for type {tagged[-1]}, and {having_it} it: change the type, or remove the key"
    near = _near(model, location)
    if near is None and (lists := _lists_with(model, location)):
        return f"; it is of what stands in {lists[0]}, as {lists[0]}: [{{{key}: ...}}]"
    if near is None and str(key).startswith(("x-", ".")):  # as other tools have places for anchors
        return "; remove it: an anchor (&name) stands at the first value that is used again"
    if near is not None:
        return f"; did you mean {near!r}?"
    known = sorted(
        {name for above in _models_at(model, location[:-1]) for name in above.model_fields}
    )
    return "; remove it" + (
        f"; keys here are {', '.join(known)}" if 0 < len(known) <= _MOST_KEYS else ""
    )


def _lists_with(model: type[BaseModel], location: tuple[str | int, ...]) -> list[str]:
    """Return the lists next to an unknown key whose items have a key of that name."""
    return sorted(
        name
        for above in _models_at(model, location[:-1])
        for name, field in above.model_fields.items()
        if get_origin(field.annotation) in {tuple, list}
        and any(location[-1] in item.model_fields for item in _models_in(field.annotation))
    )


def _near(model: type[BaseModel], location: tuple[str | int, ...]) -> str | None:
    """Return the key that an unknown key may stand for, at the same place or one level deeper."""
    models = _models_at(model, location[:-1])
    known = {name: name for above in models for name in above.model_fields}
    for above in models:
        for name, field in above.model_fields.items():
            if get_origin(field.annotation) not in {None, Union, UnionType}:
                continue  # in a list, because a dotted name does not say which item
            for inner in _models_in(field.annotation):
                for deeper in inner.model_fields:
                    known.setdefault(deeper, f"{name}.{deeper}")
    near = difflib.get_close_matches(str(location[-1]), sorted(known), n=1, cutoff=_NEAR)
    return known[near[0]] if near else None


def written_out(model: type[BaseModel], location: tuple[str | int, ...], word: str) -> str:
    """Return the mapping that a word may stand for, such as ``{policy: skip}`` for ``skip``."""
    models = sorted(_models_at(model, location), key=lambda each: each.__name__)
    for known in models:
        for name, field in known.model_fields.items():
            if word in _words_in(field.annotation):
                return f"{{{name}: {word}}}"
    for known in models:
        if (path := known.model_fields.get("path")) is not None and path.is_required():
            kind = "type: TYPE, " if _tags_of(known) else ""
            return f"{{{kind}path: {word}}}"
    return "{type: TYPE, key: value}" if tags_at(model, location) else "{key: value}"


def _models_at(model: type[BaseModel], location: tuple[str | int, ...]) -> set[type[BaseModel]]:
    """Return the possible models at a place; in a union, those that match the tags, as far as given."""
    models = {model}
    for part in location:
        # An index or a key of a dictionary is not a field and keeps the models. The tag of a union selects one of
        # them.
        fields = [known.model_fields[part] for known in models if part in known.model_fields]
        models = {known for known in models if part in _tags_of(known)} or models
        if fields:
            models = {inner for field in fields for inner in _models_in(field.annotation)}
    return models


def tags_at(model: type[BaseModel], location: tuple[str | int, ...]) -> set[str]:
    """Return the tags that distinguish the possible models at a place: ``csv``, ``parquet`` and so on."""
    return {tag for each in _models_at(model, location) for tag in _tags_of(each)}


def _words_in(annotation: object) -> set[object]:
    """Return the words that a field may have as its value, also within a union."""
    if get_origin(annotation) is Literal:
        return set(get_args(annotation))
    return {word for inner in get_args(annotation) for word in _words_in(inner)}


def _tags_of(model: type[BaseModel]) -> tuple[str, ...]:
    """Return the tags that distinguish a model from others of a union."""
    field = model.model_fields.get("type")
    return () if field is None else get_args(field.annotation)


def _models_in(annotation: object) -> set[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {annotation}
    return {model for inner in get_args(annotation) for model in _models_in(inner)}
