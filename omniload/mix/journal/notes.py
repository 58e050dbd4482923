"""What a rank notes in the folder of its run: figures of its loop, each kind in a file of its own."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from omniload.mix.journal.losses import LossLog, SourceLoss
from omniload.mix.journal.rewards import RewardLog, SourceRewards
from omniload.mix.journal.times import TimeLog

__all__ = ["RunNotes"]


class RunNotes:
    """What a rank notes in the folder of its run: figures of its loop."""

    def __init__(self, run_dir: Path, rank: int, *, leads: bool = True) -> None:
        """Note in ``run_dir``; ``leads`` where ``rank`` speaks for those that have the same batches."""
        self.run_dir, self.leads = run_dir, leads
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
        """Note the means of a source, its loss and its reward, each where it is given.

        Args:
            step: The step.
            source: Name of the source.
            means: As ``means_of_source`` has them.
            labels: Labels that they go over.
            first: As for ``LossLog.add_source``.
            columns: As for ``LossLog.add``.
        """
        loss, reward = means
        if loss is not None:
            told = SourceLoss(loss * labels, labels)
            self.losses.add_source(step, source, told, first, columns=columns)
        if reward is not None:
            self.rewards.add(step, {source: SourceRewards(reward=reward * labels, labels=labels)})
