"""Layers merged into the one tree a container sees: whiteouts, replaced kinds, hard links.

The rules are those of the image specification and of the tools that unpack by it:

- ``.wh.NAME`` hides what lower layers have at ``NAME``; ``.wh..wh..opq`` hides all that
  lower layers have in its directory. Neither touches its own layer, in whatever order.
- A directory over a directory keeps the children and takes the new attributes; every
  other meeting of two entries replaces the lower one and what was below it.
- A hard link is another name of the file its target names at that moment.
- Parents that no layer names belong to root and have mode 755.
- A symbolic link in the path of an entry is followed, inside the root.

Source:
    OCI image specification, "Image Layer Filesystem Changeset".
"""

import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from omniload.base.errors import IntegrityError
from snapshot.image.layer.entries import Entry, Extent, Kind

__all__ = ["OPAQUE", "ROOT", "WHITEOUT", "Node", "Tree", "merge"]

ROOT = 1
"""Number of the root, as every kernel expects it."""
WHITEOUT = ".wh."
OPAQUE = ".wh..wh..opq"
_MAX_LINKS = 40
"""Symbolic links that are followed in one path, as the kernel does."""
_MAX_DEPTH = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A file, directory or other object of the merged tree, under all its names."""

    number: int
    kind: Kind
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    size_bytes: int
    target: str
    device: tuple[int, int]
    xattrs: tuple[tuple[str, bytes], ...]
    layer: int
    """Number of the layer its data lies in, from 0 at the bottom."""
    extents: tuple[Extent, ...]
    links: int
    """Names; of a directory two and one for each directory in it."""
    parent: int
    """Of a directory: the one above, the root's own for the root. Otherwise of its first name."""
    children: Mapping[str, int]
    """Of a directory: numbers by name, sorted."""


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
        """Return what a directory has under a name."""
        found = self.node(number).children.get(name)
        return None if found is None else self.node(found)

    def lookup(self, path: str) -> Node:
        """Return what is at a path, following no symbolic link.

        Raises:
            FileNotFoundError: Nothing is.
        """
        node = self.nodes[0]
        for name in path.strip("/").split("/") if path.strip("/") else ():
            found = node.children.get(name)
            if found is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            node = self.node(found)
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


@dataclass(slots=True, eq=False)
class _Making:
    """A node while layers are laid over each other."""

    entry: Entry
    layer: int
    children: dict[str, "_Making"] = field(default_factory=dict)

    @property
    def is_directory(self) -> bool:
        return self.entry.kind == "directory"


def merge(layers: Sequence[Sequence[Entry]]) -> Tree:
    """Lay layers over each other.

    Args:
        layers: Entries of each, lowest first, in the order of their tar.

    Returns:
        The tree. It depends on nothing but its arguments: two nodes that merge the same
        layers give every file the same number.

    Raises:
        IntegrityError: A hard link has no target or links a directory, a path goes through
            a file, or symbolic links lead in a circle.
    """
    root = _Making(Entry(path="", kind="directory", mode=0o755), 0)
    for layer, entries in enumerate(layers):
        # Whiteouts first, so that none of them hides what its own layer adds.
        for entry in entries:
            if _name(entry.path).startswith(WHITEOUT):
                _hide(root, entry)
        for entry in entries:
            if not _name(entry.path).startswith(WHITEOUT):
                _add(root, entry, layer)
    return _frozen(root)


def _hide(root: _Making, entry: Entry) -> None:
    name = _name(entry.path)
    parent = _walk(root, _parent(entry.path), make_for=None)
    if parent is None or not parent.is_directory:
        return
    if name == OPAQUE:
        parent.children.clear()
    elif not name.startswith(WHITEOUT * 2):  # other names of that form mean nothing any more
        parent.children.pop(name.removeprefix(WHITEOUT), None)


