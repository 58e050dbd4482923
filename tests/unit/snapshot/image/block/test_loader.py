"""The loader: every block once, from the nearest tier, and an error where no tier has it."""

import dataclasses
import hashlib
import threading

import numpy as np
import pytest

from omniload.base.errors import IntegrityError, UnavailableError
from snapshot.image.block.fetcher import BlockWanted, Fetcher, FetchSettings
from snapshot.image.block.loader import BlockLoader, RegistryTier
from snapshot.image.block.store import BlockStore
from snapshot.image.layer.index import BLOCK, block_refs
from snapshot.oci.layout import OciLayout
from tests.support.snapshot.peer_builders import BLOCKS, HandTier, peer_index


@pytest.fixture
def index(tmp_path):
    return peer_index(tmp_path)


@pytest.fixture
def make():
    made = []

    def build(disk=None, settings=None, on_settled=lambda *_: None, **tiers):
        rest = {"memory_bytes": 3 << 20, "on_settled": on_settled}
        made.append(BlockLoader(tiers, disk, settings, **rest))
        return made[-1]

    yield build
    for loader in made:
        loader.close()


def test_a_block_is_fetched_once_and_then_at_hand(index, make):
    tier = HandTier()
    loader = make(registry=tier)
    assert loader.cached(index, 2) is None

    assert loader.block(index, 2) == BLOCKS[2]
    assert loader.block(index, 2) == BLOCKS[2]

    assert loader.cached(index, 2) == BLOCKS[2]
    assert tier.asked == [[2]]
    assert loader.bytes_of["registry"] == 1 << 20


def wanted_announces(monkeypatch, asked):
    real = Fetcher.handle

    def handle(fetcher, event):
        commands = real(fetcher, event)
        if isinstance(event, BlockWanted):
            asked.release()
        return commands

    monkeypatch.setattr(Fetcher, "handle", handle)


def test_many_readers_of_a_block_make_one_request(index, make, monkeypatch):
    tier = HandTier(gate=threading.Event())
    loader = make(registry=tier)
    found, asked = [], threading.Semaphore(0)
    wanted_announces(monkeypatch, asked)
    readers = [
        threading.Thread(target=lambda: found.append(loader.block(index, 1))) for _ in range(8)
    ]
    for reader in readers:
        reader.start()
    for _ in readers:
        assert asked.acquire(timeout=60)

    tier.gate.set()
    for reader in readers:
        reader.join()

    assert found == [BLOCKS[1]] * 8
    assert tier.asked == [[1]]
    assert (loader.requests, loader.waits) == (1, 8)


def test_memory_has_a_cap_and_the_disk_gives_what_it_dropped(index, make, tmp_path):
    tier = HandTier()
    loader = make(registry=tier, disk=BlockStore(tmp_path / "blocks", 64 << 20))
    for number in range(6):
        loader.block(index, number)
    loader.close()

    again = make(registry=tier, disk=BlockStore(tmp_path / "blocks", 64 << 20))
    assert [again.block(index, number) for number in range(6)] == BLOCKS[:6]

    assert sum(again.cached(index, number) is not None for number in range(6)) == 3
    assert len(tier.asked) == 6
    assert again.bytes_of["disk"] == sum(map(len, BLOCKS[:6]))


def test_what_the_near_tier_lacks_comes_from_the_far_one(index, make):
    near, far = HandTier(has={0}), HandTier()
    loader = make(peer=near, registry=far)

    assert [loader.block(index, number) for number in (0, 1)] == BLOCKS[:2]

    assert (near.asked, far.asked) == ([[0], [1]], [[1]])


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (UnavailableError("gone"), UnavailableError),
        (FileNotFoundError("404"), UnavailableError),
        (IntegrityError("forged"), IntegrityError),
        (None, IntegrityError),
    ],
)
def test_a_block_that_no_tier_has_is_an_error_and_is_asked_for_anew(index, make, error, kind):
    tier = HandTier(error=error, has=())
    loader = make(registry=tier)
    for _ in range(2):
        with pytest.raises(kind):
            loader.block(index, 0)
    tier.error, tier.has = None, {0}

    assert loader.block(index, 0) == BLOCKS[0]
    assert len(tier.asked) == 3


def test_prefetched_blocks_come_in_one_request_and_are_at_hand(index, make):
    tier = HandTier()
    loader = make(registry=tier)

    loader.prefetch(index, list(block_refs(index, (0, 1, 2))))
    assert loader.block(index, 2) == BLOCKS[2]
    loader.prefetch(index, list(block_refs(index, (0, 1, 2))))

    assert tier.asked == [[0, 1, 2]]


def test_a_reader_is_served_while_prefetch_holds_all_the_slots_it_may(index, make):
    gate = threading.Event()
    tier = HandTier(gate=gate)
    settings = FetchSettings(tiers=("registry",), slots=2, reserved_slots=1, coalesce_bytes=1)
    loader = make(registry=tier, settings=settings)
    loader.prefetch(index, list(block_refs(index, (0, 1, 2))))
    assert tier.arrived.acquire(timeout=60)
    reader = threading.Thread(target=loader.block, args=(index, 4))

    reader.start()
    assert tier.arrived.acquire(timeout=60)

    assert tier.asked == [[0], [4]]
    gate.set()
    reader.join()


def test_closing_tells_those_who_wait(index, make):
    tier = HandTier(gate=threading.Event())
    loader = make(registry=tier)
    errors = []

    def read():
        with pytest.raises(UnavailableError, match="being unmounted") as caught:
            loader.block(index, 0)
        errors.append(caught.value)

    reader = threading.Thread(target=read)
    reader.start()
    assert tier.arrived.acquire(timeout=60)
    closer = threading.Thread(target=loader.close)
    closer.start()
    reader.join()
    tier.gate.set()
    closer.join()

    assert len(errors) == 1
    with pytest.raises(UnavailableError, match="being unmounted"):
        loader.block(index, 1)


