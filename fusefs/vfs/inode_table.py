"""Inodes: numbers by which the kernel knows paths, and the files that are open under them.

A new file is known only here until its first flush, so that nobody else
sees half of it; lookups and listings of this mount add it. A path is made from the chain
of nodes above it, so renaming a directory renames everything below it at once.

A number is derived from the names that lead to an inode when the kernel first hears of it. So a file that
the kernel has forgotten gets its old number when it is found again, in this process or
the next, unless it was renamed or an inode that is still in use has that number.
"""

import errno
import hashlib
import os
import time
from collections.abc import Container, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fusefs.vfs.file.open_file import OpenFile

__all__ = ["ROOT", "InodeTable", "Node", "as_text", "body_of", "from_text", "open_below"]

ROOT = 1
SEVERAL = -1
_RESIZED_S = 1.0
"""Seconds that suffice for any caller to take an answer from the kernel's queue."""
_NUMBERS = 1 << 52
"""Limit of inode numbers: all fit the fraction of a double, the only kind of number in some languages."""


def as_text(name: str) -> str:
    """Return a name as text that JSON can hold, whatever its bytes: one character for each byte."""
    return os.fsencode(name).decode("latin-1")


def from_text(text: str) -> str:
    """Return the name that ``as_text`` wrote."""
    return os.fsdecode(text.encode("latin-1"))


@dataclass(slots=True, eq=False)
class Node:
    """One inode."""

    number: int
    parent: "Node | None"
    """Directory above; None for the root and for unlinked nodes."""
    name: str
    children: "dict[str, Node]" = field(default_factory=dict)
    """Nodes below that the kernel knows, or that are open."""
    lookups: int = 0
    """Number of the kernel's look-ups that it has not forgotten."""
    body: OpenFile | None = None
    """Open file; None while it is not open."""
    opens: int = 0
    readers: int = 0
    """Number of opens that may read."""
    writers: int = 0
    """Number of opens whose close publishes."""
    kind: str | None = None
    """Kind, file, directory or link, as far as it is known; it never changes."""
    num_moves: int = 0
    """Number of renames while it was open."""
    cached_version: Hashable | None = None
    """Name of the version whose bytes the kernel's page cache holds, if it is known."""
    advertised_size: int | None = None
    """Size sent to the kernel since it last had to ask; ``SEVERAL`` if more than one was sent."""
    kernel_size: int | None = None
    """Size in the kernel's inode, by answers and its own writes; ``SEVERAL`` after answers with different sizes."""
    resized_s: float = float("-inf")
    """Time when an answer, not a write of the kernel, last gave the inode another size."""
    changed_at: int = 0
    """Number of changes in the mount when this file was last published, or given attributes."""

    def opened(self, *, reads: bool, writes: bool) -> None:
        """Count a handle."""
        self.opens += 1
        self.readers += reads
        self.writers += writes

    def advertise(self, size_bytes: int) -> None:
        """Note a size that is sent to the kernel.

        If several answers are under way at once, the kernel may keep the older and drop the newer one.
        """
        if self.kernel_size not in {None, size_bytes}:
            self.resized_s = time.monotonic()
        self.kernel_size = size_bytes
        self.advertised_size = size_bytes if self.advertised_size in {None, size_bytes} else SEVERAL

    def written(self) -> None:
        """Note that somebody writes through the kernel, which then knows the size, and holds bytes of no version."""
        self.cached_version = self.advertised_size = None

    @property
    def resizes(self) -> bool:
        """Whether the kernel may be taking over another size just now.

        The kernel makes attributes valid a moment before it stores their size, and ``fstat`` takes no lock. So while
        an answer brings another size, ``fstat`` of another process could show the previous size. Attributes with a
        validity of zero are always asked for, and shown as they were answered.
        """
        return time.monotonic() - self.resized_s < _RESIZED_S

    def would_resize(self, size_bytes: int) -> bool:
        """Like ``resizes``, if a size were sent now."""
        return self.kernel_size not in {None, size_bytes} or self.resizes

    @property
    def is_attached(self) -> bool:
        """Whether the node still has a path."""
        return self.number == ROOT or self.parent is not None

    @property
    def is_pending(self) -> bool:
        """Whether it is a file that the store does not show yet."""
        return self.body is not None and not self.body.pending.published and self.is_attached

    def path(self) -> str:
        """Return the path of the node.

        Raises:
            FileNotFoundError: The node was unlinked, or a directory above it.
        """
        parts: list[str] = []
        node = self
        while node.number != ROOT:
            if node.parent is None:
                raise FileNotFoundError(errno.ENOENT, "unlinked", node.name)
            parts.append(node.name)
            node = node.parent
        return "/".join(reversed(parts))

    def child_path(self, name: str) -> str:
        """Return the path of a name in this directory."""
        above = self.path()
        return f"{above}/{name}" if above else name

    def pending_below(self) -> "Iterator[Node]":
        """Yield files directly in this directory that the store does not show yet."""
        return (child for child in self.children.values() if child.is_pending)


