"""Block cache, byte budget and executors: what holds whatever the store does."""

import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusefs.base.serial_executor import ByteBudget, SerialExecutor
from fusefs.cache.block_cache import BlockCache, PageCacheEstimate
from fusefs.config import DirectoryStriping, FilesConfig, Striping
from fusefs.metrics.counters import Traffic


def a_filled_cache(**sizes):
    cache = BlockCache(10)
    for key, size in sizes.items():
        cache.claim(key, size)
        cache.fill({key: bytes(size)})
    return cache


def a_cache_of_views():
    """Hold two blocks that one read brought."""
    cache = BlockCache(10)
    memory = memoryview(bytes(8))
    cache.claim("a", 4)
    cache.claim("b", 4)
    cache.fill({"a": memory[:4], "b": memory[4:]})
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
    cache = a_cache_of_views()
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


def test_what_was_served_whole_goes_at_once():
    cache = a_filled_cache(a=4, b=4)

    cache.served([("a", 3), ("b", 3), ("c", 9)])
    assert cache.used_bytes == 8
    cache.served([("a", 1)])

    assert (cache.get("a"), cache.get("b")) == (None, bytes(4))
    assert cache.used_bytes == 4
    assert (cache.is_served("a"), cache.is_served("b")) == (True, False)


def test_views_of_the_same_memory_go_when_all_of_it_was_served():
    cache = a_cache_of_views()

    cache.served([("a", 4)])
    assert cache.get("a") == bytes(4)
    cache.served([("b", 4)])

    assert (cache.get("a"), cache.get("b"), cache.used_bytes) == (None, None, 0)
    assert cache.is_served("a")
    assert cache.is_served("b")


def test_a_block_that_is_read_twice_says_nothing_of_those_beside_it():
    cache = a_cache_of_views()

    cache.served([("a", 4), ("a", 4), ("b", 3)])

    assert cache.get("b") == bytes(4)
    assert not cache.is_served("b")


def test_one_who_asks_for_what_was_served_raises_doubts():
    cache = a_filled_cache(a=4)
    cache.served([("a", 4)])
    assert cache.kernel.num_invalidations == 0

    cache.claim("a", 4)

    assert cache.kernel.num_invalidations == 1


def test_one_who_reads_ahead_of_what_another_has_just_been_served_raises_none_and_fetches_nothing():
    cache = a_filled_cache(a=4)
    cache.served([("a", 4)])

    assert cache.claim("a", 4, needed=False) == (None, False)

    assert cache.is_served("a")
    assert (cache.kernel.num_invalidations, cache.used_bytes) == (0, 0)


def test_one_who_reads_ahead_of_what_nobody_was_served_fetches_it():
    assert BlockCache(10).claim("a", 4, needed=False)[1]


def test_a_block_on_its_way_is_not_served():
    cache = BlockCache(10)
    cache.claim("a", 4)

    cache.served([("a", 4)])
    cache.fill({"a": bytes(4)})

    assert cache.get("a") == bytes(4)


def test_what_is_asked_for_again_after_it_was_served_stays():
    cache = a_filled_cache(a=4)
    cache.served([("a", 4)])
    assert cache.claim("a", 4)[1]
    assert not cache.is_served("a")
    cache.fill({"a": bytes(4)})

    cache.served([("a", 4)])

    assert cache.get("a") == bytes(4)


def test_evicted_blocks_are_counted():
    traffic = Traffic()
    cache = BlockCache(10, traffic)
    for key in "abc":
        cache.claim(key, 4)
        cache.fill({key: bytes(4)})

    assert traffic.numbers().tiers["memory"].evictions == 1
    assert [cache.holds(key) for key in "abc"] == [False, True, True]


def test_dropped_blocks_make_room_and_those_on_their_way_stay():
    cache = a_filled_cache(a=4)
    block, _ = cache.claim("b", 4)

    assert cache.drop(["a", "b", "never"]) == 4
    assert cache.used_bytes == 4
    assert not cache.holds("a")
    cache.fill({"b": b"late"})
    assert block.data.result() == b"late"
    assert cache.get("b") == b"late"


def test_a_block_goes_with_those_that_share_its_memory():
    cache = BlockCache(10)
    memory = memoryview(bytes(8))
    for key in "ab":
        cache.claim(key, 4)
    cache.fill({"a": memory[:4], "b": memory[4:]})

    assert cache.drop(["a", "b"]) == 8
    assert cache.used_bytes == 0


def test_a_budget_lets_one_that_is_too_large_pass_alone():
    budget = ByteBudget(10)
    budget.acquire(25)

    assert not budget.has_room(1)
    budget.release(25)
    assert budget.has_room(10)


