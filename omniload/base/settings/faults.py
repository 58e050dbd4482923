"""What is said of a fault that pydantic found: the value, the limit and what to do, where its own words say less."""

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
"""Of names that a user gives: they stand in labels of metrics, in names of files and in arguments ``NAME=WEIGHT``."""
_SHOWN_WIDTH = 60
_NEAR = 0.65
"""How alike two keys are at least, for one to be meant as the other: ``images`` and ``tags`` are alike by 0.6."""

_LIMITS = {
    "greater_than_equal": ("ge", "at least {}"),
    "greater_than": ("gt", "more than {}"),
    "less_than_equal": ("le", "at most {}"),
    "less_than": ("lt", "less than {}"),
}
"""Kinds of faults of pydantic for a number beyond a limit: where the limit is, and how it is said."""
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
"""What belongs in the place of a value of another type."""
_EMPTY = {"string_too_short": "a text that is not empty", "too_short": "a list that is not empty"}
_MOST_KEYS = 24
"""Keys of a place that are said at most."""
_SAID = {"extra_forbidden": "no such key", "missing": "is missing; give it"}


def said_of_fault(fault: ErrorDetails, tags: Iterable[str] = ()) -> str:
    """Return the value found, the limit and what to do, where pydantic says less.

    Args:
        fault: What pydantic found.
        tags: Where the key that says which kind a mapping is of is missing, the words that it may have.
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
    """Return what is said of a word that is none of some, of a text that is too long, and of any other fault."""
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
    """Return what the key that says which kind a mapping is of may be, and what may be meant by what stands there."""
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
    """Return the line that gives one of a list of texts, where one is taken; nothing of a list of anything else."""
    # A URL may hold a secret.
    texts = [each for each in given if isinstance(each, str) and "://" not in each]
    # Of what may be of several types the last part is the name of this one.
    if not isinstance(key, str) or key == "str" or not texts or len(texts) < len(given):
        return ""
    first = texts[0]
    plain = first if re.fullmatch(r"[A-Za-z_]\w*", first, re.ASCII) else value_shown(first)
    return f"one text, as {key}: {plain}"


def _name_wanted(fault: ErrorDetails) -> str | None:
    """Return what a name may be, and one that would do, where the fault is of a name."""
    if fault["type"] != "string_pattern_mismatch" or fault["ctx"]["pattern"] != NAME_PATTERN:
        return None
    fit = re.sub(r"[^A-Za-z0-9_.]+", "-", str(fault["input"])).strip("-_.")
    meant = f", as {fit!r}" if fit else ""
    return f"a name of the letters a to z and A to Z, digits, _, - and . that begins with a letter or a digit{meant}"


def joined(said: Iterable[str]) -> list[str]:
    """Return what is said of one value, the types that it may have in one sentence."""
    wanted: dict[str, list[str]] = {}
    for each in said:
        found, gives, what = each.partition("; give ")
        wanted.setdefault(found + gives, []).extend([what] if gives else [])
    return [found + " or ".join(sorted(set(what))) for found, what in wanted.items()]


def _plain(limit: object) -> str:
    """Write a limit as a person does: powers as they are, no trailing ``.0``."""
    return f"{limit:g}" if isinstance(limit, float) else f"{limit}"


def value_shown(given: object) -> str:
    """Return a value as a message shows it."""
    shown = repr(given)
    if "://" in shown:
        return "a URL"  # it may hold a secret
    return shown if len(shown) <= _SHOWN_WIDTH else shown[:_SHOWN_WIDTH] + "..."


def _input_shown(fault: ErrorDetails) -> str:
    """Return the value that pydantic found, where its message leaves it out; no URL, which may hold a secret."""
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
    """Return what to do about an unknown key: the one that was meant, or the types that have it.

    Args:
        model: Of the whole.
        location: Keys that lead to it, and itself.
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
    """Return the lists beside an unknown key whose items have a key of that name."""
    return sorted(
        name
        for above in _models_at(model, location[:-1])
        for name, field in above.model_fields.items()
        if get_origin(field.annotation) in {tuple, list}
        and any(location[-1] in item.model_fields for item in _models_in(field.annotation))
    )


def _near(model: type[BaseModel], location: tuple[str | int, ...]) -> str | None:
    """Return the key that an unknown one may have been meant as, there or one level deeper."""
    models = _models_at(model, location[:-1])
    known = {name: name for above in models for name in above.model_fields}
    for above in models:
        for name, field in above.model_fields.items():
            if get_origin(field.annotation) not in {None, Union, UnionType}:
                continue  # of a list: no dotted name says which item
            for inner in _models_in(field.annotation):
                for deeper in inner.model_fields:
                    known.setdefault(deeper, f"{name}.{deeper}")
    near = difflib.get_close_matches(str(location[-1]), sorted(known), n=1, cutoff=_NEAR)
    return known[near[0]] if near else None


def written_out(model: type[BaseModel], location: tuple[str | int, ...], word: str) -> str:
    """Return the mapping that a word may stand for, ``{policy: skip}`` for ``skip``: of the key that takes it."""
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
    """Return what may lie at a place; of a union all that its tags, as far as they are given, leave."""
    models = {model}
    for part in location:
        # An index and a key of a dictionary are no fields: they stay with the models. A union's tag names one of them.
        fields = [known.model_fields[part] for known in models if part in known.model_fields]
        models = {known for known in models if part in _tags_of(known)} or models
        if fields:
            models = {inner for field in fields for inner in _models_in(field.annotation)}
    return models


def tags_at(model: type[BaseModel], location: tuple[str | int, ...]) -> set[str]:
    """Return the words that tell what may lie at a place from each other: ``csv``, ``parquet`` and so on."""
    return {tag for each in _models_at(model, location) for tag in _tags_of(each)}


def _words_in(annotation: object) -> set[object]:
    """Return the words that a field may be, one of a union among them."""
    if get_origin(annotation) is Literal:
        return set(get_args(annotation))
    return {word for inner in get_args(annotation) for word in _words_in(inner)}


def _tags_of(model: type[BaseModel]) -> tuple[str, ...]:
    """Return the words that tell a model from others of a union."""
    field = model.model_fields.get("type")
    return () if field is None else get_args(field.annotation)


def _models_in(annotation: object) -> set[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {annotation}
    return {model for inner in get_args(annotation) for model in _models_in(inner)}
