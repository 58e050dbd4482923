"""The rules of merging, one by one."""

import pytest

from omniload.base.errors import IntegrityError
from snapshot.image.layer.index import Entry, Extent
from snapshot.image.tree.merge import merge
from snapshot.image.tree.tree import ROOT


def d(path, **changes):
    return Entry(path=path, kind="directory", **{"mode": 0o755} | changes)


def f(path, size=0, **changes):
    extents = (Extent(0, 0, size),) if size else ()
    return Entry(path=path, kind="file", size_bytes=size, extents=extents, **changes)


def link(path, target):
    return Entry(path=path, kind="symlink", target=target, mode=0o777)


def hard(path, target):
    return Entry(path=path, kind="hardlink", target=target)


def names(*layers):
    return [path for path, _ in merge(layers).walk()][1:]


def test_no_layers_make_an_empty_root():
    root = merge([]).node(ROOT)

    assert (root.entry.kind, root.entry.mode, root.links, root.parent) == (
        "directory",
        0o755,
        2,
        ROOT,
    )


def test_a_later_layer_replaces_a_file_and_keeps_its_neighbours():
    tree = merge([[d("a"), f("a/x", 1), f("a/y", 2)], [f("a/x", 9, mode=0o600)]])

    assert (tree.lookup("a/x").entry.size_bytes, tree.lookup("a/x").layer) == (9, 1)
    assert (tree.lookup("a/y").entry.size_bytes, tree.lookup("a/y").layer) == (2, 0)


def test_a_whiteout_hides_what_is_below_and_leaves_no_trace_of_itself():
    assert names([d("a"), f("a/x"), f("a/y")], [f("a/.wh.x")]) == ["a", "a/y"]
    assert names([d("a"), f("a/x")], [f(".wh.a")]) == []
    assert names([f("a")], [f(".wh.never-there")]) == ["a"]


def test_a_whiteout_does_not_touch_its_own_layer_in_whatever_order():
    for upper in ([f(".wh.x"), f("x", 5)], [f("x", 5), f(".wh.x")]):
        assert merge([[f("x", 1)], upper]).lookup("x").entry.size_bytes == 5


def test_an_opaque_directory_hides_what_lower_layers_have_in_it():
    lower = [d("a", mode=0o700), f("a/x"), d("a/b"), f("a/b/y")]
    for upper in ([f("a/.wh..wh..opq"), f("a/z")], [f("a/z"), f("a/.wh..wh..opq")]):
        assert names(lower, upper) == ["a", "a/z"]


def test_other_marks_of_old_file_systems_mean_nothing():
    assert names([f("a")], [f(".wh..wh.plnk"), f(".wh..wh.aufs")]) == ["a"]


def test_a_directory_over_a_directory_takes_attributes_and_keeps_children():
    tree = merge([[d("a", mode=0o700), f("a/x")], [d("a", mode=0o711, uid=5)]])

    assert (tree.lookup("a").entry.mode, tree.lookup("a").entry.uid) == (0o711, 5)
    assert tree.lookup("a/x").entry.kind == "file"


def test_a_file_over_a_directory_takes_all_below_away_and_back():
    assert names([d("a"), f("a/x")], [f("a")]) == ["a"]
    assert names([d("a"), f("a/x")], [f("a")], [d("a")]) == ["a"]


def test_hard_links_are_one_node_with_two_names():
    tree = merge([[d("a"), f("a/x", 3), hard("y", "a/x")]])

    assert tree.lookup("y") is tree.lookup("a/x")
    assert tree.lookup("y").links == 2


def test_a_hard_link_may_name_a_file_of_a_lower_layer_and_outlives_it():
    tree = merge([[f("x", 3)], [hard("y", "x")], [f(".wh.x")]])

    assert tree.lookup("y").entry.size_bytes == 3
    assert tree.lookup("y").links == 1


def test_a_hard_link_keeps_what_its_target_was_when_that_is_replaced():
    tree = merge([[f("x", 3), hard("y", "x")], [f("x", 4)]])

    assert (tree.lookup("x").entry.size_bytes, tree.lookup("y").entry.size_bytes) == (4, 3)


@pytest.mark.parametrize("target", ["nothing", "a"])
def test_a_hard_link_to_nothing_or_a_directory_is_refused(target):
    with pytest.raises(IntegrityError, match="hard link 'y' in layer 0 names"):
        merge([[d("a"), hard("y", target)]])


def test_missing_parents_belong_to_root_and_are_open_to_read():
    node = merge([[f("a/b/c")]]).lookup("a/b")

    assert (node.entry.kind, node.entry.mode, node.entry.uid) == ("directory", 0o755, 0)


def test_an_entry_below_a_symbolic_link_lands_where_the_link_leads():
    lower = [d("usr"), d("usr/lib"), link("lib", "usr/lib"), link("usr/up", "../usr/lib")]

    assert "usr/lib/x" in names(lower, [f("lib/x")])
    assert "usr/lib/x" in names(lower, [f("usr/up/x")])
    assert names([*lower, f("usr/lib/x")], [f("lib/.wh.x")]) == ["lib", "usr", "usr/lib", "usr/up"]


def test_a_symbolic_link_leads_nowhere_outside_the_root():
    lower = [d("etc"), link("out", "../../../../etc"), link("abs", "/etc")]

    assert {"etc/x", "etc/y"} < set(names(lower, [f("out/x"), f("abs/y")]))


def test_symbolic_links_in_a_circle_are_refused():
    with pytest.raises(IntegrityError, match="lead in a circle"):
        merge([[link("a", "b"), link("b", "a"), f("a/x")]])


def test_an_entry_below_a_file_is_refused():
    with pytest.raises(IntegrityError, match="is no directory but a file"):
        merge([[f("a"), f("a/x")]])


def test_numbers_count_from_the_root_in_the_order_of_a_walk():
    tree = merge([[f("b"), d("a"), f("a/x"), hard("c", "b")]])

    assert [(path, node.number) for path, node in tree.walk()] == [
        ("", 1),
        ("a", 2),
        ("a/x", 3),
        ("b", 4),
        ("c", 4),
    ]
    assert [node.parent for node in tree.nodes] == [1, 1, 2, 1]
    assert tree.node(1).links == 3
    assert tree.child(1, "a").number == 2
    assert tree.child(1, "none") is None
    with pytest.raises(KeyError):
        tree.node(9)
    assert tree.lookup("a/none/below") is None


def test_the_root_takes_the_attributes_a_layer_gives_it():
    assert merge([[d("", mode=0o700, uid=3)]]).node(ROOT).entry.mode == 0o700
