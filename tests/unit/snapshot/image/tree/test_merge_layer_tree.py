"""One layer as overlayfs wants it: what is deleted, what is opaque, and whose attributes a directory has."""

import pytest

from omniload.base.errors import IntegrityError
from snapshot.image.layer.index import Entry, Extent
from snapshot.image.tree.merge import OPAQUE_ATTRIBUTE, layer_tree

OPAQUE = ((OPAQUE_ATTRIBUTE, b"y"),)


def a_directory(path, mode=0o755, **changes):
    return Entry(path=path, kind="directory", mode=mode, **changes)


def a_file(path, **changes):
    return Entry(path=path, kind="file", size_bytes=1, extents=(Extent(0, 0, 1),), **changes)


def names(tree):
    return [path for path, _ in tree.walk() if path]


LOWER = (
    a_directory("tmp", 0o1777, uid=3),
    a_directory("etc"),
    a_file("etc/old"),
    a_file("etc/kept"),
    a_file("bin"),
)


def test_a_deleted_name_is_a_character_device_without_numbers():
    tree = layer_tree([LOWER, [a_directory("etc"), a_file("etc/.wh.old")]], 1)

    mark = tree.lookup("etc/old")
    assert names(tree) == ["etc", "etc/old"]
    assert (mark.entry.kind, mark.entry.device) == ("character", (0, 0))


def test_an_opaque_directory_has_the_attribute_and_no_marks():
    layer = [a_directory("etc"), a_file("etc/.wh..wh..opq"), a_file("etc/.wh.old")]

    tree = layer_tree([LOWER, layer], 1)

    assert names(tree) == ["etc"]
    assert tree.lookup("etc").entry.xattrs == OPAQUE


def test_a_directory_in_place_of_a_deleted_one_hides_what_was_in_it():
    tree = layer_tree([LOWER, [a_file(".wh.etc"), a_file("etc/new")]], 1)

    assert names(tree) == ["etc", "etc/new"]
    assert tree.lookup("etc").entry.xattrs == OPAQUE


def test_a_file_in_place_of_a_deleted_one_needs_no_mark():
    tree = layer_tree([LOWER, [a_file(".wh.bin"), a_file("bin", uid=9)]], 1)

    assert tree.lookup("bin").entry.uid == 9


def test_a_directory_that_the_layer_does_not_describe_is_as_lower_layers_have_it():
    tree = layer_tree([LOWER, [a_file("tmp/new"), a_file("var/log/new")]], 1)

    assert (tree.lookup("tmp").entry.mode, tree.lookup("tmp").entry.uid) == (0o1777, 3)
    assert tree.lookup("var").entry.mode == 0o755


def test_the_lowest_layer_has_nothing_to_hide():
    layer = [a_directory("etc"), a_file("etc/.wh.old"), a_file("var/.wh..wh..opq"), a_file(".wh.x")]

    tree = layer_tree([layer], 0)

    assert names(tree) == ["etc"]


def test_a_name_that_lower_layers_do_not_have_is_not_marked():
    tree = layer_tree([LOWER, [a_file("etc/.wh.none"), a_file("var/.wh.none")]], 1)

    assert names(tree) == ["etc"]


def test_attributes_of_overlayfs_in_a_layer_are_left_out():
    sent = (("trusted.overlay.redirect", b"/elsewhere"), ("user.overlay.opaque", b"y"))
    layer = [a_directory("d", xattrs=(*sent, ("user.mine", b"1")))]

    tree = layer_tree([layer], 0)

    assert tree.lookup("d").entry.xattrs == (("user.mine", b"1"),)


def test_a_hard_link_inside_the_layer_is_one_file():
    layer = [a_file("a"), Entry(path="b", kind="hardlink", target="a")]

    tree = layer_tree([LOWER, layer], 1)

    assert tree.lookup("a").number == tree.lookup("b").number
    assert tree.lookup("a").links == 2


def test_a_hard_link_to_a_lower_layer_cannot_be_laid_out_alone():
    with pytest.raises(IntegrityError, match="etc/kept"):
        layer_tree([LOWER, [Entry(path="b", kind="hardlink", target="etc/kept")]], 1)


def test_data_of_a_layer_lies_in_the_only_one_its_tree_knows():
    tree = layer_tree([LOWER, LOWER, [a_file("x")]], 2)

    assert tree.lookup("x").layer == 0


@pytest.mark.timeout(120)
def test_a_layer_that_takes_something_from_many_directories_is_laid_out_in_one_pass():
    num = 5_000  # with a pass for each, an hour
    lower = [Entry(path=f"d{n}", kind="directory", mode=0o755) for n in range(num)]
    lower += [Entry(path=f"d{n}/f", kind="file") for n in range(num)]
    upper = [Entry(path=f"d{n}/.wh.f", kind="file") for n in range(num)]

    tree = layer_tree([lower, upper], 1)

    assert len(tree.nodes) == 1 + 2 * num
