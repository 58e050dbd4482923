"""Caps on the shares of sources and of groups of them: what a mix must not do, whatever its weights come to."""

import math
from collections.abc import Iterator, Mapping, Sequence

from pydantic_core import PydanticCustomError

from omniload.base.config import fault_at
from omniload.base.errors import ConfigError
from omniload.base.units import so_often
from omniload.mix.schema.amounts import Amount
from omniload.mix.schema.source_base import SourceBase
from omniload.mix.schema.stages import Stage, WeightsConfig
from omniload.mix.schema.weights import GroupCap

__all__ = [
    "beyond_fractions",
    "faults_of_caps",
    "faults_of_waits",
    "group_fractions_at",
    "group_fractions_from",
    "require_amounts",
    "require_repetitions",
]

_ROUNDING = 1e-9
_SHOWN = 12
"""Amounts that a message lists."""
_SURE = 1.01
"""What a run draws is known to a hundredth where samples are measured; a cap itself holds to the record."""


def faults_of_caps(
    sources: Mapping[str, SourceBase], weights: WeightsConfig
) -> Iterator[PydanticCustomError]:
    """Yield what a mix file gives more than it allows."""
    caps: list[tuple[str, tuple[str | int, ...]]]
    caps = [(n, ("sources", n)) for n, s in sources.items() if s.max_fraction is not None]
    caps += [
        (f"group {cap.name}", ("mix", "stages", cap.stage, "weights", *cap.at))
        for cap in weights.group_caps
        if cap.max_fraction is not None
    ]
    if caps and weights.stop == "each_once":
        name, at = caps[0]
        yield fault_at(
            f"stop is each_once, where sources that are left take over the shares of those that ended, and {name} has "
            "a max_fraction; choose another stop, or leave max_fraction out",
            *(*at, "max_fraction"),
        )
    elif weights.amounts is None:
        yield from beyond_fractions(sources, weights, weights.stages)


def faults_of_waits(
    sources: Mapping[str, SourceBase], weights: WeightsConfig
) -> Iterator[PydanticCustomError]:
    """Yield the epochs that stages wait for and that a source, or a group around it, may not be gone through."""
    for i, stage in enumerate(weights.stages):
        for name, epochs in (stage.from_epochs or {}).items():
            caps = [("its", sources[name].max_repetition)] if name in sources else []
            if name in weights.repetition_caps:
                group = weights.repetition_caps[name]
                caps.append((f"group {group.name}'s", group.max_repetition))
            for whose, most in caps:
                if most is not None and epochs >= most:
                    yield fault_at(
                        f"stages[{i}] waits until {name!r} was gone through {so_often(epochs)}, and {whose} "
                        f"max_repetition is {most:g}: the run stops there before; wait for less, or raise "
                        "max_repetition",
                        *("mix", "stages", i, "from_epochs", name),
                    )


def beyond_fractions(
    sources: Mapping[str, SourceBase], declared: WeightsConfig, stages: Sequence[Stage]
) -> Iterator[PydanticCustomError]:
    """Yield the stages that give a source or a group more than it may have.

    A stage is asked at its last step: where it begins by a ramp, what either side of that allows is on the way alone.
    Each says which source or group, from which step on, and the weight that it may have there.

    Args:
        sources: The sources by name.
        declared: What the file says, with the caps of its groups.
        stages: Its stages, or those of an edit.
    """
    caps = {
        name: source.max_fraction
        for name, source in sources.items()
        if source.max_fraction is not None
    }
    ends = [later.from_step - 1 for later in stages[1:]]
    for i, stage in enumerate(stages if caps or declared.group_caps else ()):
        for name, most in caps.items():
            yield from _beyond(stage, (name,), most, name, ("sources", name, "max_fraction"))
        holding = (
            group_fractions_at(declared, ends[i])
            if i < len(ends)
            else group_fractions_from(declared, stage.from_step)
        )
        for cap in holding:
            at: tuple[str | int, ...] = ("mix", "stages", cap.stage, "weights", *cap.at)
            assert cap.max_fraction is not None, "it was chosen by it"
            who = f"group {cap.name}"
            yield from _beyond(stage, cap.names, cap.max_fraction, who, (*at, "max_fraction"))


