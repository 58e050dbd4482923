"""The source of the next sample, by example."""

import numpy as np
import pytest

from omniload.mix.deficit import WEIGHT_ONE, draw, integer_weights


def of(*columns):
    return [np.asarray(column, np.int32) for column in columns]


def test_equal_sources_take_turns():
    drawn = draw(of([1] * 9, [1] * 9), integer_weights([1, 1]), [0, 0], budget=6)

    assert drawn.sources_N.tolist() == [0, 1, 0, 1, 0, 1]


def test_a_source_of_three_times_the_weight_comes_three_times_as_often_and_spread_out():
    drawn = draw(of([1] * 9, [1] * 9), integer_weights([3, 1]), [0, 0], budget=8)

    assert drawn.sources_N.tolist() == [0, 1, 0, 0, 0, 1, 0, 0]


def test_a_long_sample_is_paid_for_before_its_source_is_drawn_again():
    drawn = draw(of([10, 10], [1] * 30), integer_weights([1, 1]), [0, 0], budget=21)

    assert drawn.counts_S.tolist()[0] == 1
    assert drawn.served_S == (10, 11)


def test_the_budget_is_reached_and_passed_by_less_than_the_last_sample():
    drawn = draw(of([7] * 9), integer_weights([1]), [0], budget=15)

    assert drawn.served_S == (21,)
    assert drawn.starved is None


def test_a_budget_of_nothing_draws_nothing():
    drawn = draw(of([7] * 9), integer_weights([1]), [0], budget=0)

    assert drawn.sources_N.tolist() == []
    assert drawn.credits_S == (0,)


def test_a_source_that_is_due_and_has_nothing_at_hand_is_named():
    drawn = draw(of([1] * 9, [1]), integer_weights([1, 1]), [0, 0], budget=9)

    assert drawn.starved == 1
    assert drawn.counts_S.tolist() == [1, 1]


def test_a_source_without_weight_is_never_drawn():
    drawn = draw(of([1] * 9, [1] * 9), integer_weights([1, 0]), [0, 0], budget=9)

    assert drawn.counts_S.tolist() == [9, 0]


def test_a_source_that_is_owed_much_comes_first():
    drawn = draw(
        of([1] * 9, [1] * 9), integer_weights([1, 1]), [-3 * WEIGHT_ONE, 3 * WEIGHT_ONE], budget=6
    )

    assert drawn.sources_N.tolist()[:3] == [1, 1, 1]


def test_weights_can_count_samples_while_the_budget_counts_tokens():
    lengths = of([100] * 9, [1] * 9)

    drawn = draw(of([1] * 9, [1] * 9), integer_weights([1, 1]), [0, 0], budget=202, sizes=lengths)

    assert drawn.counts_S.tolist() == [2, 2]
    assert drawn.served_S == (2, 2)


def test_credits_are_what_each_source_is_owed():
    drawn = draw(of([10], [4]), integer_weights([1, 1]), [0, 0], budget=14)

    assert drawn.credits_S == (-3 * WEIGHT_ONE, 3 * WEIGHT_ONE)


@pytest.mark.parametrize(
    ("weights", "whole"),
    [
        ([1], (WEIGHT_ONE,)),
        ([1, 1], (WEIGHT_ONE // 2,) * 2),
        ([1, 0], (WEIGHT_ONE, 0)),
        ([1e308, 1e308], (WEIGHT_ONE // 2,) * 2),
        ([1e-300, 1], (1, WEIGHT_ONE - 1)),
        ([5e-324, 1e300], (1, WEIGHT_ONE - 1)),
    ],
)
def test_weights_become_integers_of_one_sum(weights, whole):
    assert integer_weights(weights) == whole


def test_a_third_each_differs_by_one_part_in_a_billion():
    whole = integer_weights([1, 1, 1])

    assert sum(whole) == WEIGHT_ONE
    assert max(whole) - min(whole) == 1


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1, -1], r"weights\[1\] is -1"),
        ([float("nan")], r"weights\[0\] is nan"),
        ([1, float("inf")], r"weights\[1\] is inf"),
        ([0, 0], "give one source a weight above 0"),
        ([], "give one source a weight above 0"),
    ],
)
def test_weights_that_say_nothing_are_refused(weights, message):
    with pytest.raises(ValueError, match=message):
        integer_weights(weights)
