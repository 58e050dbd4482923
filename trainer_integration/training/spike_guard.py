"""Detects spikes of gradients: a norm far above those of earlier steps is reported, and its step is not followed.

The norms of a window of steps have a mean and a deviation. A norm more than ``sigma`` deviations above the mean is a
spike. Norms of spikes stay out of the window, so that one does not hide the next. All ranks have the same norms and
therefore judge alike.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from omniload.base.errors import StateError
from trainer_integration.config import SpikeGuardConfig

__all__ = ["MOST_IN_A_ROW", "Spike", "SpikeGuard"]

MOST_IN_A_ROW = 10
"""Steps that are skipped in a row before the run ends, because then the norm is no spike but the new normal."""
_LEAST_DEVIATION = 0.01
"""Least deviation relative to the mean, for norms that hardly vary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spike:
    """A norm that was too far above the norms before it."""

    norm: float
    mean: float
    """Mean of the window."""
    sigmas: float
    """Deviations of the norm above the mean."""
    window: int
    """Number of steps in the window."""

    def said_of(self, step: int) -> str:
        """Return a sentence that leads to the samples of the step."""
        return (
            f"gradient norm of step {step} is {self.norm:.4g}, {self.sigmas:.1f} sigma above {self.mean:.4g}, the mean "
            f"of {self.window} steps; its samples: omniload mix audit RUN --step {step}"
        )


class SpikeGuard:
    """Judges the norms of one run, step after step."""

    def __init__(
        self, config: SpikeGuardConfig, norms: Iterable[float] = (), in_a_row: int = 0
    ) -> None:
        """Continue after ``norms``, the last norms that were no spikes, and ``in_a_row`` later spikes."""
        self._config = config
        self._norms: deque[float] = deque(norms, maxlen=config.window)
        self.in_a_row = in_a_row
        """Spikes since the last norm that was no spike."""

    @property
    def norms(self) -> tuple[float, ...]:
        """Norms of the window, the oldest first."""
        return tuple(self._norms)

    def judge(self, norm: float, step: int) -> Spike | None:
        """Judge the norm of a step; return the spike if it is one.

        There is no spike before the window is full.

        Raises:
            StateError: It is a spike, and the run must stop at it, or it is one of too many in a row.
        """
        if self._config.action == "off":
            return None
        spike = self._spike(norm)
        if spike is None:
            self._norms.append(norm)
            self.in_a_row = 0
            return None
        # Not added to the window, because a series of spikes would raise the mean until they were no spikes.
        self.in_a_row += 1
        if self._config.action == "stop":
            raise StateError(
                f"{spike.said_of(step)}. Resume from an earlier checkpoint with those samples left out, or set "
                "spike_guard.action to skip"
            )
        if self.in_a_row > MOST_IN_A_ROW:
            raise StateError(
                f"{spike.said_of(step)}. It is the {self.in_a_row}th in a row: resume from an earlier checkpoint with "
                "a lower optimizer.lr, or a greater spike_guard.sigma"
            )
        return spike

    def _spike(self, norm: float) -> Spike | None:
        window = self._config.window
        if len(self._norms) < window:
            return None
        # Computed anew from the window, because a running sum would drift, and differ in its last bits after a resume.
        norms = np.asarray(self._norms)
        mean = float(norms.mean())
        deviation = max(float(norms.std()), _LEAST_DEVIATION * mean)
        sigmas = (norm - mean) / deviation if deviation else 0.0
        if sigmas <= self._config.sigma:
            return None
        return Spike(norm=norm, mean=mean, sigmas=sigmas, window=window)
