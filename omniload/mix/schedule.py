"""Weights of the sources at a step: stages, and ramps between them."""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self

from omniload.base.errors import ConfigError
from omniload.mix.config import MixConfig, Stage
from omniload.mix.deficit import integer_weights
from omniload.mix.state import MixState

__all__ = [
    "GOES_ON",
    "MixSchedule",
    "amounts_S",
    "boundaries",
    "draw_weights_at",
    "drawn_in",
    "gone_on_without_S",
    "part_done",
    "part_drawn",
    "stage_at",
    "stages_from",
    "steps_alike",
    "weights_at",
]

GOES_ON = ("each_once", "amounts")
"""Values of ``mix.stop`` under which a run continues without a source that has ended."""
_FOR_EVER = 1 << 62


def weights_at(stages: Sequence[Stage], names: Sequence[str], step: int) -> tuple[float, ...]:
    """Return the share of each source at ``step``; they sum to one.

    A ramp moves from the shares of the stage before to those of its own stage. At its ``i``-th step, with ``i`` from
    1, the part done is ``i / ramp_steps`` if the ramp is linear, or ``(1 - cos(pi * i / ramp_steps)) / 2`` if it is a
    cosine.
    """
    current = stage_at(stages, step)
    stage = stages[current]
    target = _shares(stage, names)
    done = step - stage.from_step + 1
    if done >= stage.ramp_steps:
        return target
    # The stage before has reached its own weights, because no stage begins within a ramp.
    before = _shares(stages[current - 1], names)
    part = part_done(stage, done)
    return tuple(b + (t - b) * part for b, t in zip(before, target, strict=True))


def draw_weights_at(
    mix: MixConfig, state: MixState, records_S: Sequence[int] | None
) -> tuple[int, ...]:
    """Return the integer weights by which the samples of a step are drawn, ``[S]``; all are 0 if all sources ended.

    Args:
        mix: The declared mix.
        state: State before the step.
        records_S: Raw records of each source; needed if the mix gives amounts.
    """
    if mix.mix.amounts is not None:
        assert records_S is not None, "amounts are of sources that were opened"
        # Weights are the remaining amounts at the last change, not those of now: weights that moved with every draw
        # would be off by two units (0029).
        wanted_S = amounts_S(mix, records_S)
        since_S = state.since_S or (0,) * len(wanted_S)
        ended_S = _drawn_whole_S(mix, state, wanted_S)
        # Only the rest of a sample that is begun may be left, so the remaining amount is at least 1.
        rest_S = [max(n - since, 1) for n, since in zip(wanted_S, since_S, strict=True)]
        return _live(integer_weights(rest_S), ended_S)
    weights_S = integer_weights(weights_at(mix.mix.stages, mix.names, state.step))
    return _live(weights_S, gone_on_without_S(mix, state, None))


def gone_on_without_S(
    mix: MixConfig, state: MixState, records_S: Sequence[int] | None
) -> list[bool]:
    """Return which sources have ended and are no longer due, so that a run continues without them.

    The arguments are those of ``draw_weights_at``.
    """
    if mix.mix.amounts is not None:
        assert records_S is not None, "amounts are of sources that were opened"
        return _drawn_whole_S(mix, state, amounts_S(mix, records_S))
    return state.ended_S if mix.mix.stop == "each_once" else [False] * len(mix.names)


def _live(weights_S: tuple[int, ...], ended_S: Sequence[bool]) -> tuple[int, ...]:
    """Return the weights with those of ended sources set to 0, because ended sources are owed nothing."""
    if not any(ended_S):
        return weights_S
    # Scaled again, because credits sum to zero only if weights sum to ``WEIGHT_ONE``.
    live = [0 if ended else weight for ended, weight in zip(ended_S, weights_S, strict=True)]
    return integer_weights(live) if any(live) else tuple(live)


def _drawn_whole_S(mix: MixConfig, state: MixState, wanted_S: Sequence[int]) -> list[bool]:
    """Return for which sources the whole amount is drawn."""
    assert mix.mix.amounts is not None, "the mix has weights"
    found = []
    for s, name in enumerate(mix.names):
        amount, cursor = mix.mix.amounts.get(name), state.cursors_S[s]
        if amount is None:
            found.append(True)
        elif amount.kind == "epochs":
            # An amount in epochs ends at a position, because records that gave no sample may follow the last sample.
            found.append(cursor >= (wanted_S[s], 0, 0))
        else:  # samples are drawn whole
            is_begun = amount.kind == "samples" and cursor[2] > 0
            found.append(state.drawn_S[s] >= wanted_S[s] and not is_begun)
    return found


def part_drawn(mix: MixConfig, state: MixState, records_S: Sequence[int]) -> float:
    """Return how much of its amounts a mix has drawn, of the one that is least far; 1 where all of them are drawn.

    Args:
        mix: A mix with amounts.
        state: Where the run stands.
        records_S: Raw records of each source.
    """
    wanted_S = amounts_S(mix, records_S)
    kinds_S = [(mix.mix.amounts or {})[name].kind for name in mix.names]
    return min(
        1.0 if is_whole else drawn_in(kind, state, s) / wanted_S[s]
        for s, (kind, is_whole) in enumerate(
            zip(kinds_S, _drawn_whole_S(mix, state, wanted_S), strict=True)
        )
    )


