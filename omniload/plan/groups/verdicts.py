"""Verdicts on groups by their rewards: the answers differ, or all are right, or all are wrong.

An advantage is a reward less the mean of its group, so a group of equal rewards moves no weight.

Shape suffixes:
    N  groups, one of each prompt        G  answers of a group

Source:
    Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale" (2025), section 3.2.
"""

from collections.abc import Sequence, Sized
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omniload.base.errors import ConfigError
from omniload.mix.journal.rewards import SourceRewards

__all__ = [
    "ALL_RIGHT",
    "ALL_WRONG",
    "KEPT",
    "checked_rewards",
    "rewards_of_sources",
    "verdicts_of",
]

KEPT, ALL_RIGHT, ALL_WRONG = 0, 1, 2
"""Verdicts: the rewards differ; they are equal and the answers right; they are equal and the answers wrong."""
_FEWEST_ANSWERS = 2


def verdicts_of(
    rewards_NG: NDArray[np.float64], *, right_above: float = 0.0, tolerance: float = 0.0
) -> NDArray[np.int8]:
    """Judge groups by their rewards.

    By the largest minus the smallest reward: the standard deviation of eight equal rewards may be above 0 by rounding.

    Args:
        rewards_NG: Finite rewards.
        right_above: An answer is right if its reward is above this.
        tolerance: Rewards that lie no further apart are equal.

    Returns:
        ``KEPT``, ``ALL_RIGHT`` or ``ALL_WRONG`` for each, ``[N]``; a group of equal rewards is one of the latter by
        its smallest.
    """
    lowest_N, highest_N = rewards_NG.min(axis=1), rewards_NG.max(axis=1)
    equal_N = highest_N - lowest_N <= tolerance
    # Judged by the smallest reward, because within a tolerance one answer may be right and another wrong.
    is_right_N = lowest_N > right_above
    found = np.where(equal_N, np.where(is_right_N, ALL_RIGHT, ALL_WRONG), KEPT)
    return found.astype(np.int8)


def checked_rewards(rewards: Any, num_prompts: int) -> NDArray[np.float64]:  # noqa: ANN401
    """Return what a rollout gave as rewards ``[N, G]``.

    Args:
        rewards: Numbers of a list, an array or a tensor.
        num_prompts: Prompts that the rollout was given.

    Raises:
        ConfigError: Another shape, fewer than two answers of a prompt, or what is no finite number.
    """
    # A tensor may lie on a device, in a type that numpy has not.
    held = rewards.detach().float().cpu() if hasattr(rewards, "detach") else rewards
    try:
        found_NG = np.array(held, np.float64)
    except (TypeError, ValueError) as error:
        said = _uneven(held) or f"{error!s:.120}"
        raise ConfigError(
            f"the rewards of {num_prompts} prompts are no table of numbers ({said}); give as many for each prompt, "
            "[N, G]"
        ) from error
    if found_NG.ndim != 2 or len(found_NG) != num_prompts:
        raise ConfigError(
            f"rewards have shape {list(found_NG.shape)}, and the rollout was given {num_prompts} prompts; give "
            "[N, G], a row of rewards for each prompt in its order"
        )
    if found_NG.shape[1] < _FEWEST_ANSWERS:
        raise ConfigError(
            f"rewards have shape {list(found_NG.shape)}, {found_NG.shape[1]} answers of a prompt; roll out at least "
            f"{_FEWEST_ANSWERS}, as the answers of a group are compared with each other"
        )
    bad = np.argwhere(~np.isfinite(found_NG))
    if len(bad):
        prompt, answer = bad[0].tolist()
        raise ConfigError(
            f"rewards[{prompt}, {answer}] is {found_NG[prompt, answer]}, one of {len(bad)} that are no finite "
            "numbers; give an answer that cannot be judged the reward of a wrong one"
        )
    return found_NG


def _uneven(rewards: Any) -> str:  # noqa: ANN401 -- whatever a rollout gave
    """Say which prompt has another number of rewards than the first one; nothing where all have as many."""
    rows = rewards if isinstance(rewards, Sequence) else ()
    counts = [len(each) if isinstance(each, Sized) else 0 for each in rows]
    other = next((i for i, count in enumerate(counts) if count != counts[0]), None)
    return (
        "" if other is None else f"rewards[0] are {counts[0]}, and rewards[{other}] {counts[other]}"
    )


def rewards_of_sources(
    sources_N: NDArray[np.integer[Any]], rewards_NG: NDArray[np.float64]
) -> dict[int, SourceRewards]:
    """Return what the groups of each source show, by its number; a reward above 0 is of a right answer."""
    kept_N = verdicts_of(rewards_NG) == KEPT
    right_N = (rewards_NG > 0).sum(axis=1)
    found = {}
    for source in np.unique(sources_N).tolist():
        mine_N = sources_N == source
        groups = int(mine_N.sum())
        found[source] = SourceRewards(
            groups=groups,
            kept=int(kept_N[mine_N].sum()),
            answers=groups * rewards_NG.shape[1],
            right=int(right_N[mine_N].sum()),
        )
    return found
