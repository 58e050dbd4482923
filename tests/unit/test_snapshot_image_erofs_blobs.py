"""Where files lie in a blob, and where its bytes come from."""

import pytest

from omniload.base.errors import ConfigError
from snapshot.image.entries import Entry, Extent
from snapshot.image.erofs_blobs import Piece, Placed, blob_layout
from tests.support.erofs_builders import a_directory, a_file, a_stream, content_of, filled

MIB = 1 << 20


def a_sparse_file(path="s", size=100_000, *extents):
    return Entry(path=path, kind="file", size_bytes=size, extents=tuple(extents))


def test_files_begin_at_whole_blocks_in_the_order_of_the_layer():
    first, second = a_file("a", 5000, at=512), a_file("b", 10, at=6144)

    layout = blob_layout([a_directory(), first, second])

    assert layout.place(first.extents, 5000) == Placed(1, (0,))
    assert layout.place(second.extents, 10) == Placed(0, (2,))
    assert layout.size_bytes == 3 * 4096


def test_a_file_without_holes_is_one_chunk_however_large():
    file = a_file("a", 700 * MIB)

    layout = blob_layout([file])

    placed = layout.place(file.extents, file.size_bytes)
    assert placed.blocks == (0,)
    assert 4096 << placed.order >= file.size_bytes > 4096 << placed.order - 1


def test_pieces_side_by_side_are_no_holes():
    file = a_sparse_file("a", 10_000, Extent(0, 512, 4000), Extent(4000, 9000, 6000))

    layout = blob_layout([file])

    assert len(layout.place(file.extents, 10_000).blocks) == 1
    assert list(layout.pieces(0, 3 * 4096)) == [Piece(0, 4000, 512), Piece(4000, 6000, 9000)]


def test_holes_of_whole_chunks_take_no_room():
    file = a_sparse_file("a", 100_000, Extent(50_000, 512, 100))

    layout = blob_layout([file])

    placed = layout.place(file.extents, 100_000)
    assert placed.blocks == tuple(0 if number == 12 else None for number in range(25))
    assert layout.size_bytes == 4096
    assert list(layout.pieces(0, 4096)) == [Piece(50_000 - 12 * 4096, 100, 512)]


def test_chunks_of_a_huge_file_with_holes_grow_until_they_are_few():
    size = 1 << 44
    file = a_sparse_file("a", size, Extent(size - 10, 512, 10))

    layout = blob_layout([file])

    placed = layout.place(file.extents, size)
    assert len(placed.blocks) <= 1 << 14
    assert placed.blocks[-1] == 0
    assert set(placed.blocks[:-1]) == {None}


@pytest.mark.parametrize(
    "entry",
    [
        a_file("empty", 0),
        a_sparse_file("hole", 1 << 40),
        a_sparse_file("nothing", 10, Extent(0, 512, 0)),
        Entry(path="l", kind="symlink", target="a"),
        a_directory("d"),
    ],
)
def test_what_has_no_bytes_is_not_in_the_blob(entry):
    layout = blob_layout([entry])

    assert layout.size_bytes == 0
    assert not layout.places
    assert list(layout.pieces(0, 4096)) == []
    assert not layout.uses(0, 1 << 30)


def test_a_file_that_comes_twice_is_laid_down_once():
    one, other = a_file("a", 5000), a_file("b", 5000)

    layout = blob_layout([one, other])

    assert layout.size_bytes == 2 * 4096
    assert len(layout.segments_S) == 1


def test_files_that_share_bytes_of_the_stream_have_them_both():
    stream = a_stream(20_000)
    one, other = a_file("a", 9000, at=512), a_file("b", 5000, at=2000)

    layout = blob_layout([one, other])

    blob = filled(layout, stream)
    assert blob[:9000] == content_of(one, stream)
    assert blob[12288 : 12288 + 5000] == content_of(other, stream)
    assert {offset for offset, _ in layout.ranges_of(0, 20_000)} == {0, 12288}


def test_a_block_of_the_stream_fills_its_whole_pages_and_leaves_the_edges():
    layout = blob_layout([a_file("a", 20_000, at=512)])

    assert list(layout.ranges_of(0, 10_000)) == [(0, 8192)]
    assert list(layout.ranges_of(10_000, 10_000)) == [(12288, 4096)]
    assert list(layout.ranges_of(10_000, 10_512)) == [(12288, 8192)]
    assert list(layout.ranges_of(0, 512)) == []


def test_the_end_of_a_file_fills_its_last_page_with_zeroes():
    layout = blob_layout([a_file("a", 100, at=512), a_file("b", 100, at=1536)])

    assert list(layout.ranges_of(0, 1024)) == [(0, 4096)]
    assert list(layout.ranges_of(0, 4096)) == [(0, 4096), (4096, 4096)]


def test_a_piece_in_the_middle_of_a_page_waits_for_all_of_it():
    file = a_sparse_file("a", 9000, Extent(0, 512, 4000), Extent(4000, 9000, 5000))
    layout = blob_layout([file])

    assert list(layout.ranges_of(512, 4000)) == []
    assert list(layout.ranges_of(9000, 5000)) == [(4096, 8192)]
    assert layout.uses(512, 4000)
    assert not layout.uses(4512, 4000)


def test_a_layer_of_more_blocks_than_can_be_named_is_refused():
    files = [a_file(f"f{number}", 1 << 43, at=number << 43) for number in range(3)]

    with pytest.raises(ConfigError, match=r"'f1' ends at block 4294967296.*FUSE"):
        blob_layout(files)
