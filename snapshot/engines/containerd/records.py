"""What snapshots there are: containerd asks, this decides, and says what must be kept, made and removed.

::

    prepare, view            commit
    --------------> active ----------> committed <---- a lazy layer is born committed
                    view                   ^
                      |  remove            | parent of others: cannot be removed
                      v                    v
                                 gone

A machine: it does no I/O and reads no clock. What it returns is to be kept before a client is answered.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, assert_never

from omniload.base.errors import ConfigError, StateError

__all__ = [
    "Commit",
    "Forget",
    "InvalidSnapshotError",
    "Keep",
    "Kind",
    "LayerFound",
    "Prepare",
    "Relabel",
    "Remove",
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
    """The name is taken; of a lazy layer this is good news."""


class SnapshotInUseError(StateError):
    """The snapshot's state forbids it now."""


class InvalidSnapshotError(ConfigError):
    """What was asked can never be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One snapshot, by the name that containerd gave it."""

    key: str
    number: int
    """Of its folder; never used twice while anything of the old one is left."""
    parent: str
    """Key of what lies below; empty at the bottom."""
    kind: Kind
    labels: Mapping[str, str]
    created_ns: int
    updated_ns: int
    size_bytes: int = 0
    """Of a committed one with files of its own."""
    inodes: int = 0
    image: str = ""
    """Digest of the manifest, of a lazy layer."""
    layers: int = 0
    """Of a lazy layer: it and those below it, together; 0 for one with files of its own."""

    @property
    def is_lazy(self) -> bool:
        """Whether it is a layer that is read from its registry."""
        return self.layers > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """A container, or a layer to be unpacked, wants a place."""

    key: str
    parent: str
    labels: Mapping[str, str]
    kind: Kind
    now_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFound:
    """A layer can be read lazily, so nobody needs to unpack it."""

    name: str
    parent: str
    labels: Mapping[str, str]
    image: str
    layers: int
    now_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """What was written becomes a layer for others."""

    name: str
    key: str
    labels: Mapping[str, str]
    size_bytes: int
    inodes: int
    now_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Remove:
    """Nobody needs it any more."""

    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Relabel:
    """Its labels change: all of them, or those that ``paths`` names."""

    key: str
    labels: Mapping[str, str]
    paths: tuple[str, ...]
    now_ns: int


Event = Prepare | LayerFound | Commit | Remove | Relabel


@dataclass(frozen=True, slots=True)
class Keep:
    """Write it down, over what has its number."""

    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class Forget:
    """Strike it out, and then take its files away."""

    snapshot: Snapshot


Command = Keep | Forget


