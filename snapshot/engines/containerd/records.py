"""The machine of snapshots: containerd sends requests, and this decides the fate of each snapshot.

::

    prepare, view            commit
    --------------> active ----------> committed <---- a lazy layer is born committed
                    view                   ^
                      |  remove            | parent of others: cannot be removed
                      v                    v
                                 gone

A machine: it does no I/O and reads no clock. Keep the result of a change before the client is answered.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from omniload.base.errors import ConfigError, StateError

__all__ = [
    "InvalidSnapshotError",
    "Kind",
    "Snapshot",
    "SnapshotExistsError",
    "SnapshotInUseError",
    "SnapshotMissingError",
    "Snapshots",
    "parse_filters",
]

Kind = Literal["view", "active", "committed"]


class SnapshotMissingError(StateError):
    """There is no snapshot of that name."""


class SnapshotExistsError(StateError):
    """The name is taken; for a lazy layer this is good news."""


class SnapshotInUseError(StateError):
    """The snapshot's state forbids it now."""


class InvalidSnapshotError(ConfigError):
    """The request can never be fulfilled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One snapshot, by the name that containerd gave it."""

    key: str
    number: int
    """Number of the folder; never used twice while anything of the old folder is left."""
    parent: str
    """Key of the snapshot below; empty at the bottom."""
    kind: Kind
    labels: Mapping[str, str]
    created_ns: int
    updated_ns: int
    size_bytes: int = 0
    """Bytes of a committed snapshot with files of its own."""
    inodes: int = 0
    image: str = ""
    """For a lazy layer: digest of the manifest."""
    layers: int = 0
    """For a lazy layer: number of layers up to this one; 0 for a snapshot with files of its own."""

    @property
    def is_lazy(self) -> bool:
        """Whether it is a layer that is read from its registry."""
        return self.layers > 0


@dataclass(slots=True)
class Snapshots:
    """All snapshots, by key. A refused change changes nothing."""

    by_key: dict[str, Snapshot] = field(default_factory=dict)
    next_number: int = 1

    @classmethod
    def of(cls, snapshots: Sequence[Snapshot]) -> "Snapshots":
        """Return the machine in a kept state."""
        # Do not reuse a free number, because a container may still use the folder of a removed snapshot.
        last = max((snapshot.number for snapshot in snapshots), default=0)
        return cls({snapshot.key: snapshot for snapshot in snapshots}, last + 1)

    def get(self, key: str) -> Snapshot:
        """Return a snapshot.

        Raises:
            SnapshotMissingError: No snapshot has that key.
        """
        if (found := self.by_key.get(key)) is None:
            raise SnapshotMissingError(f"snapshot {key!r} is not here; prepare it first")
        return found

    def parents(self, snapshot: Snapshot) -> tuple[Snapshot, ...]:
        """Return the snapshots below a snapshot, uppermost first."""
        chain = []
        while snapshot.parent:
            snapshot = self.by_key[snapshot.parent]
            chain.append(snapshot)
        return tuple(chain)

    def add(  # noqa: PLR0913 -- the fields of a snapshot
        self,
        key: str,
        parent: str,
        labels: Mapping[str, str],
        *,
        kind: Kind,
        now_ns: int,
        image: str = "",
        layers: int = 0,
    ) -> Snapshot:
        """Add an active snapshot or a view on a parent, or a lazy layer of an image; return it.

        Raises:
            SnapshotExistsError: The key is taken.
            SnapshotMissingError: The parent does not exist.
            InvalidSnapshotError: The key is empty, the parent is no layer, or not the lazy one below.
        """
        self._check_new(key)
        if parent and self.get(parent).kind != "committed":
            raise InvalidSnapshotError(
                f"parent {parent!r} is {self.by_key[parent].kind}; only a committed one may be one"
            )
        below = self.by_key[parent].layers if parent else 0
        # One view shows a lazy chain from its bottom, so a gap in the chain would be shown as a missing layer.
        if layers and layers != below + 1:
            raise InvalidSnapshotError(
                f"layer {layers} of image {image} cannot lie on {parent!r}, which shows {below} "
                "lazy layers; a lazy layer lies on the lazy one below it"
            )
        added = Snapshot(
            key=key,
            number=self.next_number,
            parent=parent,
            kind=kind,
            labels=dict(labels),
            created_ns=now_ns,
            updated_ns=now_ns,
            image=image,
            layers=layers,
        )
        self.next_number += 1
        self.by_key[key] = added
        return added

    def commit(
        self, key: str, name: str, labels: Mapping[str, str], usage: tuple[int, int], now_ns: int
    ) -> Snapshot:
        """Make a layer of the written files, with its bytes and inodes; return it under its new name.

        Raises:
            SnapshotMissingError: No snapshot has that key.
            SnapshotInUseError: It is not active.
            SnapshotExistsError: The name is taken.
            InvalidSnapshotError: The name is empty.
        """
        found = self.get(key)
        if found.kind != "active":
            raise SnapshotInUseError(f"snapshot {key!r} is {found.kind}; only active ones commit")
        self._check_new(name)
        size_bytes, inodes = usage
        made = replace(
            found,
            key=name,
            kind="committed",
            labels=dict(labels),
            size_bytes=size_bytes,
            inodes=inodes,
            updated_ns=now_ns,
        )
        # No snapshot has an active one as its parent, so no parent's name changes.
        del self.by_key[key]
        self.by_key[name] = made
        return made

    def remove(self, key: str) -> Snapshot:
        """Remove a snapshot and return it.

        Raises:
            SnapshotMissingError: No snapshot has that key.
            SnapshotInUseError: Another snapshot has it as its parent.
        """
        found = self.get(key)
        # Its folder is a lower one of its children, and an overlay is undefined when a lower folder disappears.
        if children := sum(each.parent == key for each in self.by_key.values()):
            raise SnapshotInUseError(
                f"snapshot {key!r} has {children} on it; remove what lies on it first"
            )
        return self.by_key.pop(found.key)

    def relabel(
        self, key: str, labels: Mapping[str, str], paths: Sequence[str], now_ns: int
    ) -> Snapshot:
        """Change labels: all of them, or those that ``paths`` names; return the changed snapshot.

        Raises:
            SnapshotMissingError: No snapshot has that key.
            InvalidSnapshotError: A path names a field that never changes.
        """
        found = self.get(key)
        changed = dict(found.labels)
        for path in paths or ("labels",):
            name = path.removeprefix("labels.")
            if path == "labels":
                changed = dict(labels)
            elif name != path:
                changed[name] = labels.get(name, "")
            else:
                raise InvalidSnapshotError(
                    f"field {path!r} of snapshot {key!r} never changes; only labels do"
                )
        # Setting a label to an empty text removes it.
        changed = {name: value for name, value in changed.items() if value}
        self.by_key[key] = replace(found, labels=changed, updated_ns=now_ns)
        return self.by_key[key]

    def _check_new(self, key: str) -> None:
        if not key:
            raise InvalidSnapshotError("a snapshot without a name cannot be found again; name it")
        if key in self.by_key:
            raise SnapshotExistsError(f"snapshot {key!r} is here already; take another name")