def test_hot_blocks_are_fetched_once_whoever_wants_them_meanwhile(index, make):
    tier = HandTier()
    loader = make(registry=tier)

    loader.prefetch(index, list(block_refs(index, range(3))))
    found = [loader.block(index, number) for number in range(3)]

    assert found == BLOCKS[:3]
    assert sorted(number for numbers in tier.asked for number in numbers) == [0, 1, 2]


def test_the_registry_tier_leaves_out_only_the_block_that_is_wrong(index, tmp_path):
    path = tmp_path / "layout/blobs" / index.blob_digest.replace(":", "/")
    data = bytearray(path.read_bytes())
    data[(1 << 20) + 5] ^= 1
    path.write_bytes(data)
    tier = RegistryTier(OciLayout(tmp_path / "layout"))

    found, moved = tier.fetch(index, list(block_refs(index, (0, 1, 2))))

    assert sorted(found.values()) == sorted([BLOCKS[0], BLOCKS[2]])
    assert moved == 3 << 20


def test_who_is_told_hears_of_each_block_that_came_or_did_not(index):
    settled = []
    loader = BlockLoader(
        {"registry": HandTier(has={0})},
        on_settled=lambda digest, came: settled.append((digest, came)),
    )
    refs = list(block_refs(index, (0, 3)))

    assert loader.prefetch(index, refs) == tuple(refs)
    loader.block(index, 0)
    with pytest.raises(IntegrityError):
        loader.block(index, 3)
    loader.close()

    assert (refs[0].digest, True) in settled
    assert (refs[1].digest, False) in settled
    assert (refs[0].digest, False) not in settled


SMALL = [bytes([n]) * (40 << 10) for n in range(1, 9)]


class SmallBlocks(HandTier):
    """Blocks of 40 KiB, as an image with many small files has them."""

    contents = SMALL


@pytest.fixture
def small(index):
    size = 40 << 10
    rows = [
        (n * size, size, size, n * size, -1, 0, b"", hashlib.sha256(SMALL[n]).digest())
        for n in range(8)
    ]
    return dataclasses.replace(index, blocks_B=np.array(rows, BLOCK))


def test_what_follows_a_small_block_comes_along_up_to_a_limit(small, make):
    tier = SmallBlocks()
    loader = make(registry=tier)

    assert loader.block(small, 2) == SMALL[2]

    assert tier.asked == [[2, 3, 4]]
    assert loader.block(small, 4) == SMALL[4]
    assert (loader.requests, loader.waits) == (1, 1)


def test_what_is_here_already_does_not_come_along(small, make, tmp_path):
    disk = BlockStore(tmp_path / "blocks", 64 << 20)
    (third,) = block_refs(small, [3])
    disk.put_all({third.digest: SMALL[3]})
    tier = SmallBlocks()
    loader = make(
        registry=tier, disk=disk, settings=FetchSettings(tiers=("registry",), bridge_bytes=0)
    )

    loader.block(small, 2)
    loader.close()

    assert tier.asked == [[2], [4]]


def test_the_last_block_has_nothing_beside_it_and_no_limit_means_none_comes_along(small, make):
    tier = SmallBlocks()
    make(registry=tier).block(small, 7)
    make(registry=tier, settings=FetchSettings(tiers=("registry",), beside_bytes=0)).block(small, 2)

    assert tier.asked == [[7], [2]]


def test_a_reader_of_a_block_that_is_coming_along_waits_for_that_request(small, make, monkeypatch):
    tier = SmallBlocks(gate=threading.Event())
    loader = make(registry=tier)
    found = []
    readers = [threading.Thread(target=lambda: found.append(loader.block(small, 2)))]
    readers[0].start()
    assert tier.arrived.acquire(timeout=60)
    asked = threading.Semaphore(0)
    wanted_announces(monkeypatch, asked)
    readers.append(threading.Thread(target=lambda: found.append(loader.block(small, 3))))
    readers[1].start()
    assert asked.acquire(timeout=60)
    tier.gate.set()
    for reader in readers:
        reader.join()

    assert sorted(found) == SMALL[2:4]
    assert sorted(number for asked in tier.asked for number in asked)[:3] == [2, 3, 4]
    assert sum(asked.count(3) for asked in tier.asked) == 1


def test_what_came_along_and_no_tier_has_is_nobodys_error(small, make):
    tier = SmallBlocks(has={2})
    settled = []
    loader = make(registry=tier, on_settled=lambda *words: settled.append(words[1]))

    assert loader.block(small, 2) == SMALL[2]
    with pytest.raises(IntegrityError, match="no right bytes"):
        loader.block(small, 3)
    assert settled[:3] == [True, False, False]


def test_a_hot_block_comes_along_with_a_missed_one(small, make):
    settings = FetchSettings(tiers=("registry",), slots=2, reserved_slots=1)
    tier = SmallBlocks(gate=threading.Event())
    loader = make(registry=tier, settings=settings)
    loader.prefetch(small, list(block_refs(small, [6])))
    assert tier.arrived.acquire(timeout=60), "the one slot of prefetch is taken"
    loader.prefetch(small, list(block_refs(small, [3])))
    reader = threading.Thread(target=loader.block, args=(small, 2))
    reader.start()
    assert tier.arrived.acquire(timeout=60)

    tier.gate.set()
    reader.join()
    loader.close()

    assert tier.asked == [[6], [2, 3, 4]]
