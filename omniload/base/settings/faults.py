"""What is said of a fault that pydantic found: the value, the limit and what to do, where its own words say less."""

import difflib
import re
from collections.abc import Iterable

from pydantic_core import ErrorDetails

__all__ = ["NAME_PATTERN", "joined", "said_of_fault", "value_shown"]

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.\-]*$"
"""Of names that a user gives: they stand in labels of metrics, in names of files and in arguments ``NAME=WEIGHT``."""
_SHOWN_WIDTH = 60

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
    "model_type": "a mapping, as {key: value}",
    "string_type": "a text",
    "tuple_type": "a list, as [first, second]",
}
"""What belongs in the place of a value of another type."""
_EMPTY = {"string_too_short": "a text that is not empty", "too_short": "a list that is not empty"}
_SAID = {"extra_forbidden": "no such key", "missing": "is missing; give it"}


def said_of_fault(fault: ErrorDetails) -> str:
    """Return the value found, the limit and what to do, where pydantic says less."""
    kind, context, given = fault["type"], fault.get("ctx", {}), fault["input"]
    if kind in _LIMITS and isinstance(given, int | float | str):
        key, limit = _LIMITS[kind]
        return f"found {value_shown(given)}; give {limit.format(_plain(context[key]))}"
    wanted = _WANTED.get(kind) or (None if given else _EMPTY.get(kind)) or _name_wanted(fault)
    if wanted and isinstance(given, str | int | float | list | dict | None):
        return f"found {value_shown(given)}; give {wanted}"
    if kind in _SAID:
        return _SAID[kind]
    if kind == "union_tag_invalid":
        tag = str(context["tag"])
        known = re.findall(r"'([^']*)'", str(context["expected_tags"]))
        near = difflib.get_close_matches(tag, known, n=1)
        meant = f"did you mean {near[0]!r}? " if near else ""
        key = str(context["discriminator"]).strip("'")
        return f"{key} is {value_shown(tag)}; {meant}choose among {', '.join(known)}"
    if kind == "literal_error" and isinstance(given, str):
        known = re.findall(r"'([^']*)'", str(context["expected"]))
        near = difflib.get_close_matches(given, known, n=1)
        if near:
            return f"{fault['msg']}{_input_shown(fault)}; did you mean {near[0]!r}?"
    return fault["msg"].removeprefix("Value error, ") + _input_shown(fault)


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