_QUOTED = r'"(?:[^"\\]|\\.)*"'
_NAME = rf"(?:[A-Za-z0-9_]+|{_QUOTED})"
_SELECTOR = re.compile(
    rf'\s*(?P<field>{_NAME}(?:\.{_NAME})*)\s*==\s*(?P<value>{_QUOTED}|[^\s,"][^\s,]*)\s*(?:,|\Z)'
)
_PART = re.compile(_NAME)
_LONGEST = 64 << 10


def parse_filters(filters: Sequence[str]) -> Callable[[Snapshot], bool]:
    """Return the predicate of filters such as ``name==a,labels."b/c"==d``; without a filter, every snapshot matches.

    ::

        filter    selector , selector ...         all must match; of several filters one must
        selector  field == value
        field     name . name ...                 a name or value with other signs stands in quotes

    Raises:
        InvalidSnapshotError: A filter breaks the grammar.

    Source:
        containerd, package ``filters``; ``createSnapshot`` of its package ``metadata``.
    """
    # containerd asks its snapshotters only for equality (for a lazy layer, by label and parent), so the rest of its
    # grammar is refused.
    parsed = [_wanted(text) for text in filters]
    return lambda snapshot: (
        not parsed
        or any(all(_value(snapshot, f) == v for f, v in wanted.items()) for wanted in parsed)
    )


def _wanted(text: str) -> Mapping[tuple[str, ...], str]:
    """Return the values that fields must have."""
    # Check the length before the match, so that a client of the socket cannot hold a thread with a huge text.
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
    """Return the value of a snapshot at a path of names, or None."""
    if path[0] == "labels":
        # Join the names again, because without quotes the dots of a label's name divide it like a path.
        return snapshot.labels.get(".".join(path[1:]))
    known = {"name": snapshot.key, "parent": snapshot.parent, "kind": snapshot.kind}
    return known.get(path[0]) if len(path) == 1 else None


def _plain(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text[1:-1]) if text[0] == '"' else text