@dataclass(slots=True)
class Snapshots:
    """All snapshots, by key."""

    by_key: dict[str, Snapshot] = field(default_factory=dict)
    next_number: int = 1

    @classmethod
    def of(cls, snapshots: Sequence[Snapshot]) -> "Snapshots":
        """Return the machine in a kept state."""
        last = max((snapshot.number for snapshot in snapshots), default=0)
        return cls({snapshot.key: snapshot for snapshot in snapshots}, last + 1)

    def handle(self, event: Event) -> tuple[Command, ...]:
        """Apply one event and return what must be kept, in order.

        Raises:
            SnapshotMissingError: Key or parent are not there.
            SnapshotExistsError: The new name is taken.
            SnapshotInUseError: It has children, or is not of the kind that this needs.
            InvalidSnapshotError: A name is empty, the parent is no layer, or a field never changes.
        """
        match event:
            case Prepare():
                return self._prepare(event)
            case LayerFound():
                return self._found(event)
            case Commit():
                return self._commit(event)
            case Remove():
                return self._remove(event)
            case Relabel():
                return self._relabel(event)
            case _:
                assert_never(event)

    def get(self, key: str) -> Snapshot:
        """Return a snapshot.

        Raises:
            SnapshotMissingError: There is none of that key.
        """
        if (found := self.by_key.get(key)) is None:
            raise SnapshotMissingError(f"snapshot {key!r} is not here; prepare it first")
        return found

    def parents(self, snapshot: Snapshot) -> tuple[Snapshot, ...]:
        """Return what lies below a snapshot, uppermost first."""
        chain = []
        while snapshot.parent:
            snapshot = self.by_key[snapshot.parent]
            chain.append(snapshot)
        return tuple(chain)

    def _prepare(self, event: Prepare) -> tuple[Command, ...]:
        self._check_new(event.key)
        self._check_parent(event.parent)
        return self._add(event.key, event.kind, event)

    def _found(self, event: LayerFound) -> tuple[Command, ...]:
        self._check_new(event.name)
        self._check_parent(event.parent)
        below = self.by_key[event.parent].layers if event.parent else 0
        if event.layers != below + 1:
            raise InvalidSnapshotError(
                f"layer {event.layers} of image {event.image} cannot lie on {event.parent!r}, which "
                f"shows {below} lazy layers; a lazy layer lies on the lazy one below it"
            )
        return self._add(event.name, "committed", event, image=event.image, layers=event.layers)

    def _commit(self, event: Commit) -> tuple[Command, ...]:
        found = self.get(event.key)
        if found.kind != "active":
            raise SnapshotInUseError(
                f"snapshot {event.key!r} is {found.kind}; only active ones commit"
            )
        self._check_new(event.name)
        made = replace(
            found,
            key=event.name,
            kind="committed",
            labels=dict(event.labels),
            size_bytes=event.size_bytes,
            inodes=event.inodes,
            updated_ns=event.now_ns,
        )
        # Nothing lies on an active one, so nobody's parent changes its name.
        del self.by_key[event.key]
        self.by_key[event.name] = made
        return (Keep(made),)

    def _remove(self, event: Remove) -> tuple[Command, ...]:
        found = self.get(event.key)
        if children := sum(each.parent == event.key for each in self.by_key.values()):
            raise SnapshotInUseError(
                f"snapshot {event.key!r} has {children} on it; remove what lies on it first"
            )
        del self.by_key[event.key]
        return (Forget(found),)

    def _relabel(self, event: Relabel) -> tuple[Command, ...]:
        found = self.get(event.key)
        labels = dict(found.labels)
        for path in event.paths or ("labels",):
            name = path.removeprefix("labels.")
            if path == "labels":
                labels = dict(event.labels)
            elif name != path:
                labels[name] = event.labels.get(name, "")
            else:
                raise InvalidSnapshotError(
                    f"field {path!r} of snapshot {event.key!r} never changes; only labels do"
                )
        # A label is removed by setting it to nothing.
        labels = {name: value for name, value in labels.items() if value}
        made = replace(found, labels=labels, updated_ns=event.now_ns)
        self.by_key[event.key] = made
        return (Keep(made),)

    def _add(
        self, key: str, kind: Kind, event: Prepare | LayerFound, *, image: str = "", layers: int = 0
    ) -> tuple[Command, ...]:
        added = Snapshot(
            key=key,
            number=self.next_number,
            parent=event.parent,
            kind=kind,
            labels=dict(event.labels),
            created_ns=event.now_ns,
            updated_ns=event.now_ns,
            image=image,
            layers=layers,
        )
        self.next_number += 1
        self.by_key[key] = added
        return (Keep(added),)

    def _check_new(self, key: str) -> None:
        if not key:
            raise InvalidSnapshotError("a snapshot without a name cannot be found again; name it")
        if key in self.by_key:
            raise SnapshotExistsError(f"snapshot {key!r} is here already; take another name")

    def _check_parent(self, parent: str) -> None:
        if parent and self.get(parent).kind != "committed":
            raise InvalidSnapshotError(
                f"parent {parent!r} is {self.by_key[parent].kind}; only a committed one may be one"
            )


_QUOTED = r'"(?:[^"\\]|\\.)*"'
_NAME = rf"(?:[A-Za-z0-9_]+|{_QUOTED})"
_SELECTOR = re.compile(
    rf'\s*(?P<field>{_NAME}(?:\.{_NAME})*)\s*==\s*(?P<value>{_QUOTED}|[^\s,"][^\s,]*)\s*(?:,|\Z)'
)
_PART = re.compile(_NAME)
_LONGEST = 64 << 10


def parse_filters(filters: Sequence[str]) -> Callable[[Snapshot], bool]:
    """Return the predicate of filters such as ``name==a,labels."b/c"==d``; without one it holds for every snapshot.

    containerd asks its snapshotters by equality alone (for a lazy layer, by label and parent): what
    else its grammar has is refused::

        filter    selector , selector ...          all must hold; of several filters one
        selector  field == value
        field     name . name ...                  a name or value with other signs stands in quotes

    Raises:
        InvalidSnapshotError: A filter breaks the grammar.

    Source:
        containerd, package ``filters``; ``createSnapshot`` of its package ``metadata``.
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
