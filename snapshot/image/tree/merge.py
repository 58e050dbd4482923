"""Layers merged into the tree that a container sees, or one layer by itself in the form that overlayfs reads.

The rules are those of the image specification and of the tools that unpack by it:

- ``.wh.NAME`` hides ``NAME`` of lower layers; ``.wh..wh..opq`` hides everything that
  lower layers have in its directory. Neither affects its own layer, in whatever order.
- A directory over a directory keeps the children and takes the new attributes. In every
  other case, an entry replaces the lower entry and everything below it.
- A hard link is another name of the file that its target names at that moment.
- Parents that no layer names belong to root and have mode 755.
- A symbolic link in the path of an entry is followed, inside the root.

A container engine stacks the layers itself. The tree of a layer must then hold the layer's deletions
in the form that overlayfs reads (``layer_tree``):

====================  ==============================================================
in the layer          in the tree
====================  ==============================================================
``.wh.NAME``          ``NAME`` as a character device 0/0
``.wh..wh..opq``      the attribute ``trusted.overlay.opaque`` on its directory
====================  ==============================================================

Marks are set only where lower layers have something to hide: in a directory that no other
layer has, the kernel would list the marks as files that cannot be looked up.

Source:
    OCI image specification, "Image Layer Filesystem Changeset" and "Whiteouts"; the kernel's
    ``filesystems/overlayfs``.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from omniload.base.errors import IntegrityError
from snapshot.image.layer.index import Entry
from snapshot.image.tree.tree import ROOT, Node, Tree

__all__ = ["OPAQUE", "OPAQUE_ATTRIBUTE", "WHITEOUT", "layer_tree", "merge"]

WHITEOUT = ".wh."
OPAQUE = ".wh..wh..opq"
# The same limit as in the kernel for one path.
_MAX_LINKS = 40
# A path of 4095 bytes cannot have more parts.
_MAX_DEPTH = 2048


@dataclass(slots=True, eq=False)
class _Making:
    """A node during the merge of layers."""

    entry: Entry
    layer: int
    children: dict[str, "_Making"] = field(default_factory=dict)

    @property
    def is_directory(self) -> bool:
        return self.entry.kind == "directory"


def merge(layers: Sequence[Sequence[Entry]]) -> Tree:
    """Merge layers into one tree.

    Args:
        layers: Entries of each layer, lowest first, in the order of their tar.

    Returns:
        The tree. It depends on nothing but its arguments: two nodes that merge the same
        layers give every file the same number.

    Raises:
        IntegrityError: A hard link has no target or links a directory, a path goes through
            a file, or symbolic links lead in a circle.
    """
    root = _Making(Entry(path="", kind="directory", mode=0o755), 0)
    for layer, entries in enumerate(layers):
        # Whiteouts first, so that none of them hides an entry of its own layer.
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
    elif not name.startswith(WHITEOUT * 2):  # other names of that form have no meaning any more
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
    """Return the directory at ``path``; create it if it is missing."""
    found = _walk(root, path, make_for=layer)
    assert found is not None, "what is missing was made"
    if not found.is_directory:
        raise IntegrityError(
            f"layer {layer} puts entries below {path!r}, which is no directory but a "
            f"{found.entry.kind}; build the image anew"
        )
    return found


def _find(root: _Making, path: str) -> _Making | None:
    """Return the node at ``path``, without following its last part; None if there is none."""
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
            # The walk meets the last one that is put here first.
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
    directories = sum(child.is_directory for child in making.children.values())
    return Node(
        number=numbers[id(making)],
        entry=making.entry,
        layer=making.layer,
        links=2 + directories if making.is_directory else links[id(making)],
        parent=parents[id(making)],
        children={name: numbers[id(child)] for name, child in making.children.items()},
    )


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


OPAQUE_ATTRIBUTE = "trusted.overlay.opaque"
"""Attribute of a directory that hides the content of lower layers."""
_OVERLAY = ("trusted.overlay.", "user.overlay.")


def layer_tree(layers: Sequence[Sequence[Entry]], number: int) -> Tree:
    """Return one layer of an image in the form that overlayfs wants.

    Args:
        layers: Entries of the image's layers, lowest first; empty for an unknown layer.
        number: Number of the wanted layer, from 0.

    Returns:
        Its tree, whose data is in layer 0. Stacked over the trees of the layers below it, it
        gives the result of ``merge``.

    Raises:
        IntegrityError: The layer cannot stand alone: it has a hard link to a file of
            a lower layer, or one of the faults of ``merge``.
    """
    parts = _parted(layers[number])
    undescribed = parts.undescribed()
    if not number or not (parts.deleted or parts.opaque or parts.replaced or undescribed):
        return merge([parts.added])
    below = merge(layers[:number])
    marks = parts.marks(below)
    # Give directories the attributes of lower layers: an overlay shows those of the uppermost layer, and a bare
    # directory would, for example, remove the sticky bit from ``tmp``.
    known = ((path, _at(below, path)) for path in undescribed if not marks.hides(path))
    described = [replace(entry, path=path) for path, entry in known if entry is not None]
    deleted = [Entry(path=path, kind="character", device=(0, 0)) for path in sorted(marks.deleted)]
    # Marks first, so that an entry of the layer replaces the mark at its name.
    return merge([[*deleted, *map(marks.marked, [*marks.bare(), *described, *parts.added])]])


@dataclass(frozen=True, slots=True)
class _Marks:
    """The paths of lower layers that are hidden."""

    deleted: frozenset[str]
    opaque: frozenset[str]
    remade: frozenset[str]
    """Directories that were deleted and created again: they are opaque, and have new attributes."""

    def hides(self, path: str) -> bool:
        """Return whether the entry of lower layers at a path is hidden."""
        # This is asked for each path, so do not build a union of all hidden paths each time.
        if path in self.deleted or path in self.remade:
            return True
        return any(above in self.deleted or above in self.opaque for above in _parents(path))

    def bare(self) -> list[Entry]:
        """Return the recreated directories, in their form until an entry describes them."""
        return [Entry(path=path, kind="directory", mode=0o755) for path in sorted(self.remade)]

    def marked(self, entry: Entry) -> Entry:
        """Return a directory, with the mark that it hides lower ones if it does."""
        if entry.kind != "directory" or entry.path not in self.opaque:
            return entry
        return replace(entry, xattrs=(*entry.xattrs, (OPAQUE_ATTRIBUTE, b"y")))


@dataclass(frozen=True, slots=True)
class _Parts:
    """A layer, divided into its additions and its deletions."""

    added: tuple[Entry, ...]
    deleted: frozenset[str]
    """Deleted names; some may be added again."""
    opaque: frozenset[str]
    """Directories whose lower content is deleted."""
    replaced: frozenset[str]
    """Names that are a directory at the end, and were something else before."""

    def undescribed(self) -> list[str]:
        """Return directories with additions or deletions that no entry describes; parents first."""
        given = {entry.path for entry in self.added}
        touched = {*given, *self.deleted, *(f"{path}/." for path in self.opaque)}
        return sorted({p for path in touched for p in _parents(path)} - given)

    def marks(self, below: Tree) -> _Marks:
        """Return the marks that are needed over lower layers."""
        made = {e.path for e in self.added if e.kind == "directory"}
        made.update(p for e in self.added for p in _parents(e.path))
        deleted = frozenset(path for path in self.deleted if below.lookup(path) is not None)
        remade = deleted & made
        opaque = frozenset(p for p in self.opaque | self.replaced if _at(below, p) is not None)
        opaque |= remade
        hidden = deleted | opaque
        shown = (p for p in deleted - remade if not hidden.intersection(_parents(p)))
        return _Marks(frozenset(shown), opaque, remade)


def _parted(entries: Iterable[Entry]) -> _Parts:
    deleted, opaque, others = set[str](), set[str](), set[str]()
    added: list[Entry] = []
    for entry in entries:
        parent, _, name = entry.path.rpartition("/")
        if name == OPAQUE:
            opaque.add(parent)
        elif name.startswith(WHITEOUT * 2):
            continue  # other names of that form have no meaning any more
        elif name.startswith(WHITEOUT):
            deleted.add(f"{parent}/{name.removeprefix(WHITEOUT)}".lstrip("/"))
        else:
            added.append(_without_marks(entry))
            if entry.kind != "directory":
                others.add(entry.path)
    replaced = others & {entry.path for entry in added if entry.kind == "directory"}
    return _Parts(tuple(added), frozenset(deleted), frozenset(opaque), frozenset(replaced))


def _parents(path: str) -> Iterator[str]:
    while path:
        path = path.rpartition("/")[0]
        if path:
            yield path


def _at(tree: Tree, path: str) -> Entry | None:
    """Return the directory at a path; None if there is none."""
    node = tree.lookup(path)
    return node.entry if node is not None and node.entry.kind == "directory" else None


def _without_marks(entry: Entry) -> Entry:
    # Such attributes could make the kernel look elsewhere than the layers say.
    xattrs = tuple(pair for pair in entry.xattrs if not pair[0].startswith(_OVERLAY))
    return entry if xattrs == entry.xattrs else replace(entry, xattrs=xattrs)
