"""One layer by itself, as overlayfs wants its lower directories: nothing merged, deletions as marks.

A container engine lays layers over each other itself. So what a layer takes away must be
in its tree, in the form that overlayfs reads:

====================  ==============================================================
in the layer          in the tree
====================  ==============================================================
``.wh.NAME``          ``NAME`` as a character device 0/0
``.wh..wh..opq``      the attribute ``trusted.overlay.opaque`` on its directory
====================  ==============================================================

Marks stand only where lower layers have something to hide: in a directory that no other
layer has, the kernel would list them as files that cannot be looked at.

Source:
    OCI image specification, "Whiteouts"; the kernel's ``filesystems/overlayfs``.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from snapshot.image.layer.entries import Entry
from snapshot.image.tree.tree import OPAQUE, WHITEOUT, Node, Tree, merge

__all__ = ["OPAQUE_ATTRIBUTE", "layer_tree"]

OPAQUE_ATTRIBUTE = "trusted.overlay.opaque"
"""Says that a directory hides what lower layers have in it."""
_OVERLAY = ("trusted.overlay.", "user.overlay.")


def layer_tree(layers: Sequence[Sequence[Entry]], number: int) -> Tree:
    """Return one layer of an image as overlayfs wants it.

    Args:
        layers: Entries of the image's layers, lowest first; none of a layer that is not known.
        number: Which of them is wanted, from 0.

    Returns:
        Its tree; data lies in layer 0 of it. Laid over the trees of the layers below it, it
        gives what ``merge`` gives. A directory that the layer puts something in, but does not
        itself describe, has the attributes that lower layers give it: an overlay shows those
        of the uppermost, and a bare one would take, say, the sticky bit from ``tmp``.

        Attributes of overlayfs that the layer itself brings are left out: they could have the
        kernel look elsewhere than the layers say.

    Raises:
        IntegrityError: The layer cannot be laid out by itself: it has a hard link to a file of
            a lower layer, or one of the faults of ``merge``.
    """
    parts = _parted(layers[number])
    undescribed = parts.undescribed()
    if not number or not (parts.deleted or parts.opaque or parts.replaced or undescribed):
        return merge([parts.added])
    below = merge(layers[:number])
    marks = parts.marks(below)
    known = ((path, _at(below, path)) for path in undescribed if not marks.hides(path))
    described = [_directory(path, node) for path, node in known if node is not None]
    deleted = [Entry(path=path, kind="character", device=(0, 0)) for path in sorted(marks.deleted)]
    # Marks first, so that what the layer adds at a name replaces the mark there.
    return merge([[*deleted, *map(marks.marked, [*marks.bare(), *described, *parts.added])]])


@dataclass(frozen=True, slots=True)
class _Marks:
    """What of lower layers is hidden."""

    deleted: frozenset[str]
    opaque: frozenset[str]
    remade: frozenset[str]
    """Directories that were deleted and made again: opaque, and not as they were."""

    def hides(self, path: str) -> bool:
        """Return whether what lower layers have at a path is hidden."""
        above = set(_parents(path))
        return path in self.deleted | self.remade or bool(above & (self.deleted | self.opaque))

    def bare(self) -> list[Entry]:
        """Return the directories that are made anew, as they are until an entry describes them."""
        return [Entry(path=path, kind="directory", mode=0o755) for path in sorted(self.remade)]

    def marked(self, entry: Entry) -> Entry:
        """Return a directory with the mark that it hides lower ones, if it does."""
        if entry.kind != "directory" or entry.path not in self.opaque:
            return entry
        return replace(entry, xattrs=(*entry.xattrs, (OPAQUE_ATTRIBUTE, b"y")))


@dataclass(frozen=True, slots=True)
class _Parts:
    """A layer, parted into what it adds and what it takes away."""

    added: tuple[Entry, ...]
    deleted: frozenset[str]
    """Names that are taken away; some may be added again."""
    opaque: frozenset[str]
    """Directories whose lower content is taken away."""
    replaced: frozenset[str]
    """Names that are a directory in the end, and were something else before."""

    def undescribed(self) -> list[str]:
        """Return directories that something is put in or taken from, and that no entry describes; parents first."""
        given = {entry.path for entry in self.added}
        touched = {*given, *self.deleted, *(f"{path}/." for path in self.opaque)}
        return sorted({p for path in touched for p in _parents(path)} - given)

    def marks(self, below: Tree) -> _Marks:
        """Return what must be marked over lower layers."""
        made = {e.path for e in self.added if e.kind == "directory"}
        made.update(p for e in self.added for p in _parents(e.path))
        deleted = frozenset(path for path in self.deleted if _has(below, path))
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
            continue  # other names of that form mean nothing any more
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


def _has(tree: Tree, path: str) -> bool:
    try:
        tree.lookup(path)
    except FileNotFoundError:
        return False
    return True


def _at(tree: Tree, path: str) -> Node | None:
    """Return the directory at a path; None where there is none."""
    try:
        node = tree.lookup(path)
    except FileNotFoundError:
        return None
    return node if node.kind == "directory" else None


def _directory(path: str, node: Node) -> Entry:
    return Entry(
        path=path,
        kind="directory",
        mode=node.mode,
        uid=node.uid,
        gid=node.gid,
        mtime_ns=node.mtime_ns,
        xattrs=node.xattrs,
    )


def _without_marks(entry: Entry) -> Entry:
    xattrs = tuple(pair for pair in entry.xattrs if not pair[0].startswith(_OVERLAY))
    return entry if xattrs == entry.xattrs else replace(entry, xattrs=xattrs)
