"""Separate layers, combined as overlayfs does, equal the merged image."""

from hypothesis import assume, given

from snapshot.image.layer.index import Entry
from snapshot.image.tree.merge import OPAQUE_ATTRIBUTE, layer_tree, merge
from snapshot.image.tree.tree import ROOT
from tests.property.snapshot.test_image_tree import LAYERS, laid


def overlaid(trees):
    """Compute the plain model of overlayfs over trees, lowest first: path to kind and owner."""
    found = {}
    waiting = [("", [(tree, tree.node(ROOT)) for tree in reversed(trees)])]
    while waiting:
        path, stack = waiting.pop()
        for name in {name for _, node in stack for name in node.children}:
            shown = visible(stack, name)
            if shown:
                below = f"{path}/{name}" if path else name
                found[below] = (shown[0][1].entry.kind, shown[0][1].entry.uid)
                if shown[0][1].entry.kind == "directory":
                    waiting.append((below, shown))
    return found


def visible(stack, name):
    """Return the visible entry of a name: one file, or directories from the top on."""
    shown = []
    for tree, node in stack:
        child = tree.child(node.number, name)
        if child is None:
            continue
        if child.entry.kind != "directory":
            is_mark = child.entry.kind == "character" and child.entry.device == (0, 0)
            return shown if shown or is_mark else [(tree, child)]
        shown.append((tree, child))
        if dict(child.entry.xattrs).get(OPAQUE_ATTRIBUTE) == b"y":
            break
    return shown


@given(LAYERS)
def test_trees_of_layers_laid_over_each_other_are_the_merged_tree(layers):
    assume(laid(layers) is not None)
    merged = {path: (n.entry.kind, n.entry.uid) for path, n in merge(layers).walk() if path}

    trees = [layer_tree(layers, number) for number in range(len(layers))]

    assert overlaid(trees) == merged


@given(LAYERS)
def test_a_mark_stands_only_where_something_is_hidden(layers):
    assume(laid(layers) is not None)

    for number in range(len(layers)):
        below = merge(layers[:number])
        known = {path for path, _ in below.walk()}
        for path, node in layer_tree(layers, number).walk():
            if node.entry.kind == "character" or OPAQUE_ATTRIBUTE in dict(node.entry.xattrs):
                assert path in known


@given(LAYERS)
def test_a_layer_depends_only_on_those_below_it(layers):
    assume(laid(layers) is not None)
    more = [*layers, [Entry(path="a/z", kind="directory", uid=77)]]

    for number in range(len(layers)):
        assert layer_tree(layers, number) == layer_tree(more, number)
