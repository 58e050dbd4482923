"""What each rank tells of its prompts of a step, and what all of them together come to.

Shape suffixes:
    N  prompts of the step over all ranks        G  answers of each
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omniload.base.errors import ConfigError, StateError
from omniload.front.sampling.values import Group
from omniload.machine.groups.filler import DataEnded, Event, RoundReplayed, RoundReported
from omniload.mix.journal.groups import RoundDecision

__all__ = ["END", "event_of", "report_of"]

END: Mapping[str, Any] = {"step": None}
"""Report of a rank whose data has ended."""
_FEWEST_ANSWERS = 2


def report_of(step: int, groups: Sequence[Group]) -> Mapping[str, Any]:
    """Return what a rank tells of its groups."""
    return {
        "step": step,
        "keys": [group.prompt.key for group in groups],
        "digests": [group.prompt.digest() for group in groups],
        "rewards": [group.rewards for group in groups if group.rewards is not None],
    }


def event_of(reports: Sequence[Mapping[str, Any]], judged: RoundDecision | None) -> Event:
    """Return the reports of all ranks, in their order, as one.

    Args:
        reports: As ``report_of`` makes them, or ``END``.
        judged: What was said of the step before; ``None`` where rewards say it now.

    Raises:
        StateError: Ranks are at other steps.
        ConfigError: They rolled out other numbers of answers.
    """
    steps = [report["step"] for report in reports]
    if set(steps) == {None}:
        return DataEnded()
    if len(set(steps)) > 1:
        raise StateError(
            f"ranks drew the steps {steps!r:.120} for one round (None: the data has ended); let the sampler alone "
            "take batches of its loader, and load one state on all ranks"
        )
    keys = [key for report in reports for key in report["keys"]]
    numbers = [len(report["keys"]) for report in reports]
    shared = {
        "step": steps[0],
        "keys_N3": np.array(keys, np.int64).reshape(-1, 3),
        "owners_N": np.repeat(np.arange(len(reports)), numbers),
        "digests": [digest for report in reports for digest in report["digests"]],
    }
    if judged is not None:
        return RoundReplayed(judged=judged, **shared)
    return RoundReported(rewards_NG=_joined(reports), **shared)


def _joined(reports: Sequence[Mapping[str, Any]]) -> NDArray[np.float64]:
    answers = {
        rank: len(report["rewards"][0]) for rank, report in enumerate(reports) if report["rewards"]
    }
    if len(set(answers.values())) > 1:
        raise ConfigError(
            f"rollouts gave other numbers of answers of a prompt, by rank {answers!r:.120}; give as many on all ranks"
        )
    rewards = [rewards_G for report in reports for rewards_G in report["rewards"]]
    most = max(answers.values(), default=_FEWEST_ANSWERS)
    return np.array(rewards, np.float64).reshape(-1, most)
