"""Merging agrees with a model that has only paths, and never depends on chance."""

import itertools

from hypothesis import assume, given
from hypothesis import strategies as st

from snapshot.image.layer.index import Entry, Extent
from snapshot.image.tree.merge import merge

NAMES = st.sampled_from("abc")
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
COUNTER = itertools.count(1)


def entry(kind, path):
    serial = next(COUNTER) % 10_000
    extents = (Extent(0, serial, 1),) if kind == "file" else ()
    size = 1 if kind == "file" else 0
    return Entry(path=path, kind=kind, uid=serial, size_bytes=size, extents=extents)


KINDS = st.sampled_from(["file", "directory", "fifo"])
ADDED = st.builds(entry, KINDS, PATHS)


def whiteout(path):
    parent, _, name = path.rpartition("/")
    return entry("file", f"{parent}/.wh.{name}" if parent else f".wh.{name}")


WHITEOUTS = st.builds(whiteout, PATHS) | PATHS.map(lambda p: entry("file", f"{p}/.wh..wh..opq"))
LAYERS = st.lists(st.lists(ADDED | WHITEOUTS, max_size=8), max_size=4)


def drop(found, path):
    for known in [known for known in found if known == path or known.startswith(f"{path}/")]:
        del found[known]


def hide(found, path):
    parent, _, name = path.rpartition("/")
    if name != ".wh..wh..opq":
        drop(found, f"{parent}/{name[4:]}" if parent else name[4:])
        return
    for known in [known for known in found if known.startswith(f"{parent}/")]:
        del found[known]


def laid(layers):
    """Compute the plain model: a path exists or not. None if a layer cannot be laid over the others."""
    found = {}
    for layer in layers:
        hidden = [e.path for e in layer if e.path.rpartition("/")[2].startswith(".wh.")]
        for path in hidden:
            hide(found, path)
        for e in [e for e in layer if e.path not in hidden]:
            parts = e.path.split("/")
            above = ["/".join(parts[:i]) for i in range(1, len(parts))]
            if any(found.setdefault(path, ("directory", 0))[0] != "directory" for path in above):
                return None
            if e.kind != "directory" or found.get(e.path, ("directory",))[0] != "directory":
                drop(found, e.path)
            found[e.path] = (e.kind, e.uid)
    return found


@given(LAYERS)
def test_merging_agrees_with_the_plain_model(layers):
    model = laid(layers)
    assume(model is not None)

    tree = merge(layers)

    assert {path: (n.entry.kind, n.entry.uid) for path, n in tree.walk() if path} == model
    assert all(tree.lookup(path).number == node.number for path, node in tree.walk())


@given(LAYERS)
def test_a_tree_counts_its_links_and_knows_its_parents(layers):
    assume(laid(layers) is not None)

    tree = merge(layers)

    seen = [node.number for _, node in tree.walk()]
    assert sorted(set(seen)) == list(range(1, len(tree.nodes) + 1))
    for node in tree.nodes:
        if node.entry.kind == "directory":
            below = sum(tree.node(n).entry.kind == "directory" for n in node.children.values())
            assert node.links == 2 + below
        else:
            assert node.links == seen.count(node.number)
        assert node.number == 1 or node.number in tree.node(node.parent).children.values()
        assert list(node.children) == sorted(node.children)


@given(LAYERS)
def test_merging_twice_gives_the_same_tree(layers):
    assume(laid(layers) is not None)

    assert merge(layers) == merge(layers)
