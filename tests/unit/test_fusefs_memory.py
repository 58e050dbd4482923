"""Block cache, byte budget, strands and read-ahead: what holds whatever the store does."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from fusefs.cache import BlockCache
from fusefs.config import DirectoryStriping, FilesConfig, Striping
from fusefs.readahead import ReadAhead
from fusefs.strands import ByteBudget, Strand


def a_filled_cache(**sizes):
    cache = BlockCache(10)
    for key, size in sizes.items():
        cache.claim(key, size)
        cache.fill({key: bytes(size)})
    return cache


def test_a_block_is_fetched_by_one_and_shared_by_all():
    cache = BlockCache(10)
    block, mine = cache.claim("a", 3)
    other, also_mine = cache.claim("a", 3)

    cache.fill({"a": b"abc"})

    assert (mine, also_mine) == (True, False)
    assert other is block
    assert other.data.result() == b"abc"


def test_the_least_recently_used_block_goes_first():
    cache = a_filled_cache(a=4, b=4)
    cache.get("a")

    cache.claim("c", 4)

    assert cache.get("b") is None
    assert cache.get("a") == bytes(4)
    assert cache.used_bytes == 8


def test_views_of_the_same_memory_are_dropped_together():
    cache = BlockCache(10)
    memory = memoryview(bytes(8))
    cache.claim("a", 4)
    cache.claim("b", 4)
    cache.fill({"a": memory[:4], "b": memory[4:]})
    cache.get("a")

    cache.claim("c", 4)

    assert cache.get("a") is None
    assert cache.get("b") is None
    assert cache.used_bytes == 4


def test_blocks_on_their_way_are_never_dropped_for_others():
    cache = BlockCache(10)
    cache.claim("a", 6)

    assert cache.claim("b", 6) == (None, False)
    assert cache.used_bytes == 6


def test_a_block_that_failed_is_fetched_again_by_the_next_to_ask():
    cache = BlockCache(10)
    block, _ = cache.claim("a", 3)

    cache.fail("a", OSError("gone"))

    with pytest.raises(OSError, match="gone"):
        block.data.result()
    assert cache.claim("a", 3)[1]


def test_a_budget_lets_one_that_is_too_large_pass_alone():
    budget = ByteBudget(10)
    budget.take(25)

    assert not budget.has_room(1)
    budget.give_back(25)
    assert budget.has_room(10)


def test_a_taker_waits_until_another_gives_back():
    budget = ByteBudget(10)
    budget.take(8)
    got = threading.Event()

    def taker():
        budget.take(5)
        got.set()

    thread = threading.Thread(target=taker)
    thread.start()
    assert not got.is_set()
    budget.give_back(8)
    thread.join(10)

    assert got.is_set()
    assert budget.used_bytes == 5


def test_a_strand_keeps_order_though_many_threads_serve_it():
    seen = []
    with ThreadPoolExecutor(4) as pool:
        strands = [Strand(pool) for _ in range(3)]
        for i in range(50):
            for name, strand in enumerate(strands):
                strand.submit(lambda name=name, i=i: seen.append((name, i)))
        for strand in strands:
            strand.join()

    for name in range(3):
        assert [i for who, i in seen if who == name] == list(range(50))


def reads_ahead(ahead, process, *offsets, size=10):
    return [ahead.observe(process, offset, size) for offset in offsets]


def test_a_scattered_read_fetches_nothing_ahead():
    ahead = ReadAhead(first_bytes=20, largest_bytes=100)

    assert reads_ahead(ahead, 1, 5000, 900, 7000) == [range(0)] * 3


def test_a_stream_that_goes_on_doubles_its_window_up_to_the_largest():
    ahead = ReadAhead(first_bytes=20, largest_bytes=80)

    first, second, *_ = reads_ahead(ahead, 1, 500, 510)
    assert (first, second) == (range(0), range(520, 540))

    windows = [r.stop for r in reads_ahead(ahead, 1, *range(520, 900, 10)) if len(r)]
    assert max(windows) <= 900 + 80
    assert windows[-1] >= 900 + 40


def test_two_processes_that_read_the_same_file_are_two_streams():
    ahead = ReadAhead(first_bytes=20, largest_bytes=80)

    one = reads_ahead(ahead, 1, 1000, 1010)
    two = reads_ahead(ahead, 2, 1015, 5000)

    assert one[1] == range(1020, 1040)
    assert two == [range(0), range(0)]


def test_requests_of_one_stream_that_come_out_of_order_are_still_one_stream():
    ahead = ReadAhead(first_bytes=20, largest_bytes=80)

    assert any(len(r) for r in reads_ahead(ahead, 1, 1000, 1020, 1010, 1030))


def test_the_longest_directory_that_covers_a_path_decides_its_striping():
    config = FilesConfig(
        striping=Striping(count=4),
        directories=(
            DirectoryStriping(path="ckpt", count=8),
            DirectoryStriping(path="/ckpt/small/", count=2),
        ),
    )

    counts = [
        config.striping_of(path).count
        for path in ("ckpt/a", "ckpt/small/a", "ckptx/a", "ckpt/smaller")
    ]

    assert counts == [8, 2, 4, 8]
