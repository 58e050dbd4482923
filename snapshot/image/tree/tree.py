"""The tree that a container sees, as values: the result of ``merge``."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from snapshot.image.layer.index import Entry

__all__ = ["ROOT", "Node", "Tree"]

# The number that every kernel expects for a root.
ROOT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A file, directory or other object of the merged tree, under all its names."""

    number: int
    entry: Entry
    """Entry of the uppermost layer; its path is one of the names."""
    layer: int
    """Number of the layer that holds its data, from 0 at the bottom."""
    links: int
    """Number of names; for a directory two, and one for each directory in it."""
    parent: int
    """Number of the directory above, of itself for the root. For other entries, the directory of their first name."""
    children: Mapping[str, int]
    """For a directory: numbers by name, sorted."""


@dataclass(frozen=True, slots=True)
class Tree:
    """A merged image. Numbers start at 1 for the root and do not depend on anything but the layers."""

    nodes: tuple[Node, ...]

    def node(self, number: int) -> Node:
        """Return the node with a number.

        Raises:
            KeyError: There is none.
        """
        if not 1 <= number <= len(self.nodes):
            raise KeyError(number)
        return self.nodes[number - 1]

    def child(self, number: int, name: str) -> Node | None:
        """Return the entry of a directory under a name."""
        found = self.node(number).children.get(name)
        return None if found is None else self.node(found)

    def lookup(self, path: str) -> Node | None:
        """Return the node at a path, without following symbolic links; None if there is none."""
        node: Node | None = self.nodes[0]
        for name in filter(None, path.split("/")):
            node = None if node is None else self.child(node.number, name)
        return node

    def walk(self) -> Iterator[tuple[str, Node]]:
        """Yield every name in the tree with its node, parents first, names sorted."""
        waiting = [("", self.nodes[0])]
        while waiting:
            path, node = waiting.pop()
            yield path, node
            for name in reversed(list(node.children)):
                below = f"{path}/{name}" if path else name
                waiting.append((below, self.node(node.children[name])))