def drawn_in(kind: str, state: MixState, source: int) -> int:
    """Return how much of a source is drawn: records if ``kind`` is ``epochs``, otherwise the unit of its amount."""
    if kind != "epochs":
        return state.drawn_S[source]
    position, sub, token = state.cursors_S[source]
    # A record that is begun counts as drawn, because the run finishes it even if the amount changes.
    return position + (sub > 0 or token > 0)


def amounts_S(mix: MixConfig, records_S: Sequence[int]) -> list[int]:
    """Return how much of each source a mix with amounts draws, each in its unit: records, samples or tokens.

    The number is 0 for a source without an amount, which an edit retired.

    Raises:
        ConfigError: An amount is less than one record.
    """
    assert mix.mix.amounts is not None, "the mix has weights"
    found = []
    for name, records in zip(mix.names, records_S, strict=True):
        amount = mix.mix.amounts.get(name)
        found.append(0 if amount is None else amount.units(records))
        if amount is not None and not found[-1]:
            raise ConfigError(
                f"mix.amounts.{name}: {amount} of {records:,} records are less than one record; raise it, or remove "
                "the source"
            )
    return found


def steps_alike(stages: Sequence[Stage], step: int) -> int:
    """Return for how many steps from ``step`` on the weights stay the same; at least 1."""
    current = stage_at(stages, step)
    # Every step within a ramp has its own weights.
    if step - stages[current].from_step + 1 < stages[current].ramp_steps:
        return 1
    return stages[current + 1].from_step - step if current + 1 < len(stages) else _FOR_EVER


def stages_from(stages: Sequence[Stage], step: int) -> list[Stage]:
    """Return stages that begin at ``step`` and give the same weights as ``stages`` from there on."""
    current = stage_at(stages, step)
    stage, later = stages[current], stages[current + 1 :]
    done = step - stage.from_step + 1
    left = stage.ramp_steps - done
    if left <= 0:
        cut = Stage(from_step=step, weights=stage.weights, from_epochs=_epochs_at(stage, step))
        return [cut, *later]
    # Within a ramp: first the weights at this step, then the rest of the ramp.
    names = sorted({name for s in stages[max(0, current - 1) : current + 1] for name in s.weights})
    scale = sum(stage.weights.values())
    shares = weights_at(stages, names, step)
    now = {name: share * scale for name, share in zip(names, shares, strict=True) if share > 0}
    rest = Stage(
        from_step=step + 1,
        weights=stage.weights,
        ramp_steps=left,
        ramp=stage.ramp,
        # A linear ramp can continue from any point, but a cosine has to know how much of it is done.
        ramp_done=0 if stage.ramp == "linear" else stage.ramp_done + done,
    )
    return [Stage(from_step=step, weights=now, from_epochs=_epochs_at(stage, step)), rest, *later]


def _epochs_at(stage: Stage, step: int) -> dict[str, float] | None:
    """Return the epochs that a stage waited for if it is cut at its own first step, because it may be taken back."""
    return stage.from_epochs if step == stage.from_step else None


def boundaries(mix: MixConfig) -> tuple[int, ...]:
    """Return the steps at which weights start or stop changing; steps of stages that wait for epochs are unknown."""
    stages = [stage for stage in mix.mix.stages if not stage.waits]
    return tuple(
        sorted({step for s in stages for step in (s.from_step, s.from_step + s.ramp_steps)})
    )


def stage_at(stages: Sequence[Stage], step: int) -> int:
    """Return the index of the stage that a step belongs to."""
    # Stages begin one after another, and a stage that waits begins after every step.
    return bisect_right(stages, step, key=lambda stage: stage.from_step) - 1


def part_done(stage: Stage, steps: float) -> float:
    """Return which part of a ramp is done after its first ``steps``, from 0 to 1."""
    if stage.ramp == "linear":
        return steps / stage.ramp_steps
    whole = stage.ramp_done + stage.ramp_steps
    before, now = (
        (1 - math.cos(math.pi * done / whole)) / 2
        for done in (stage.ramp_done, stage.ramp_done + steps)
    )
    # The last digit of a cosine may differ between machines, but the samples drawn must not.
    return float(f"{(now - before) / (1 - before):.12g}")


def _shares(stage: Stage, names: Sequence[str]) -> tuple[float, ...]:
    weights = [stage.weights.get(name, 0.0) for name in names]
    largest = max(weights)  # divided by it first, because the sum of large weights may be infinite
    total = sum(weight / largest for weight in weights)
    return tuple(weight / largest / total for weight in weights)


@dataclass(frozen=True, slots=True)
class MixSchedule:
    """Weights of the sources over time."""

    stages: tuple[Stage, ...]
    """Stages with their weights; the first starts at step 0."""
    names: tuple[str, ...]
    """Names of the sources; the number of a source is its index here."""
    level: Literal["token", "sample"] = "token"
    """Unit that a weight counts."""

    @classmethod
    def of(cls, mix: MixConfig) -> Self:
        """Return the schedule of a mix file."""
        return cls(mix.mix.stages, mix.names, mix.mix.counted)

    @classmethod
    def constant(
        cls, weights: Mapping[str, float], *, level: Literal["token", "sample"] = "token"
    ) -> Self:
        """Return a schedule of weights that never change."""
        return cls((Stage(from_step=0, weights=dict(weights)),), tuple(weights), level)

    def shares_at(self, step: int) -> dict[str, float]:
        """Return the share of each source at ``step``; they sum to one."""
        return dict(zip(self.names, weights_at(self.stages, self.names, step), strict=True))
