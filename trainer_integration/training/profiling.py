"""A few steps under torch's profiler: a Chrome trace of each rank, for https://ui.perfetto.dev."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

__all__ = ["StepProfile"]


class StepProfile:
    """Traces the steps of a range into one file."""

    def __init__(self, steps: tuple[int, int] | None, folder: Path, rank: int) -> None:
        """Trace from the first to the last of ``steps``; none where it is ``None``."""
        self._steps, self._folder, self._rank = steps, folder, rank
        self._profile: profile | None = None

    @contextmanager
    def step(self, step: int) -> Iterator[Path | None]:
        """Run a step; where the range ends before the next, the file is there as soon as the ``with`` ends.

        Yields:
            The file that ends with this step; ``None`` for others.
        """
        if self._steps is None or not self._steps[0] <= step <= self._steps[1]:
            yield None
            return
        if self._profile is None:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities)
            self._profile.start()
        is_last = step == self._steps[1]
        with record_function(f"step {step}"):
            yield self._file if is_last else None
        if is_last:
            self.close()

    def close(self) -> None:
        """Write what was traced; nothing where no step of the range was run, or the file is written."""
        if self._profile is not None:
            tracer, self._profile = self._profile, None
            tracer.stop()
            self._folder.mkdir(parents=True, exist_ok=True)
            tracer.export_chrome_trace(str(self._file))

    @property
    def _file(self) -> Path:
        assert self._steps is not None, "a file is asked for within the range"
        first, last = self._steps
        return self._folder / f"rank-{self._rank}-steps-{first}-{last}.json"
