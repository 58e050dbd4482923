"""What is believed of the kernel's page cache."""

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from fusefs.cache.page_cache_estimate import PageCacheEstimate


def test_the_kernel_has_what_it_took_until_it_asks_again():
    belief = PageCacheEstimate(10)
    belief.took("abc")

    belief.asked("d")
    assert [belief.has(key) for key in "abcd"] == [True, True, True, False]
    belief.asked("b")

    assert not any(map(belief.has, "abcd"))
    assert [belief.lost(key) for key in "abcd"] == [True, True, True, False]


def test_a_block_that_was_lost_and_taken_again_is_there():
    belief = PageCacheEstimate(10)
    belief.took("a")
    belief.asked("a")

    belief.took("a")

    assert belief.has("a")
    assert belief.lost("a")


def test_what_is_remembered_has_a_limit():
    belief = PageCacheEstimate(3)
    belief.took("abcd")
    assert [belief.has(key) for key in "abcd"] == [False, True, True, True]

    belief.asked("b")
    belief.took("ef")
    belief.asked("e")

    assert [belief.lost(key) for key in "abcdef"] == [False, False, False, True, True, True]


def taken_and_lost(belief, keys):
    belief.took(keys)
    belief.asked(keys[0])


def withheld_of(belief, number):
    """Tell which of the next blocks the kernel is not trusted with."""
    return [i for i in range(number) if not belief.will_keep([f"next {i}"])]


def test_blocks_fetched_together_stay_here_where_one_of_them_was_lost():
    belief = PageCacheEstimate(10, first_caution=1)
    assert belief.will_keep("ab")
    taken_and_lost(belief, "b")
    assert withheld_of(belief, 1) == [0]

    assert not belief.will_keep("ab")
    assert belief.will_keep("ac")


def test_after_each_loss_twice_as_many_blocks_are_withheld():
    belief = PageCacheEstimate(10, first_caution=2)
    assert (belief.num_invalidations, withheld_of(belief, 12)) == (0, [])

    for number, withheld in enumerate((2, 4, 8, 16), 1):
        taken_and_lost(belief, "a")
        assert (belief.num_invalidations, withheld_of(belief, 20)) == (
            number,
            list(range(withheld)),
        )


def test_how_many_are_withheld_has_a_limit():
    belief = PageCacheEstimate(10, first_caution=1000)
    for _ in range(3):
        taken_and_lost(belief, "a")

    assert withheld_of(belief, 2000) == list(range(1024))


def test_a_kernel_that_keeps_as_many_as_were_withheld_is_trusted_again():
    belief = PageCacheEstimate(100, first_caution=2)
    for _ in range(2):
        taken_and_lost(belief, "a")
    assert withheld_of(belief, 12) == [0, 1, 2, 3]

    belief.took(range(8))
    belief.asked(5)

    assert withheld_of(belief, 12) == [0, 1]


def test_blocks_that_were_fetched_together_are_withheld_together():
    belief = PageCacheEstimate(10, first_caution=2)
    taken_and_lost(belief, "x")

    assert [belief.will_keep(keys) for keys in ("a", "bcd", "e")] == [False, False, True]


steps = st.lists(st.tuples(st.sampled_from(["took", "asked"]), st.integers(0, 12)), max_size=60)


@given(steps, st.integers(1, 6))
def test_belief_is_what_a_model_says(steps, most):
    belief, taken, lost = PageCacheEstimate(most), [], []
    for what, key in steps:
        if what == "took":
            belief.took([key])
            taken = list(OrderedDict.fromkeys([*taken, key]))[-most:]
        else:
            belief.asked(key)
            if key in taken:
                lost = list(OrderedDict.fromkeys([*lost, *taken]))[-most:]
                taken = []

        assert [k for k in range(13) if belief.has(k)] == sorted(taken)
        assert [k for k in range(13) if belief.lost(k)] == sorted(lost)
