"""Gradients that leap: a norm far above those of the steps before it is told, and not followed.

The norms of a window of steps have a mean and a deviation; a norm more than ``sigma`` deviations
above the mean is a spike. Norms of spikes stay out of the window, so one does not hide the next.
All ranks have the same norms, hence judge alike.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from omniload.base.errors import StateError
from trainer_integration.config import SpikeGuardConfig

__all__ = ["MOST_IN_A_ROW", "Spike", "SpikeGuard"]

MOST_IN_A_ROW = 10
"""Steps that are skipped one after the other before the run ends: then it is no spike, but the new normal."""
_LEAST_DEVIATION = 0.01
"""Of the mean: norms that hardly vary have no deviation to speak of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spike:
    """A norm that was too far above those before it."""

    norm: float
    mean: float
    """Of the window."""
    sigmas: float
    """Deviations of the norm above the mean."""
    window: int
    """Steps of the window."""

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
        """Go on after ``norms``, the last of them that were no spikes, and ``in_a_row`` spikes since."""
        self._config = config
        self._norms: deque[float] = deque(norms, maxlen=config.window)
        self.in_a_row = in_a_row
        """Spikes since the last norm that was none."""

    @property
    def norms(self) -> tuple[float, ...]:
        """The window, the oldest first."""
        return tuple(self._norms)

    def judge(self, norm: float, step: int) -> Spike | None:
        """Take the norm of a step; return the spike that it is.

        Nothing is a spike before the window is full.

        Raises:
            StateError: It is one, and the run is to stop at it, or it is one of too many in a row.
        """
        if self._config.action == "off":
            return None
        spike = self._spike(norm)
        if spike is None:
            self._norms.append(norm)
            self.in_a_row = 0
            return None
        # Not into the window: a run of spikes would raise the mean until they are none.
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
        # Anew from the window: a running sum would drift, and differ after a resume in its last bits.
        norms = np.asarray(self._norms)
        mean = float(norms.mean())
        deviation = max(float(norms.std()), _LEAST_DEVIATION * mean)
        sigmas = (norm - mean) / deviation if deviation else 0.0
        if sigmas <= self._config.sigma:
            return None
        return Spike(norm=norm, mean=mean, sigmas=sigmas, window=window)
