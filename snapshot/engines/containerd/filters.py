"""Filters of containerd's lists: ``name==a,labels."b/c"!=d``; text to a predicate on snapshots.

::

    filter    selector , selector ...          all must hold; of several filters one
    selector  field | field == value | field != value | field ~= pattern
    field     name . name ...                  a name with other signs stands in quotes

Source:
    containerd, package ``filters``.
"""

import re
from collections.abc import Callable, Sequence

from snapshot.engines.containerd.records import InvalidSnapshotError, Snapshot

__all__ = ["parse_filters"]

Predicate = Callable[[Snapshot], bool]

_QUOTED = r'"(?:[^"\\]|\\.)*"'
_NAME = rf"(?:[A-Za-z0-9_]+|{_QUOTED})"
_VALUE = rf"(?:{_QUOTED}|\|[^|]*\||/[^/]*/|[^\s,|/\"][^\s,]*)"
_SELECTOR = re.compile(
    rf"\s*(?P<field>{_NAME}(?:\.{_NAME})*)\s*(?:(?P<op>==|!=|~=)\s*(?P<value>{_VALUE}))?\s*(?:,|\Z)"
)
_PART = re.compile(_NAME)
_LONGEST = 64 << 10


def parse_filters(filters: Sequence[str]) -> Predicate:
    """Return the predicate of the filters; without a filter it holds for every snapshot.

    Raises:
        InvalidSnapshotError: A filter breaks the grammar.
    """
    parsed = [_parse(text) for text in filters]
    return lambda snapshot: (
        not parsed or any(all(holds(snapshot) for holds in selectors) for selectors in parsed)
    )


def _parse(text: str) -> list[Predicate]:
    if len(text) > _LONGEST:
        raise InvalidSnapshotError(
            f"a filter of {len(text)} characters; one may have {_LONGEST}: ask in parts"
        )
    selectors, at = [], 0
    while at < len(text):
        found = _SELECTOR.match(text, at)
        if found is None:
            raise InvalidSnapshotError(
                f"filter {text[:200]!r} is not FIELD==VALUE,... from character {at}; see the "
                "syntax of containerd's filters"
            )
        selectors.append(_selector(found["field"], found["op"], found["value"]))
        at = found.end()
    return selectors


def _selector(text: str, operator: str | None, value: str | None) -> Predicate:
    path = [_unquoted(part) for part in _PART.findall(text)]
    wanted = "" if value is None else _unquoted(value)
    if operator == "~=":
        try:
            pattern = re.compile(wanted)
        except re.error as error:
            raise InvalidSnapshotError(f"pattern {wanted[:200]!r} of a filter: {error}") from error
        return lambda snapshot: pattern.search(_value(snapshot, path) or "") is not None
    if operator == "==":
        return lambda snapshot: _value(snapshot, path) == wanted
    if operator == "!=":
        return lambda snapshot: _value(snapshot, path) != wanted
    return lambda snapshot: _value(snapshot, path) is not None


def _value(snapshot: Snapshot, path: Sequence[str]) -> str | None:
    """Return what a snapshot has at a path of names, or None."""
    if path[0] == "labels":
        return snapshot.labels.get(".".join(path[1:]))
    if len(path) > 1:
        return None
    known = {"name": snapshot.key, "parent": snapshot.parent, "kind": snapshot.kind}
    return known.get(path[0])


def _unquoted(text: str) -> str:
    if text[0] in "|/" and len(text) > 1 and text[-1] == text[0]:
        return text[1:-1]
    if text[0] != '"':
        return text
    return re.sub(r"\\(.)", r"\1", text[1:-1])
