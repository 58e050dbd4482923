"""The blocks that a range touches, and a range of blocks and gaps."""

import pytest

from fusefs.cache.disk_format import CopyVersion
from omniload.source.stores.blocks import (
    BLOCK_BYTES,
    blocks_of,
    extent_of,
    gaps_of,
    joined,
    runs_of,
    span_of,
)

B = BLOCK_BYTES
DATA = bytes(range(251)) * (4 * B // 251)
VERSION = CopyVersion("a", len(DATA), -(-len(DATA) // B))


def block(number):
    return memoryview(DATA[number * B : (number + 1) * B])


def read(span, held, gave=lambda data: data):
    gaps = list(gaps_of(span, held))
    return joined(span, held, {(start, stop): gave(DATA[start:stop]) for start, stop in gaps})


def test_a_range_touches_the_blocks_of_its_bytes_and_an_empty_one_none():
    assert list(blocks_of((0, 1))) == [0]
    assert list(blocks_of((B - 1, B + 1))) == [0, 1]
    assert list(blocks_of((B, 2 * B))) == [1]
    assert not blocks_of((5, 5))


def test_the_last_block_ends_with_the_file():
    assert span_of(VERSION, 3) == (3 * B, len(DATA) - 3 * B)
    assert extent_of(VERSION, (2, 4)) == (2 * B, len(DATA))


def test_blocks_side_by_side_are_one_request():
    assert runs_of([0, 1, 3, 4, 5, 9]) == [(0, 2), (3, 6), (9, 10)]
    assert runs_of([]) == []


@pytest.mark.parametrize("held", [[], [0], [1], [0, 2], [0, 1, 2, 3], [3]])
def test_a_range_is_the_same_whatever_is_held(held):
    blocks = {number: block(number) for number in held}
    for span in [(0, len(DATA)), (7, 3 * B - 9), (B, 2 * B), (B + 1, B + 2), (4, 4)]:
        assert read(span, blocks) == DATA[span[0] : span[1]]


def test_a_gap_that_gave_too_few_bytes_ends_the_range_though_blocks_follow():
    span = (0, 3 * B)

    assert read(span, {2: block(2)}, gave=lambda data: data[:-1]) == DATA[: 2 * B - 1]
