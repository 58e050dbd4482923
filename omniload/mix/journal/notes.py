"""What a rank notes in the folder of its run: figures of its loop, each kind in a file of its own."""

from pathlib import Path

from omniload.mix.journal.losses import LossLog
from omniload.mix.journal.rewards import RewardLog
from omniload.mix.journal.times import TimeLog

__all__ = ["RunNotes"]


class RunNotes:
    """What a rank notes in the folder of its run: figures of its loop."""

    def __init__(self, run_dir: Path, rank: int, *, leads: bool = True) -> None:
        """Note in ``run_dir``; ``leads`` where ``rank`` speaks for those that have the same batches."""
        self.run_dir, self.leads = run_dir, leads
        self.losses, self.rewards = LossLog(run_dir, rank), RewardLog(run_dir, rank)
        self.times = TimeLog(run_dir, rank)
