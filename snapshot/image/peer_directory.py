"""The machine behind a directory of nodes: who has joined, and who of them knows an image.

It is a hint like any list of peers: what it says decides whom a node asks first, and never
which bytes are right. It holds nothing that its nodes do not tell it again every few seconds,
so it may be lost and made anew at any time.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import assert_never

__all__ = [
    "DirectoryEvent",
    "NodeJoined",
    "NodeLeft",
    "PeerDirectory",
    "Ticked",
    "group_of",
]

_NAME = re.compile(r"[A-Za-z0-9._\[\]:-]{3,300}\Z")
_GROUP = re.compile(r"[0-9a-f]{64}\Z")
MAX_NODES = 100_000
MAX_BLOBS = 512


@dataclass(frozen=True, slots=True)
class NodeJoined:
    """A node serves, or still does: it says so again and again."""

    name: str
    """Where others reach it, as ``HOST:PORT``."""
    group: str
    """Of its token: nodes of another one would refuse it, and are not told of it."""
    blobs: frozenset[str]
    """Layers of the image it shows."""
    now_s: float


@dataclass(frozen=True, slots=True)
class NodeLeft:
    """A node serves no more."""

    name: str
    group: str


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has passed: who was silent for too long counts as gone."""

    now_s: float


DirectoryEvent = NodeJoined | NodeLeft | Ticked


@dataclass(slots=True)
class _Known:
    blobs: frozenset[str]
    seen_s: float


@dataclass(slots=True, kw_only=True)
class PeerDirectory:
    """Remembers nodes by group and name, for as long as they speak."""

    silent_s: float = 30.0
    """A node that said nothing for so long is gone."""
    _nodes: dict[tuple[str, str], _Known] = field(default_factory=dict)

    def handle(self, event: DirectoryEvent) -> tuple[str, ...]:
        """Apply one event; return the names of nodes that are gone by it.

        Raises:
            ValueError: A name or group is none, or there are too many nodes or layers.
        """
        match event:
            case NodeJoined(name=name, group=group, blobs=blobs, now_s=now_s):
                if not _NAME.match(name) or not _GROUP.match(group) or len(blobs) > MAX_BLOBS:
                    raise ValueError(
                        f"node {name[:99]!r} of group {group[:99]!r}, {len(blobs)} layers"
                    )
                if (group, name) not in self._nodes and len(self._nodes) >= MAX_NODES:
                    raise ValueError(f"{len(self._nodes)} nodes have joined; no more are taken")
                self._nodes[group, name] = _Known(blobs, now_s)
            case NodeLeft(name=name, group=group):
                return () if self._nodes.pop((group, name), None) is None else (name,)
            case Ticked(now_s=now_s):
                gone = [
                    k for k, known in self._nodes.items() if now_s - known.seen_s > self.silent_s
                ]
                for key in gone:
                    del self._nodes[key]
                return tuple(name for _, name in gone)
            case _:
                assert_never(event)
        return ()

    def who(self, group: str, blobs: Iterable[str]) -> tuple[str, ...]:
        """Return the nodes of a group that show one of these layers, sorted: the same answer for all."""
        wanted = frozenset(blobs)
        return tuple(
            sorted(
                name
                for (of, name), known in self._nodes.items()
                if of == group and not wanted.isdisjoint(known.blobs)
            )
        )


def group_of(token: str) -> str:
    """Return the name of the group of nodes that share a token; it does not tell the token."""
    return hashlib.sha256(f"omniload peers\n{token}".encode()).hexdigest()
