"""What is believed of the kernel's page cache."""

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from fusefs.page_cache import PageCacheBelief


def test_the_kernel_has_what_it_took_until_it_asks_again():
    belief = PageCacheBelief(10)
    belief.took("abc")

    belief.asked("d")
    assert [belief.has(key) for key in "abcd"] == [True, True, True, False]
    belief.asked("b")

    assert not any(map(belief.has, "abcd"))
    assert [belief.lost(key) for key in "abcd"] == [True, True, True, False]


def test_a_block_that_was_lost_and_taken_again_is_there():
    belief = PageCacheBelief(10)
    belief.took("a")
    belief.asked("a")

    belief.took("a")

    assert belief.has("a")
    assert belief.lost("a")


def test_what_is_remembered_has_a_limit():
    belief = PageCacheBelief(3)
    belief.took("abcd")
    assert [belief.has(key) for key in "abcd"] == [False, True, True, True]

    belief.asked("b")
    belief.took("ef")
    belief.asked("e")

    assert [belief.lost(key) for key in "abcdef"] == [False, False, False, True, True, True]


steps = st.lists(st.tuples(st.sampled_from(["took", "asked"]), st.integers(0, 12)), max_size=60)


@given(steps, st.integers(1, 6))
def test_belief_is_what_a_model_says(steps, most):
    belief, taken, lost = PageCacheBelief(most), [], []
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
