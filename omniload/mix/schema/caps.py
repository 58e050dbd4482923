"""Caps on the shares of sources: what a mix must not do, whatever its weights come to."""

import math
from collections.abc import Iterator, Mapping, Sequence

from pydantic_core import PydanticCustomError

from omniload.base.config import fault_at
from omniload.base.errors import ConfigError
from omniload.mix.schema.amounts import Amount
from omniload.mix.schema.stages import Stage
from omniload.mix.sources import SourceBase

__all__ = ["beyond_fractions", "require_amounts", "require_repetitions"]

_ROUNDING = 1e-9
_SHOWN = 12
"""Amounts that a message lists."""
_SURE = 1.01
"""What a run draws is known to a hundredth where samples are measured; a cap itself holds to the record."""


def beyond_fractions(
    sources: Mapping[str, SourceBase], stages: Sequence[Stage]
) -> Iterator[PydanticCustomError]:
    """Yield the stages that give a source more than it may have; in a ramp it has no more than before or behind.

    Each says which source, from which step on, and the weight that it may have there.
    """
    caps = {
        name: source.max_fraction
        for name, source in sources.items()
        if source.max_fraction is not None
    }
    for stage in stages if caps else ():
        total = sum(stage.weights.values())
        for name, cap in caps.items():
            weight = stage.weights.get(name, 0.0)
            # Within rounding: weights are decimals, and their sum is not.
            if weight > (cap + _ROUNDING) * total:
                least = (
                    "no other source has a weight"
                    if weight == total
                    else (f"give it at most {cap * (total - weight) / (1 - cap):.6g} there")
                )
                yield fault_at(
                    f"{name} has {weight / total:.2%} of the mix from step {stage.from_step} on, more than its "
                    f"max_fraction {cap:.2%}: {least}, or raise the cap",
                    *("sources", name, "max_fraction"),
                )


def require_repetitions(
    sources: Mapping[str, SourceBase], epochs: Mapping[str, float], steps: int
) -> None:
    """Refuse a run that would go through a source more often than it may.

    Args:
        sources: The sources by name.
        epochs: How often a run of so many steps is expected to go through each.
        steps: Steps of the run.

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
