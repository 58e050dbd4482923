"""Verdicts on the rewards of a group, and values that are no table of rewards."""

import numpy as np
import pytest

from omniload.base.errors import ConfigError
from omniload.mix.journal.rewards import SourceRewards
from omniload.plan.groups.verdicts import (
    ALL_RIGHT,
    ALL_WRONG,
    KEPT,
    checked_rewards,
    rewards_of_sources,
    verdicts_of,
)


def test_groups_of_equal_rewards_are_all_right_or_all_wrong():
    rewards = np.array([[1, 1, 1], [-1, -1, -1], [1, -1, 1], [0, 0, 0]], float)

    assert verdicts_of(rewards).tolist() == [ALL_RIGHT, ALL_WRONG, KEPT, ALL_WRONG]


def test_eight_equal_rewards_are_equal_whatever_their_deviation_rounds_to():
    rewards = np.full((1, 3), 0.1)
    assert np.std(rewards) > 0

    assert verdicts_of(rewards).tolist() == [ALL_RIGHT]


def test_graded_rewards_have_a_tolerance_and_a_bound_of_what_is_right():
    rewards = np.array([[0.5, 0.52], [0.5, 0.6], [0.9, 0.91]])

    found = verdicts_of(rewards, right_above=0.8, tolerance=0.05)

    assert found.tolist() == [ALL_WRONG, KEPT, ALL_RIGHT]


class Tensor:
    """A fake of a tensor on a device, with the methods that are used."""

    def detach(self):
        return self

    float = cpu = detach

    def __array__(self, dtype=None, copy=None):
        return np.array([[1, 0]], dtype)


@pytest.mark.parametrize("rewards", [[[1, 0]], [(True, False)], np.array([[1, 0]]), Tensor()])
def test_rewards_may_be_a_list_an_array_or_a_tensor(rewards):
    found = checked_rewards(rewards, 1)

    assert (found.tolist(), found.dtype) == ([[1.0, 0.0]], np.float64)


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        ([[1, 0], [1, 0], [1]], r"no table of numbers \(rewards\[0\] are 2, and rewards\[2\] 1\)"),
        (
            [[1, 0], None],
            r"\(rewards\[0\] are 2, and rewards\[1\] 0\); give as many for each prompt",
        ),
        (object(), "no table of numbers .*; give as many for each prompt"),
        (["right"], "no table of numbers"),
        ([1, 0], r"shape \[2\], and the rollout was given 2 prompts"),
        ([[1, 0]], r"shape \[1, 2\], and the rollout was given 2 prompts"),
        ([[1], [0]], "1 answers of a prompt; roll out at least 2"),
        ([[1, 0], [0, float("nan")]], r"rewards\[1, 1\] is nan, one of 1 that are no finite"),
        ([[float("inf"), 0], [0, 1]], r"rewards\[0, 0\] is inf"),
    ],
)
def test_what_are_no_rewards_is_told_with_the_value_and_the_remedy(rewards, said):
    with pytest.raises(ConfigError, match=said):
        checked_rewards(rewards, 2)


def test_groups_are_counted_by_source():
    rewards = np.array([[1, 0], [1, 1], [0, 0], [-1, 2]], float)

    found = rewards_of_sources(np.array([3, 0, 3, 3]), rewards)

    assert found == {
        0: SourceRewards(groups=1, kept=0, answers=2, right=2),
        3: SourceRewards(groups=3, kept=2, answers=6, right=2),
    }
