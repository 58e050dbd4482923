import numpy as np
import pytest

from benchmarks.trainer import vision_balance, vision_costs
from benchmarks.trainer.vision_corpus import Work, flops_of, imbalance_of
from benchmarks.trainer.vision_costs import Cost, Costs, seconds_of_step


def a_cost(**seconds):
    none = dict.fromkeys(("call_s", "item_s", "linear_s", "quadratic_s"), 0.0)
    return Cost(**none | seconds, measured_s=())


COSTS = Costs(
    encoder_forward=a_cost(linear_s=1.0),
    encoder_backward=a_cost(linear_s=2.0),
    backbone=a_cost(linear_s=1.0),
    update_s=0.5,
)


def work(patches, tokens):
    return Work(patches_I=np.array(patches, np.int64), lengths_D=np.array(tokens, np.int64))


def test_ranks_in_order_wait_at_the_end_of_a_step_alone():
    works_RM = [[work([1], [1]), work([4], [1])], [work([4], [1]), work([1], [1])]]

    assert seconds_of_step(works_RM, COSTS, dealt=False) == 3 * 5 + 2 + 0.5


def test_ranks_to_which_images_are_dealt_wait_for_embeddings_and_for_their_gradients():
    works_RM = [[work([1], [5]), work([4], [1])], [work([4], [1]), work([1], [5])]]

    # Of each microbatch the slower encoder, the slower backbone, and what is left of backward.
    first = 4 + 5
    after_first = np.array([first + 2 * 1, first + 2 * 4])
    forward = (after_first + np.array([4, 1])).max() + 5
    assert seconds_of_step(works_RM, COSTS, dealt=True) == forward + 2 * 4 + 0.5


def test_a_call_without_an_image_costs_nothing():
    assert a_cost(call_s=3.0, item_s=1.0)([]) == 0.0


def test_a_fit_finds_the_cost_of_a_call_an_item_a_token_and_a_pair():
    cost = a_cost(call_s=0.01, item_s=0.002, linear_s=1e-4, quadratic_s=1e-7)
    calls = vision_costs.IMAGES

    fitted = vision_costs._fitted(calls, [cost(sizes) for sizes in calls])

    found = (fitted.call_s, fitted.item_s, fitted.linear_s, fitted.quadratic_s)
    assert found == pytest.approx((0.01, 0.002, 1e-4, 1e-7))


def test_a_cost_that_falls_with_its_size_is_fitted_without_that_term():
    fitted = vision_costs._fitted([[1], [2], [4], [8]], [1.0, 0.9, 0.8, 0.7])

    assert min(fitted.call_s, fitted.item_s, fitted.linear_s, fitted.quadratic_s) == 0.0
    assert fitted([4]) > 0


def test_imbalance_is_of_the_heaviest_rank_over_the_lightest():
    light, heavy = [work([], [100])], [work([900], [100]), work([64], [20])]

    assert imbalance_of([light, heavy]) == flops_of(heavy) / flops_of(light) > 1


@pytest.mark.parametrize(
    ("imbalance", "found"), [(1.5, None), (3.2, 3.2), (4.0, 5.0), (6.9, 6.9), (9.0, None)]
)
def test_a_step_counts_for_the_imbalance_that_it_is_near_to(imbalance, found):
    assert vision_balance.bin_of(imbalance) == found


def test_the_gain_is_of_all_steps_together():
    pairs = [vision_balance.Pair(3.0, 4.0, 2.0), vision_balance.Pair(3.1, 2.0, 2.0)]

    assert vision_balance.gain_of(pairs) == 1.5
    (row,) = vision_balance.rows_of_pairs("ranks", pairs)
    assert row == ("ranks", "3.2 x", "2", "3.05 x", "3,000", "2,000", "1.50")


def test_two_ranks_cannot_gain_more_than_half_of_the_work_each_allows():
    pairs = [vision_balance.Pair(3.0, 3.0, 2.5)]

    (row,) = vision_balance.with_bounds("ranks", pairs)

    assert row[-2:] == ("1.20", "1.50")
