"""Filters of containerd's lists: ``name==a,labels."b/c"==d``; text to a predicate on snapshots.

containerd asks its snapshotters by equality alone (for a lazy layer, by label and parent): what else its
grammar has is refused.

::

    filter    selector , selector ...          all must hold; of several filters one
    selector  field == value
    field     name . name ...                  a name or value with other signs stands in quotes

Source:
    containerd, package ``filters``; ``createSnapshot`` of its package ``metadata``.
"""

import re
from collections.abc import Callable, Mapping, Sequence

from snapshot.engines.containerd.records import InvalidSnapshotError, Snapshot

__all__ = ["parse_filters"]

_QUOTED = r'"(?:[^"\\]|\\.)*"'
_NAME = rf"(?:[A-Za-z0-9_]+|{_QUOTED})"
_SELECTOR = re.compile(
    rf'\s*(?P<field>{_NAME}(?:\.{_NAME})*)\s*==\s*(?P<value>{_QUOTED}|[^\s,"][^\s,]*)\s*(?:,|\Z)'
)
_PART = re.compile(_NAME)
_LONGEST = 64 << 10


def parse_filters(filters: Sequence[str]) -> Callable[[Snapshot], bool]:
    """Return the predicate of the filters; without a filter it holds for every snapshot.

    Raises:
        InvalidSnapshotError: A filter breaks the grammar.
    """
    parsed = [_wanted(text) for text in filters]
    return lambda snapshot: (
        not parsed
        or any(all(_value(snapshot, f) == v for f, v in wanted.items()) for wanted in parsed)
    )


def _wanted(text: str) -> Mapping[tuple[str, ...], str]:
    """Return the values that fields are to have."""
    if len(text) > _LONGEST:
        raise InvalidSnapshotError(
            f"a filter of {len(text)} characters; one may have {_LONGEST}: ask in parts"
        )
    wanted, at = dict[tuple[str, ...], str](), 0
    while at < len(text):
        found = _SELECTOR.match(text, at)
        if found is None:
            raise InvalidSnapshotError(
                f"filter {text[:200]!r} is not FIELD==VALUE,... from character {at}; ask for all "
                "and choose, or by equality"
            )
        wanted[tuple(map(_plain, _PART.findall(found["field"])))] = _plain(found["value"])
        at = found.end()
    return wanted


def _value(snapshot: Snapshot, path: Sequence[str]) -> str | None:
    """Return what a snapshot has at a path of names, or None."""
    if path[0] == "labels":
        return snapshot.labels.get(".".join(path[1:]))
    known = {"name": snapshot.key, "parent": snapshot.parent, "kind": snapshot.kind}
    return known.get(path[0]) if len(path) == 1 else None


def _plain(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text[1:-1]) if text[0] == '"' else text