def open_below(top: Node) -> Iterator[Node]:
    """Yield a node and all nodes below it that are open."""
    # Iterate instead of recursing, because users make trees that are deeper than Python's stack.
    pending = [top]
    while pending:
        node = pending.pop()
        if node.body is not None:
            yield node
        pending += reversed(node.children.values())


class InodeTable:
    """The nodes of one mount. Used from the mount's loop only, so it needs no lock."""

    def __init__(self) -> None:
        # The kernel never forgets its look-up of the root.
        self._nodes: dict[int, Node] = {ROOT: Node(ROOT, None, "", lookups=1)}

    def node(self, number: int) -> Node:
        """Return an inode.

        Raises:
            OSError: ``ESTALE`` when the kernel never looked it up or forgot it.
        """
        try:
            return self._nodes[number]
        except KeyError:
            raise OSError(errno.ESTALE, f"inode {number} is not known") from None

    def child(self, parent: Node, name: str) -> Node:
        """Return the node of a name; create it if there is none."""
        node = parent.children.get(name)
        if node is None:
            node = Node(_new_number(parent, name, self._nodes), parent, name)
            parent.children[name] = node
            self._nodes[node.number] = node
        return node

    def detach(self, parent: Node, name: str) -> Node | None:
        """Remove a name; the node stays for its open handles, without a path."""
        node = parent.children.pop(name, None)
        if node is not None:
            node.parent = None
            self._drop_if_unused(node)
        return node

    def move(self, parent: Node, name: str, new_parent: Node, new_name: str) -> None:
        """Give a name's node another name, and all nodes below it another path."""
        # First detach the replaced node, which keeps its handles but loses the name.
        self.detach(new_parent, new_name)
        node = parent.children.pop(name, None)
        if node is None:
            return
        node.parent, node.name = new_parent, new_name
        new_parent.children[new_name] = node

    def forget(self, number: int, lookups: int) -> None:
        """Note that the kernel dropped some of its references."""
        node = self._nodes.get(number)
        if node is not None and node.number != ROOT:
            node.lookups -= lookups
            self._drop_if_unused(node)

    def closed(self, node: Node, *, reads: bool, writes: bool) -> None:
        """Note that a handle was closed."""
        node.opens -= 1
        node.readers -= reads
        node.writers -= writes
        if node.opens == 0:
            node.body = None
            self._drop_if_unused(node)

    def state(self) -> list[list[Any]]:
        """Return all nodes as JSON values: number, number of the parent or 0, name, lookups."""
        return [
            [
                node.number,
                node.parent.number if node.parent else 0,
                as_text(node.name),
                node.lookups,
            ]
            for node in self._nodes.values()
        ]

    @classmethod
    def resumed(cls, state: Iterable[Sequence[Any]]) -> "InodeTable":
        """Return the tree that ``state`` describes; nothing is open in it."""
        tree = cls()
        lines = list(state)
        for number, _, name, lookups in lines:
            # The state has no record of sizes that the previous process sent, so the next size counts as another one.
            node = Node(number, None, from_text(name), lookups=lookups, kernel_size=SEVERAL)
            tree._nodes[number] = node
        # In a second pass, because a line may come before that of its parent.
        for number, above, _, _ in lines:
            if above:
                node, parent = tree._nodes[number], tree._nodes[above]
                node.parent = parent
                parent.children[node.name] = node
        return tree

    def _drop_if_unused(self, node: Node) -> None:
        if node.lookups > 0 or node.opens > 0 or node.children or node.number == ROOT:
            return
        self._nodes.pop(node.number, None)
        above = node.parent
        if above is not None and above.children.get(node.name) is node:
            del above.children[node.name]
            # If the kernel forgets a directory before its children, the directory goes with the last of them.
            self._drop_if_unused(above)


def body_of(node: Node) -> OpenFile | None:
    """Return the body of a node, which may have got one while a handler waited."""
    return node.body


def _new_number(parent: Node, name: str, taken: Container[int]) -> int:
    """Return a number for a name that no other inode has."""
    key, attempt = f"{parent.number}/".encode() + os.fsencode(name), 0
    while True:
        # Use the number of the parent, not its path, so that the files below a renamed folder keep their numbers.
        digest = hashlib.blake2b(key, digest_size=8, salt=attempt.to_bytes(8, "little"))
        number = int.from_bytes(digest.digest(), "little") % _NUMBERS
        if number > ROOT and number not in taken:
            return number
        attempt += 1
