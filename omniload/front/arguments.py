"""What callers give to ``open``, ``serve``, ``join`` and a loader, checked before anything is opened."""

import math
from collections.abc import Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import get_args

from omniload.base.clock import wait_of
from omniload.base.errors import ConfigError, StateError
from omniload.base.log import get_logger
from omniload.base.state import JsonObject
from omniload.front.rows import Labels
from omniload.front.spec import Runtime
from omniload.mix.other_states import refuse_others

__all__ = [
    "check_choices",
    "check_steps_left",
    "require_finite",
    "require_rank",
    "require_whole",
    "state_from",
    "steps_of",
    "timeout_from",
]

_LOG = get_logger(__name__)


def require_whole(name: str, value: object, *, least: int = 0) -> int:
    """Return an argument that is a whole number.

    Raises:
        ConfigError: It is not a whole number, or it is less than ``least``.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise ConfigError(f"{name} is {value!r}; give a whole number of at least {least}")
    return int(value)


def require_finite(name: str, value: object, *, least: float = -math.inf) -> float:
    """Return an argument that is a finite number.

    Raises:
        ConfigError: It is none, or it is less than ``least``.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ConfigError(f"{name} is {value!r}; give a number")
    if not math.isfinite(value) or value < least:
        raise ConfigError(
            f"{name} is {value!r}; give a finite number"
            + f" of at least {least:g}" * (least > -math.inf)
        )
    return float(value)


def require_rank(rank: object, world_size: object) -> None:
    """Refuse the number of a rank, or of all ranks, that cannot be.

    Raises:
        ConfigError: One is not a whole number, or the rank is outside the ranks.
    """
    size = require_whole("world_size", world_size, least=1)
    if require_whole("rank", rank) >= size:
        raise ConfigError(
            f"rank is {rank!r} and world_size is {size}; ranks are numbered from 0 to {size - 1}"
        )


def check_choices(**choices: str) -> None:
    """Refuse a choice that does not exist, of ``runtime``, ``labels`` and ``arrays``.

    Raises:
        ConfigError: Naming those that do.
    """
    allowed = {
        "runtime": get_args(Runtime),
        "labels": get_args(Labels),
        "arrays": ("auto", "torch", "numpy"),
    }
    for name, choice in choices.items():
        if choice not in allowed[name]:
            raise ConfigError(f"{name} is {choice!r}; choose among {list(allowed[name])}")


def steps_of(steps: object) -> int | None:
    """Return the step to end before; ``None`` for the end of the data.

    Raises:
        ConfigError: It is not a whole number of at least 1.
    """
    if steps is None:
        return None
    if isinstance(steps, bool) or not isinstance(steps, Integral) or int(steps) < 1:
        raise ConfigError(
            f"steps is {steps!r}; give the step to end before as a whole number of at least 1, or None for the "
            "end of the data"
        )
    return int(steps)


def timeout_from(timeout: object) -> float:
    """Return the seconds that ranks wait for each other; of more than any wait bears, as many as they bear.

    Raises:
        ConfigError: It is not a finite number of seconds above 0.
    """
    if (timeout_s := wait_of(timeout)) is None:
        raise ConfigError(
            f"timeout is {timeout!r}; give the seconds that ranks wait for each other, a finite number above 0"
        )
    return timeout_s


def state_from(state: object) -> JsonObject | None:
    """Return the state that a loader is given to continue from.

    Returns:
        A copy of it; ``None`` for none, and for an empty one, which torch's trainers pass.

    Raises:
        StateError: It is not a mapping, or it is another loader's.
    """
    if state is None:
        return None
    if isinstance(state, str | Path):
        raise StateError(
            f"the state is {str(state)!r:.80}, a {type(state).__name__}; read it first, as by json.load, and hand over "
            "what state_dict() returned"
        )
    refuse_others(state)
    if not isinstance(state, Mapping):
        raise StateError(
            f"the state is of type {type(state).__name__}; hand over what state_dict() returned"
        )
    # A copy: with several ranks it is read with the first batch, and the caller may have changed it by then.
    return dict(state) or None


def check_steps_left(state: JsonObject | None, num_steps: int | None) -> None:
    """Warn of a state that stands at the end of the run, as that of a job that has ended does: no batch is left.

    Args:
        state: State to continue from.
        num_steps: The step after the last; ``None`` for the data's end.

    Raises:
        ConfigError: The state stands beyond that step.
    """
    step = None if state is None else state.get("step")
    if num_steps is None or not isinstance(step, int) or step < num_steps:
        return  # a step that is no number is refused with the rest of the state
    said = f"steps is {num_steps}, and the state stands before step {step}: no batch is left"
    if step > num_steps:
        raise ConfigError(
            f"{said}; give a later step, None for the data's end, or an earlier state"
        )
    _LOG.warning("%s; give a later step, or None for the data's end, to go on", said)
