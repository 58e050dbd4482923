"""What coming plans are likely to draw of each source, and how much of it is read ahead of them.

Samples that are known lie in the memory of a source loader, so what is read ahead is bounded by what they weigh:
a thousand tokens are 5 KB of text, or 2 MB of images.

Shape suffixes:
    S  sources
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from omniload.mix.config import MixConfig
from omniload.mix.deficit import WEIGHT_ONE
from omniload.mix.edits.history import History
from omniload.mix.schedule import weights_at
from omniload.mix.state import MixState

__all__ = ["Demand"]

_PLANS_READ_AHEAD = 4
"""Plans' worth of samples known ahead of the next plan, for each source by its share; half as many let every
plan wait for a read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Tokens of each source that must be known before steps can be planned, and below which more are asked for."""

    step: int
    """The first of the steps."""
    steps: int
    """How many."""
    needs_S: list[int]
    """What they are likely to draw; at least 1 where they draw any."""
    targets_S: list[int]
    """What the coming steps are likely to draw; more is asked for below it, where memory allows."""
    room_S: list[float]
    """Bytes that the known samples of each may take of a loader's memory."""
    short: set[int] = field(default_factory=set)
    """Sources of which less than the need is known."""

    @classmethod
    def of(cls, history: History, state: MixState, steps: int, num_sources: int) -> Self:
        """Return what ``steps`` behind a state demand of sources, also of those that later edits add."""
        mix, entered = history.entered(state)
        # One that is added draws nothing before the step of its edit, but is read ahead by its target.
        needs_S = _needs_of(mix, entered, steps) + [0] * (num_sources - len(mix.names))
        targets_S = _targets_of(history, state.step, needs_S)
        # Of the memory half: the rest is for decoded blocks, and for samples that are planned and not yet taken.
        room_per_token = history.base.loader.memory / 2 / max(1, sum(targets_S))
        return cls(
            step=state.step,
            steps=steps,
            needs_S=needs_S,
            targets_S=targets_S,
            room_S=[target * room_per_token for target in targets_S],
        )

    def ahead(self, source: int, token_bytes: float) -> tuple[int, int]:
        """Return how many tokens of a source are to be known at least, and how many are asked for where they are not.

        Args:
            source: Its number.
            token_bytes: What a token of it takes of memory, with all that goes with it; 0 where that is not known.

        Returns:
            At least what the next plan needs, whatever that weighs.
        """
        need, target, room = self.needs_S[source], self.targets_S[source], self.room_S[source]
        if 2 * target * token_bytes <= room:
            return target, 2 * target
        most = max(need, int(room / token_bytes))
        return max(need, most // 2), most


def _needs_of(mix: MixConfig, state: MixState, steps: int) -> list[int]:
    """Return the tokens of each source that the next steps are likely to draw; at least 1 where they draw any."""
    weights = weights_at(mix.mix.stages, mix.names, state.step)
    if mix.mix.counted == "sample" or mix.pack.method == "none":
        # Drawn by number: no tokens to foresee.
        return [1 if weight > 0 else 0 for weight in weights]
    budget = (mix.rows_per_step * steps + mix.pack.rows_ahead) * mix.pack.length
    return [
        max(1, int(weight * budget + credit / WEIGHT_ONE)) if weight > 0 else 0
        for weight, credit in zip(weights, state.credits_S, strict=True)
    ]


def _targets_of(history: History, step: int, needs_S: Sequence[int]) -> list[int]:
    """Return the tokens of each source that the steps from ``step`` on are likely to draw, over several plans.

    An edit of a coming step counts: what it draws from is read before it holds.
    """
    together = history.base.steps_at_once
    ahead = step + _PLANS_READ_AHEAD * together
    mix = history.at(ahead)
    soon = dict(enumerate(weights_at(mix.mix.stages, mix.names, ahead)))
    tokens = mix.batch.tokens * together
    return [
        max(need, int(soon.get(s, 0.0) * tokens)) * _PLANS_READ_AHEAD
        for s, need in enumerate(needs_S)
    ]
