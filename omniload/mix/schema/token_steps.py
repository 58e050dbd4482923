"""Stages that are dated by tokens: from the file's tokens to the steps that everything behind it knows.

A step takes ``batch.tokens``, padding included, so a number of tokens is a number of steps from the start.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from omniload.base.config import fault_at
from omniload.base.settings.quantities import Count

__all__ = ["names_tokens", "with_steps"]

_PAIRS = (("from_tokens", "from_step"), ("ramp_tokens", "ramp_steps"))
_COUNT: TypeAdapter[int] = TypeAdapter(Count)


def names_tokens(stage: object) -> bool:
    """Tell whether a stage of a file is dated by tokens."""
    return isinstance(stage, Mapping) and any(stage.get(tokens) is not None for tokens, _ in _PAIRS)


def with_steps(stage: Mapping[Any, Any], batch_tokens: object) -> dict[Any, Any]:
    """Return a stage with the steps that its tokens come to.

    The first step at which so many tokens have been taken is meant, and a ramp ends no earlier than its tokens do.

    Args:
        stage: As in the file; faulty counts are left for the model to refuse.
        batch_tokens: ``batch.tokens`` as in the file.

    Raises:
        PydanticCustomError: A stage has both.
    """
    found = dict(stage)
    per_step = _count_of(batch_tokens)
    for tokens, steps in _PAIRS:
        if stage.get(tokens) is None:
            continue
        if steps in stage:
            raise fault_at(
                f"{tokens} is {stage[tokens]!r:.40} and {steps} is {stage[steps]!r:.40}; give one of them",
                tokens,
            )
        count = _count_of(stage[tokens])
        if count is not None and per_step:
            # Rounded up: a stage begins no earlier than its tokens were taken.
            found[steps] = -(-count // per_step)
    return found


def _count_of(value: object) -> int | None:
    try:
        count = _COUNT.validate_python(value)
    except ValidationError:
        return None
    return count if count >= 0 else None