def _add(root: _Making, entry: Entry, layer: int) -> None:
    if not entry.path:
        root.entry, root.layer = entry, layer
        return
    parent = _directory(root, _parent(entry.path), layer)
    name = _name(entry.path)
    below = parent.children.get(name)
    if entry.kind == "hardlink":
        target = _find(root, entry.target)
        if target is None or target.is_directory:
            what = "nothing" if target is None else "a directory"
            raise IntegrityError(
                f"hard link {entry.path!r} in layer {layer} names {entry.target!r}, which is "
                f"{what}; build the image anew"
            )
        parent.children[name] = target
    elif below is not None and below.is_directory and entry.kind == "directory":
        below.entry, below.layer = entry, layer
    else:
        parent.children[name] = _Making(entry, layer)


def _directory(root: _Making, path: str, layer: int) -> _Making:
    """Return the directory at ``path``, made where it is missing."""
    found = _walk(root, path, make_for=layer)
    assert found is not None, "what is missing was made"
    if not found.is_directory:
        raise IntegrityError(
            f"layer {layer} puts entries below {path!r}, which is no directory but a "
            f"{found.entry.kind}; build the image anew"
        )
    return found


def _find(root: _Making, path: str) -> _Making | None:
    """Return what is at ``path``, its last part not followed; None where nothing is."""
    parent = _walk(root, _parent(path), make_for=None)
    if not path or parent is None:
        return parent
    return parent.children.get(_name(path))


def _walk(root: _Making, path: str, *, make_for: int | None) -> _Making | None:
    """Follow ``path`` through symbolic links, all of them inside the root."""
    above: list[_Making] = [root]
    waiting = [part for part in reversed(path.split("/")) if part]
    links = 0
    while waiting:
        part = waiting.pop()
        here = above[-1]
        if part in {".", ".."}:
            if part == ".." and len(above) > 1:
                above.pop()
            continue
        found = here.children.get(part)
        if found is None:
            if make_for is None or not here.is_directory:
                return None if make_for is None else here
            found = _Making(Entry(path="", kind="directory", mode=0o755), make_for)
            here.children[part] = found
        if found.entry.kind == "symlink":
            links += 1
            if links > _MAX_LINKS or len(waiting) > _MAX_DEPTH:
                raise IntegrityError(
                    f"path {path[:200]!r} goes through more than {_MAX_LINKS} symbolic links; "
                    "they lead in a circle"
                )
            target = found.entry.target
            above = [root] if target.startswith("/") else above
            waiting += [name for name in reversed(target.split("/")) if name]
            continue
        above.append(found)
        if len(above) > _MAX_DEPTH:
            raise IntegrityError(f"path {path[:200]!r} is more than {_MAX_DEPTH} deep")
    return above[-1]


def _frozen(root: _Making) -> Tree:
    """Number the nodes in the order of a walk, and count their names."""
    numbers: dict[int, int] = {}
    links: dict[int, int] = {}
    parents: dict[int, int] = {id(root): ROOT}
    order: list[_Making] = []
    waiting = [root]
    while waiting:
        node = waiting.pop()
        links[id(node)] = links.get(id(node), 0) + 1
        if id(node) in numbers:
            continue
        order.append(node)
        numbers[id(node)] = len(order)
        node.children = dict(sorted(node.children.items()))
        for child in reversed(node.children.values()):
            # The last to be put here is the first that the walk meets.
            if id(child) not in numbers:
                parents[id(child)] = len(order)
            waiting.append(child)
    return Tree(tuple(_node(node, numbers, links, parents) for node in order))


def _node(
    making: _Making,
    numbers: Mapping[int, int],
    links: Mapping[int, int],
    parents: Mapping[int, int],
) -> Node:
    entry = making.entry
    directories = sum(child.is_directory for child in making.children.values())
    return Node(
        number=numbers[id(making)],
        kind=entry.kind,
        mode=entry.mode,
        uid=entry.uid,
        gid=entry.gid,
        mtime_ns=entry.mtime_ns,
        size_bytes=len(os.fsencode(entry.target)) if entry.kind == "symlink" else entry.size_bytes,
        target=entry.target,
        device=entry.device,
        xattrs=entry.xattrs,
        layer=making.layer,
        extents=entry.extents,
        links=2 + directories if making.is_directory else links[id(making)],
        parent=parents[id(making)],
        children={name: numbers[id(child)] for name, child in making.children.items()},
    )


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _parent(path: str) -> str:
    return path.rpartition("/")[0]
