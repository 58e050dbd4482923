"""Blocks brought to a node before a start: all of them, in order, counted, and nobody waits for ever."""

import threading

import pytest

from omniload.base.errors import UnavailableError
from snapshot.image.block.prefetch import Outstanding, Prefetched, prefetch_blocks
from snapshot.image.block.store import BlockStore
from snapshot.image.layer.index import block_refs
from tests.support.snapshot.image_builders import a_member, a_tar, an_index, zran_friendly

TAR = a_tar(a_member("big", zran_friendly(6_000_000)))
MIB = 1 << 20


class Tier:
    """A tier by hand: what it lacks, and what it was asked for."""

    def __init__(self, lacks=(), error=None):
        self.lacks, self.error, self.asked = set(lacks), error, []

    def fetch(self, index, blocks):
        self.asked += [ref.number for ref in blocks]
        if self.error is not None:
            raise self.error
        found = {
            ref.digest: TAR[ref.offset : ref.end] for ref in blocks if ref.number not in self.lacks
        }
        return found, sum(map(len, found.values()))


@pytest.fixture
def index(tmp_path):
    return an_index(tmp_path, TAR)


@pytest.fixture
def disk(tmp_path):
    return BlockStore(tmp_path / "blocks", 64 * MIB)


def prefetch(index, disk, tier, numbers, **more):
    refs = list(block_refs(index, numbers))
    return prefetch_blocks({"registry": tier}, disk, [index], refs, **more)


def test_blocks_come_to_the_disk_once(index, disk):
    tier, told = Tier(), []

    first = prefetch(index, disk, tier, [4, 0, 2], report=lambda *n: told.append(n))
    again = prefetch(index, disk, tier, [4, 0, 2])

    assert first == Prefetched(3, 0, 0, 0, {"registry": 3 * MIB})
    assert again == Prefetched(3, 3, 0, 0, {"registry": 0})
    assert sorted(tier.asked) == [0, 2, 4]
    assert disk.used_bytes == 3 * MIB
    assert told[-1] == (3, 3)
    assert told == sorted(told)


def test_blocks_that_nobody_has_are_counted(index, disk):
    found = prefetch(index, disk, Tier(lacks={1}), [0, 1, 2])

    assert (found.failed, found.unkept) == (1, 0)
    assert disk.used_bytes == 2 * MIB


def test_a_registry_that_is_gone_is_no_endless_wait(index, disk):
    found = prefetch(index, disk, Tier(error=UnavailableError("gone")), range(6))

    assert (found.failed, found.bytes_of) == (6, {"registry": 0})


def test_blocks_that_the_disk_does_not_keep_are_counted(index, tmp_path):
    small = BlockStore(tmp_path / "small", MIB // 2)

    found = prefetch(index, small, Tier(), [0, 1])

    assert (found.failed, found.unkept) == (0, 2)


def test_nothing_to_bring_is_done_at_once(index, disk):
    assert prefetch(index, disk, Tier(), []) == Prefetched(0, 0, 0, 0, {"registry": 0})


def test_waiting_ends_with_the_last_block_whatever_settles_first():
    outstanding = Outstanding(["a"])
    outstanding.expect(["b", "c"])
    outstanding.settled("b", True)
    outstanding.settled("stranger", False)
    outstanding.keep_only(["c", "b"])  # a was here before
    seen = []

    def told(left):
        seen.append(left)
        if left:
            threading.Thread(target=outstanding.settled, args=("c", False)).start()

    assert outstanding.wait(told)
    assert seen == [1, 0]
    assert outstanding.failed == 1


def test_closing_lets_go_of_who_waits():
    outstanding = Outstanding(["a"])

    assert not outstanding.wait(lambda _: threading.Thread(target=outstanding.close).start())
    assert outstanding.failed == 0
