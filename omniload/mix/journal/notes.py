"""The notes of a rank in the folder of its run: figures of its loop, with a file for each kind."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from omniload.mix.journal.losses import LossLog, SourceLoss
from omniload.mix.journal.rewards import RewardLog, SourceRewards
from omniload.mix.journal.times import TimeLog

__all__ = ["RunNotes"]


class RunNotes:
    """The notes of a rank in the folder of its run: figures of its loop."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        """Write what ``rank`` reports to ``run_dir``."""
        self.run_dir = run_dir
        self.losses, self.rewards = LossLog(run_dir, rank), RewardLog(run_dir, rank)
        self.times = TimeLog(run_dir, rank)

    def add_means(
        self,
        step: int,
        source: str,
        means: tuple[float | None, float | None],
        labels: int,
        first: NDArray[np.int64] | None,
        columns: tuple[int, int] | None,
    ) -> None:
        """Write the mean loss and the mean reward of a source, if they are given.

        Args:
            step: The step.
            source: Name of the source.
            means: Loss and reward, as in ``means_of_source``.
            labels: Number of labels that the means cover.
            first: As in ``LossLog.add_source``.
            columns: As in ``LossLog.add``.
        """
        loss, reward = means
        if loss is not None:
            told = SourceLoss(loss * labels, labels)
            self.losses.add_source(step, source, told, first, columns=columns)
        if reward is not None:
            self.rewards.add(step, {source: SourceRewards(reward=reward * labels, labels=labels)})