def test_a_taker_waits_until_another_gives_back():
    budget = ByteBudget(10)
    budget.acquire(8)
    got = threading.Event()

    def taker():
        budget.acquire(5)
        got.set()

    thread = threading.Thread(target=taker)
    thread.start()
    assert not got.is_set()
    budget.release(8)
    thread.join(60)

    assert got.is_set()
    assert budget.used_bytes == 5


def test_an_executor_keeps_order_though_many_threads_serve_it():
    seen = []
    with ThreadPoolExecutor(4) as pool:
        executors = [SerialExecutor(pool) for _ in range(3)]
        for i in range(50):
            for name, executor in enumerate(executors):
                executor.submit(lambda name=name, i=i: seen.append((name, i)))
        for executor in executors:
            executor.join()

    for name in range(3):
        assert [i for who, i in seen if who == name] == list(range(50))


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


def test_the_kernel_has_what_it_took_until_it_asks_again():
    estimate = PageCacheEstimate(10)
    estimate.took("abc")

    estimate.asked("d")
    assert [estimate.has(key) for key in "abcd"] == [True, True, True, False]
    estimate.asked("b")

    assert not any(map(estimate.has, "abcd"))
    assert [estimate.lost(key) for key in "abcd"] == [True, True, True, False]


def test_a_block_that_was_lost_and_taken_again_is_there():
    estimate = PageCacheEstimate(10)
    estimate.took("a")
    estimate.asked("a")

    estimate.took("a")

    assert estimate.has("a")
    assert estimate.lost("a")


def test_what_is_remembered_has_a_limit():
    estimate = PageCacheEstimate(3)
    estimate.took("abcd")
    assert [estimate.has(key) for key in "abcd"] == [False, True, True, True]

    estimate.asked("b")
    estimate.took("ef")
    estimate.asked("e")

    assert [estimate.lost(key) for key in "abcdef"] == [False, False, False, True, True, True]


def taken_and_lost(estimate, keys):
    estimate.took(keys)
    estimate.asked(keys[0])


def withheld_of(estimate, number):
    """Tell which of the next blocks the kernel is not trusted with."""
    return [i for i in range(number) if not estimate.will_keep([f"next {i}"])]


def test_blocks_fetched_together_stay_here_where_one_of_them_was_lost():
    estimate = PageCacheEstimate(10, first_caution=1)
    assert estimate.will_keep("ab")
    taken_and_lost(estimate, "b")
    assert withheld_of(estimate, 1) == [0]

    assert not estimate.will_keep("ab")
    assert estimate.will_keep("ac")


def test_after_each_loss_twice_as_many_blocks_are_withheld():
    estimate = PageCacheEstimate(10, first_caution=2)
    assert (estimate.num_invalidations, withheld_of(estimate, 12)) == (0, [])

    for number, withheld in enumerate((2, 4, 8, 16), 1):
        taken_and_lost(estimate, "a")
        assert (estimate.num_invalidations, withheld_of(estimate, 20)) == (
            number,
            list(range(withheld)),
        )


def test_how_many_are_withheld_has_a_limit():
    estimate = PageCacheEstimate(10, first_caution=1000)
    for _ in range(3):
        taken_and_lost(estimate, "a")

    assert withheld_of(estimate, 2000) == list(range(1024))


def test_a_kernel_that_keeps_as_many_as_were_withheld_is_trusted_again():
    estimate = PageCacheEstimate(100, first_caution=2)
    for _ in range(2):
        taken_and_lost(estimate, "a")
    assert withheld_of(estimate, 12) == [0, 1, 2, 3]

    estimate.took(range(8))
    estimate.asked(5)

    assert withheld_of(estimate, 12) == [0, 1]


def test_blocks_that_were_fetched_together_are_withheld_together():
    estimate = PageCacheEstimate(10, first_caution=2)
    taken_and_lost(estimate, "x")

    assert [estimate.will_keep(keys) for keys in ("a", "bcd", "e")] == [False, False, True]


steps = st.lists(st.tuples(st.sampled_from(["took", "asked"]), st.integers(0, 12)), max_size=60)


@given(steps, st.integers(1, 6))
def test_the_estimate_is_what_a_model_says(steps, most):
    estimate, taken, lost = PageCacheEstimate(most), [], []
    for what, key in steps:
        if what == "took":
            estimate.took([key])
            taken = list(OrderedDict.fromkeys([*taken, key]))[-most:]
        else:
            estimate.asked(key)
            if key in taken:
                lost = list(OrderedDict.fromkeys([*lost, *taken]))[-most:]
                taken = []

        assert [k for k in range(13) if estimate.has(k)] == sorted(taken)
        assert [k for k in range(13) if estimate.lost(k)] == sorted(lost)