def group_fractions_at(weights: WeightsConfig, step: int) -> tuple[GroupCap, ...]:
    """Return the groups whose share is capped at a step of a mix file.

    On the way from one stage to the next a group may have what either allows it.
    """
    stages = weights.stages
    current = max(i for i, stage in enumerate(stages) if stage.from_step <= step)
    caps = {c.at: c for c in weights.group_caps if c.stage == current and c.max_fraction}
    if step + 1 < stages[current].from_step + stages[current].ramp_steps:
        before = {c.at: c for c in weights.group_caps if c.stage == current - 1 and c.max_fraction}
        caps = {
            at: max(cap, before[at], key=lambda c: c.max_fraction or 0)
            for at, cap in caps.items()
            if at in before
        }
    return tuple(caps.values())


def group_fractions_from(weights: WeightsConfig, step: int) -> tuple[GroupCap, ...]:
    """Return the groups whose share is capped where weights are set at a step and stay: in a ramp as behind it."""
    current = max(
        (stage for stage in weights.stages if stage.from_step <= step), key=lambda s: s.from_step
    )
    return group_fractions_at(weights, max(step, current.from_step + current.ramp_steps - 1))


def _beyond(
    stage: Stage, names: Sequence[str], cap: float, who: str, at: tuple[str | int, ...]
) -> Iterator[PydanticCustomError]:
    """Yield a stage that gives some of its sources more than a cap."""
    total = sum(stage.weights.values())
    weight = sum(stage.weights.get(name, 0.0) for name in names)
    # Within rounding: weights are decimals, and their sum is not.
    if weight <= (cap + _ROUNDING) * total:
        return
    others = any(w for name, w in stage.weights.items() if name not in names)
    most = f"give it at most {cap * (total - weight) / (1 - cap):.6g} there" if others else None
    yield fault_at(
        f"{who} has {weight / total:.2%} of the mix {stage.begins} on, more than its "
        f"max_fraction {cap:.2%}: {most or 'no other source has a weight'}, or raise the cap",
        *at,
    )


def require_repetitions(
    sources: Mapping[str, SourceBase],
    epochs: Mapping[str, float],
    steps: int,
    groups: Mapping[str, tuple[str, GroupCap]] | None = None,
) -> None:
    """Refuse a run that would go through a source more often than it, or a group around it, may.

    Args:
        sources: The sources by name.
        epochs: How often a run of so many steps is expected to go through each.
        steps: Steps of the run.
        groups: The group that caps each source in one, and where it stands: file, line and key.

    Raises:
        ConfigError: With what is wanted, and what there is.
    """
    for name, source in sources.items():
        cap, wanted = source.max_repetition, epochs[name]
        if cap is not None and wanted > cap * _SURE:
            raise ConfigError(
                f"sources.{name}: {steps:,} steps want its records {wanted:.2f} times, and max_repetition is {cap:g}; "
                "give it less weight, add data, train for fewer steps, or raise max_repetition"
            )
        where, group = (groups or {}).get(name, ("", None))
        if group is not None and wanted > (group.max_repetition or math.inf) * _SURE:
            raise ConfigError(
                f"{where}: {steps:,} steps want the records of {name} {wanted:.2f} times, and max_repetition of group "
                f"{group.name} is {group.max_repetition:g}; give it less weight, add data, train for fewer steps, or "
                "raise max_repetition"
            )


def require_amounts(where: str, amounts: Mapping[str, Amount], part: float, steps: int) -> None:
    """Refuse a run that ends before its amounts are drawn.

    Args:
        where: File and line that they stand in.
        amounts: The amounts by name.
        part: The part of each that so many steps are expected to draw.
        steps: Steps of the run.

    Raises:
        ConfigError: With what is wanted of each source, and what it gets.
    """
    if part * _SURE >= 1:
        return
    got = ", ".join(
        f"{name} {amount} and gets {getattr(amount, amount.kind) * part:,.4g}"
        for name, amount in list(amounts.items())[:_SHOWN]
    )
    raise ConfigError(
        f"{where}: mix.amounts: {steps:,} steps draw {part:.1%} of each amount: wanted is {got}; train for "
        f"{math.ceil(steps / part):,} steps, or ask for less"
    )
