"""Metadata of trees: what is inline, what is not, what is refused."""

import pytest

from omniload.base.errors import ConfigError
from snapshot.image.entries import Entry, Extent
from snapshot.image.erofs_blobs import blob_layout
from snapshot.image.erofs_writer import plan_metadata
from snapshot.image.tree import merge
from tests.support.erofs_builders import a_directory, a_file, a_stream, content_of, filled, written
from tests.support.erofs_reader import ErofsReader

STREAM = a_stream(50_000)


def read(*layers):
    image, plan, _ = written([list(layer) for layer in layers])
    blobs = [filled(plan.blobs[number], STREAM) for number in plan.layers]
    reader = ErofsReader(image, blobs)
    return reader, {path.decode(): inode for path, _, inode in reader.tree()}


def test_an_empty_image_is_one_directory():
    reader, found = read([a_directory(mode=0o1777)])

    assert list(found) == [""]
    assert found[""]["mode"] == 0o041777
    assert [name for name, _, _ in reader.names(found[""])] == [b".", b".."]
    assert reader.devices == 0
    assert reader.uuid == bytes(range(16))


def test_devices_are_the_layers_with_data_in_their_order():
    layers = [a_file("a", 10, at=512)], [a_directory("d")], [a_file("b", 5000, at=1024)]

    reader, found = read(*layers)

    assert [slot[0].rstrip(b"\0") for slot in reader.slots] == [
        blob_layout(layers[number]).name.encode() for number in (0, 2)
    ]
    assert [slot[1] for slot in reader.slots] == [1, 2]
    assert reader.data(found["b"]) == STREAM[1024:6024]
    assert reader.data(found["a"]) == STREAM[512:522]


def test_a_hidden_file_is_not_in_the_image_but_in_the_blob():
    layers = [a_file("a", 10), a_file("b", 10, at=1024)], [a_file(".wh.a", 0)]

    reader, found = read(*layers)

    assert set(found) == {"", "b"}
    assert len(reader.blobs[0]) == 8192


def test_a_directory_of_many_names_has_whole_blocks_of_its_own():
    entries = [a_directory("d"), *[a_file(f"d/{n:04}-{'x' * 60}", 0) for n in range(200)]]

    reader, found = read(entries)

    assert found["d"]["layout"] == 0
    assert found["d"]["size"] > 3 * 4096
    assert len(reader.names(found["d"])) == 202


@pytest.mark.parametrize(("length", "layout"), [(1, 2), (4032, 2), (4033, 0), (4095, 0)])
def test_a_link_is_inline_while_it_fits_beside_its_inode(length, layout):
    target = "t" * length

    reader, found = read([Entry(path="l", kind="symlink", mode=0o777, target=target)])

    assert found["l"]["layout"] == layout
    assert reader.data(found["l"]) == target.encode()


def test_attributes_larger_than_a_block_are_kept():
    xattrs = (("user.large", bytes(range(256)) * 100), ("user.small", b"s"))

    reader, found = read([a_file("a", 5000, xattrs=xattrs), a_file("b", 100, at=9000)])

    assert found["a"]["xattrs"] == {b"user.large": xattrs[0][1], b"user.small": b"s"}
    assert reader.data(found["a"]) == STREAM[512:5512]
    assert reader.data(found["b"]) == STREAM[9000:9100]


def test_names_are_sorted_by_bytes_not_by_letters():
    names = ["\U0001f600", "\udcff", "\uffee", "a", "B", ".x", "..x", "-"]

    image, _, _ = written([[a_file(name, 0) for name in names]])

    reader = ErofsReader(image)
    stored = [name for name, _, _ in reader.names(reader.inode(reader.root_nid))]
    assert stored == sorted(stored)
    assert len(stored) == len(names) + 2


def test_a_file_that_is_all_hole_reads_as_zeroes_and_needs_no_device():
    hole = Entry(path="h", kind="file", size_bytes=30_000)

    reader, found = read([hole])

    assert reader.data(found["h"]) == bytes(30_000)
    assert reader.devices == 0


def test_a_file_with_holes_is_what_it_was():
    extents = (Extent(5000, 512, 3000), Extent(60_000, 9000, 10))
    file = Entry(path="s", kind="file", size_bytes=70_000, extents=extents)

    reader, found = read([file])

    assert reader.data(found["s"]) == content_of(file, STREAM)
    assert len(reader.blobs[0]) < 70_000


def test_a_hard_link_to_a_lower_layer_counts_as_a_name():
    layers = [a_file("a", 10)], [Entry(path="b", kind="hardlink", target="a")]

    _, found = read(*layers)

    assert found["a"]["at"] == found["b"]["at"]
    assert found["a"]["links"] == 2


def test_more_layers_with_data_than_devices_are_refused():
    layers = [[a_file(f"f{number}", 1)] for number in range(513)]
    layouts = [blob_layout(entries) for entries in layers]

    with pytest.raises(ConfigError, match="513 layers with data, more than 512"):
        plan_metadata(merge(layers), layouts)


def test_512_layers_still_have_their_root_where_a_superblock_can_say_it():
    reader, found = read(*([a_file(f"f{number}", 1, at=number)] for number in range(512)))

    assert reader.root_nid < 1 << 16
    assert reader.data(found["f511"]) == STREAM[511:512]


def test_what_erofs_cannot_hold_says_to_use_fuse():
    for entry in (
        Entry(path="n", kind="block", device=(5000, 1)),
        a_file("x", 0, xattrs=(("system.strange", b""),)),
    ):
        with pytest.raises(ConfigError, match="FUSE"):
            written([[entry]])
