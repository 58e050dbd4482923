"""Any tree is in its EROFS image, read by the format's words; blobs and streams map both ways."""

import itertools
import os
import stat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snapshot.image.erofs_blobs import blob_layout
from snapshot.image.erofs_writer import plan_metadata, write_metadata
from tests.support.erofs_builders import (
    a_file,
    a_stream,
    content_of,
    filled,
    layers_of_entries,
    written,
)
from tests.support.erofs_reader import ErofsReader

STREAM = a_stream(40_000)
TYPES = {
    "file": stat.S_IFREG,
    "directory": stat.S_IFDIR,
    "symlink": stat.S_IFLNK,
    "character": stat.S_IFCHR,
    "block": stat.S_IFBLK,
    "fifo": stat.S_IFIFO,
}


def read_back(layers):
    image, plan, tree = written(layers)
    blobs = [filled(plan.blobs[number], STREAM) for number in plan.layers]
    return ErofsReader(image, blobs), plan, tree


@settings(deadline=None)
@given(layers_of_entries(stream_bytes=len(STREAM)))
def test_every_entry_of_a_tree_is_in_its_image(layers):
    reader, plan, tree = read_back(layers)

    found = {path: inode for path, _, inode in reader.tree()}

    expected = {os.fsencode(path): node for path, node in tree.walk()}
    assert found.keys() == expected.keys()
    for path, node in expected.items():
        inode = found[path]
        assert inode["mode"] == TYPES[node.kind] | node.mode
        assert inode["owner"] == (node.uid, node.gid)
        assert inode["mtime_ns"] == node.mtime_ns
        assert inode["links"] == node.links
        assert inode["number"] == node.number
        assert inode["xattrs"] == {os.fsencode(name): value for name, value in node.xattrs}
        if node.kind == "file":
            assert reader.data(inode) == content_of(node, STREAM)
        if node.kind == "symlink":
            assert reader.data(inode) == os.fsencode(node.target)
    assert reader.inodes == len(tree.nodes)
    assert reader.blocks == plan.blocks == len(reader.image) / 4096
    assert reader.checksum_is_right()


@settings(deadline=None)
@given(layers_of_entries(stream_bytes=len(STREAM)))
def test_names_are_sorted_by_their_bytes_and_lead_to_their_parents(layers):
    reader, _, _ = read_back(layers)

    for _, nid, inode in list(reader.tree()):
        if inode["mode"] >> 12 != 0o04:
            continue
        names = reader.names(inode)
        assert [name for name, _, _ in names] == sorted(name for name, _, _ in names)
        below = {name: (there, kind) for name, there, kind in names}
        assert below[b"."] == (nid, 2)
        for name, (there, kind) in below.items():
            if name not in {b".", b".."} and kind == 2:
                up = {n: t for n, t, _ in reader.names(reader.inode(there))}
                assert up[b".."] == nid


@settings(deadline=None)
@given(layers_of_entries(stream_bytes=len(STREAM)))
def test_two_names_of_one_file_are_one_inode_and_no_two_inodes_overlap(layers):
    reader, _, tree = read_back(layers)

    nids = {path: nid for path, nid, _ in reader.tree()}

    by_node = {}
    for path, node in tree.walk():
        by_node.setdefault(node.number, set()).add(nids[os.fsencode(path)])
    assert all(len(found) == 1 for found in by_node.values())
    places = sorted(
        (inode["at"], inode["behind"]) for _, inode in {n: i for _, n, i in reader.tree()}.items()
    )
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places))


@settings(deadline=None)
@given(layers_of_entries(stream_bytes=len(STREAM)))
def test_an_image_depends_on_nothing_but_its_layers(layers):
    first, plan, tree = written(layers)

    again = b"".join(write_metadata(plan_metadata(tree, plan.blobs), uuid=bytes(range(16))))

    assert first == again


@settings(deadline=None)
@given(
    layers_of_entries(stream_bytes=len(STREAM), most_layers=1),
    st.integers(0, 300_000),
    st.integers(0, 100_000),
)
def test_pieces_of_a_range_are_those_of_the_whole_blob(layers, offset, size):
    layout = blob_layout(layers[0])
    whole = filled(layout, STREAM)

    part = bytearray(size)
    for piece in layout.pieces(offset, size):
        assert offset <= piece.offset
        assert piece.offset + piece.size_bytes <= offset + size
        at = piece.offset - offset
        source = STREAM[piece.stream_offset : piece.stream_offset + piece.size_bytes]
        part[at : at + piece.size_bytes] = source

    assert bytes(part) == whole[offset : offset + size].ljust(size, b"\0")


@settings(deadline=None)
@given(
    layers_of_entries(stream_bytes=len(STREAM), most_layers=1),
    st.integers(0, len(STREAM) - 1),
    st.integers(1, 20_000),
)
def test_a_range_of_the_stream_fills_whole_pages_by_itself_alone(layers, start, size):
    layout = blob_layout(layers[0])
    size = min(size, len(STREAM) - start)

    ranges = list(layout.ranges_of(start, size))

    for offset, length in ranges:
        assert offset % 4096 == length % 4096 == 0
        assert length > 0
        for piece in layout.pieces(offset, length):
            assert start <= piece.stream_offset
            assert piece.stream_offset + piece.size_bytes <= start + size
    if ranges:
        assert layout.uses(start, size)


@settings(deadline=None)
@given(layers_of_entries(stream_bytes=len(STREAM), most_layers=1))
def test_the_whole_stream_leaves_only_pages_that_hold_several_pieces(layers):
    layout = blob_layout(layers[0])

    covered = set()
    for offset, length in layout.ranges_of(0, len(STREAM)):
        covered.update(range(offset, offset + length, 4096))

    for page in set(range(0, layout.size_bytes, 4096)) - covered:
        pieces = list(layout.pieces(page, 4096))
        assert len(pieces) > 1 or not pieces or pieces[0].offset > page


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097])
def test_a_blob_has_whole_pages_whatever_its_files_are(size):
    layout = blob_layout([a_file("a", size), a_file("b", size, at=1024)])

    assert layout.size_bytes == 2 * (size + -size % 4096)
