"""One request for a block at a time in a node, whoever wants it; and what a node gives its peers."""

import threading

import pytest

from omniload.base.errors import UnavailableError
from snapshot.image.block.store import BlockStore
from snapshot.image.peer.node import BlockShare
from snapshot.image.peer.peer_tier import HeldBlocks, SharedTier
from tests.support.snapshot.peer_builders import BLOCKS, HandTier, peer_index, peer_refs


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    return peer_index(tmp_path_factory.mktemp("layer"))


@pytest.fixture
def share():
    made = []

    def build(held, **tiers):
        made.append(BlockShare(held, tiers, build.indexes, fetches=build.fetches))
        return made[-1]

    build.fetches = 8
    build.indexes = ()
    yield build
    for each in made:
        each.close()


def asked(index, *numbers):
    return index.blob_digest, [(number, index.digest(number)) for number in numbers]


def in_thread(call, *args):
    """Run a call beside the test; return its thread and where its result will be."""
    results = []
    thread = threading.Thread(target=lambda: results.append(call(*args)))
    thread.start()
    return thread, results


def test_who_comes_second_waits_for_the_first_and_moves_no_bytes(index):
    tier = HandTier(gate=threading.Event())
    shared = SharedTier(tier, HeldBlocks(None))
    first, led = in_thread(shared.fetch, index, peer_refs(index, (0, 1)))
    assert tier.arrived.acquire(timeout=60)

    second, joined = in_thread(shared.fetch, index, peer_refs(index, (1, 2)))
    assert tier.arrived.acquire(timeout=60)  # for block 2 alone
    tier.gate.set()
    first.join()
    second.join()

    assert tier.asked == [[0, 1], [2]]
    assert sorted(joined[0][0].values()) == sorted(BLOCKS[1:3])
    assert (led[0][1], joined[0][1]) == (2 << 20, 1 << 20)


def test_a_block_that_came_meanwhile_is_not_asked_for_again(index, tmp_path):
    tier = HandTier()
    disk = BlockStore(tmp_path / "blocks", 64 << 20)
    held = HeldBlocks(disk)
    shared = SharedTier(tier, held)
    shared.fetch(index, peer_refs(index, (0,)))
    held.store({index.digest(1): BLOCKS[1]})

    found, moved = shared.fetch(index, peer_refs(index, (0, 1)))

    assert (tier.asked, moved) == ([[0]], 0)
    assert list(found.values()) == BLOCKS[:2]


def test_what_lies_apart_is_asked_for_apart(index):
    """A tier reads from the first of its blocks to the last: nothing it has may lie between."""
    tier = HandTier()
    shared = SharedTier(tier, HeldBlocks(None))
    shared.fetch(index, peer_refs(index, (2,)))

    shared.fetch(index, peer_refs(index, (0, 1, 2, 3)))

    assert tier.asked == [[2], [0, 1], [3]]


def test_a_failure_reaches_whoever_led_and_those_who_joined_get_nothing(index):
    tier = HandTier(gate=threading.Event(), error=UnavailableError("down"))
    shared = SharedTier(tier, HeldBlocks(None))
    caught = []

    def lead():
        with pytest.raises(UnavailableError, match="down") as error:
            shared.fetch(index, peer_refs(index, (0,)))
        caught.append(error.value)

    leader = threading.Thread(target=lead)
    leader.start()
    assert tier.arrived.acquire(timeout=60)
    joiner, joined = in_thread(shared.fetch, index, peer_refs(index, (0,)))
    tier.gate.set()
    leader.join()
    joiner.join(0)
    tier.error = None
    joiner.join()

    assert len(caught) == 1
    # It joined and got nothing, or came too late for that and asked by itself.
    assert joined[0] in (({}, 0), ({index.digest(0): BLOCKS[0]}, 1 << 20))
    assert shared.fetch(index, peer_refs(index, (0,)))[0] == {index.digest(0): BLOCKS[0]}


def test_memory_of_what_came_last_has_a_cap(index):
    held = HeldBlocks(None, recent_bytes=2 << 20)
    for number in range(4):
        held.recent.put(index.digest(number), BLOCKS[number], len(BLOCKS[number]))
    held.recent.put(index.digest(3), BLOCKS[3], len(BLOCKS[3]))
    held.recent.put("sha256:big", bytes(3 << 20), 3 << 20)

    assert [held.has(index.digest(number)) for number in range(4)] == [False, False, True, True]
    assert held.get(index.digest(3)) == BLOCKS[3]
    assert not held.has("sha256:big")


def test_a_share_fetches_for_a_peer_what_it_lacks_and_keeps_it(index, share, tmp_path):
    held = HeldBlocks(BlockStore(tmp_path / "blocks", 64 << 20))
    held.store({index.digest(1): BLOCKS[1]})
    near, far = HandTier(has={0}), HandTier()
    share.indexes = (index,)
    giving = share(held, peer=SharedTier(near, held), registry=SharedTier(far, held))

    promise = giving.promise(*asked(index, 0, 1, 2))

    assert set(promise.result(60)) == {index.digest(0), index.digest(2)}
    assert (near.asked, far.asked) == ([[0], [2]], [[2]])
    assert giving.bytes_of == {"peer": 1 << 20, "registry": 1 << 20}
    assert held.get(index.digest(2)) == BLOCKS[2]
    assert giving.promise(*asked(index, 0, 1, 2)) is None  # all is here


def test_a_share_does_nothing_for_those_who_mean_another_layer(index, share):
    tier = HandTier()
    share.indexes = (index,)
    giving = share(HeldBlocks(None), registry=tier)
    other = ("sha256:" + "0" * 64, [(0, index.digest(0))])
    indexed_otherwise = (index.blob_digest, [(0, index.digest(1)), (99, index.digest(1))])

    assert giving.promise(*other) is None
    assert giving.promise(*indexed_otherwise) is None
    assert tier.asked == []


def test_a_share_that_is_busy_says_so_at_once_and_is_free_again_later(index, share):
    tier = HandTier(gate=threading.Event())
    share.indexes, share.fetches = (index,), 1
    giving = share(HeldBlocks(None), registry=tier)
    promise = giving.promise(*asked(index, 0))

    assert giving.promise(*asked(index, 1)) is None

    tier.gate.set()
    assert promise.result(60) == {index.digest(0): BLOCKS[0]}
    assert giving.promise(*asked(index, 1)).result(60) == {index.digest(1): BLOCKS[1]}


def test_a_registry_that_is_down_breaks_no_promise_but_leaves_it_empty(index, share, caplog):
    share.indexes = (index,)
    giving = share(HeldBlocks(None), registry=HandTier(error=UnavailableError("down")))

    assert giving.promise(*asked(index, 0)).result(60) == {}
    assert "for a peer: down" in caplog.text


def test_a_share_that_is_closed_promises_nothing(index, share):
    share.indexes = (index,)
    giving = share(HeldBlocks(None), registry=HandTier())
    giving.close()

    assert giving.promise(*asked(index, 0)) is None
