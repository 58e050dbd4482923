"""Arguments of ``open``, ``serve``, ``join`` and a loader, checked before anything is opened."""

import math
from collections.abc import Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import NoReturn, get_args

from omniload.base.clock import wait_of
from omniload.base.errors import ConfigError, StateError
from omniload.base.log import get_logger
from omniload.base.state import JsonObject
from omniload.batch.absent import is_absent
from omniload.batch.microbatch import Batch, rows_of
from omniload.front.batches.rows import Labels
from omniload.front.launch import group_of_torch
from omniload.front.spec import Runtime
from omniload.mix.other_states import refuse_others
from omniload.mix.runtime import RuntimeConfig

__all__ = [
    "check_choices",
    "check_first",
    "check_steps_left",
    "refuse_images_by_mesh",
    "require_finite",
    "require_rank",
    "require_whole",
    "state_from",
    "steps_of",
    "timeout_from",
    "warn_of_empty_loop",
    "warn_of_no_batch",
    "warn_of_no_label",
    "warn_of_own_environment",
    "warn_of_rank_behind",
]

_LOG = get_logger(__name__)
_said_of_environment: set[str] = set()
"""Warnings that this process has given, because an evaluation is opened again every few hundred steps."""


def require_whole(name: str, value: object, *, least: int = 0) -> int:
    """Return an argument that is a whole number.

    Raises:
        ConfigError: The argument is not a whole number, or is less than ``least``.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise ConfigError(f"{name} is {value!r}; give a whole number of at least {least}")
    return int(value)


def require_finite(name: str, value: object, *, least: float = -math.inf) -> float:
    """Return an argument that is a finite number.

    Raises:
        ConfigError: The argument is not a finite number, or is less than ``least``.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ConfigError(f"{name} is {value!r}; give a number")
    if not math.isfinite(value) or value < least:
        raise ConfigError(
            f"{name} is {value!r}; give a finite number"
            + f" of at least {least:g}" * (least > -math.inf)
        )
    return float(value)


def require_rank(rank: object, world_size: object, step: object, generation: object) -> None:
    """Refuse an impossible rank, world size, first step or generation.

    Raises:
        ConfigError: A value is not a whole number, or the rank is outside the ranks.
    """
    size = require_whole("world_size", world_size, least=1)
    if require_whole("rank", rank) >= size:
        raise ConfigError(
            f"rank is {rank!r} and world_size is {size}; ranks are numbered from 0 to {size - 1}"
        )
    if step is not None:
        require_whole("step", step)
    if generation is not None:
        require_whole("generation", generation, least=1)


def check_choices(**choices: str) -> None:
    """Refuse an unknown value of ``runtime``, ``labels`` or ``arrays``.

    Raises:
        ConfigError: The value is unknown; the message names the known values.
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
    """Return the step to stop before; ``None`` for the end of the data.

    Raises:
        ConfigError: The argument is not a whole number of at least 1.
    """
    if steps is None:
        return None
    if isinstance(steps, bool) or not isinstance(steps, Integral) or int(steps) < 1:
        raise ConfigError(
            f"steps is {steps!r}; give the number of steps that the run has from its beginning, at least 1, or None "
            "to go on to the end of the data"
        )
    return int(steps)


def timeout_from(timeout: object) -> float:
    """Return the seconds that ranks wait for each other, capped at the longest wait that the system supports.

    Raises:
        ConfigError: The argument is not a finite number of seconds above 0.
    """
    if (timeout_s := wait_of(timeout)) is None:
        raise ConfigError(
            f"timeout is {timeout!r}; give the seconds that ranks wait for each other, a finite number above 0"
        )
    return timeout_s


def state_from(state: object) -> JsonObject | None:
    """Return the state that a loader is given to continue from.

    Returns:
        A copy of the state; ``None`` for no state and for an empty one, which torch's trainers pass.

    Raises:
        StateError: The state is not a mapping, or it is the state of another loader.
    """
    if state is None:
        return None
    if isinstance(state, str | Path):
        raise StateError(
            f"the state is {str(state)!r:.80}, a {type(state).__name__}; read it first, as by json.load, and pass "
            "the result of state_dict()"
        )
    refuse_others(state)
    if not isinstance(state, Mapping):
        raise StateError(
            f"the state is of type {type(state).__name__}; pass the result of state_dict()"
        )
    # A copy, because with several ranks the state is read at the first batch, and the caller may change it before.
    return dict(state) or None


def check_steps_left(state: JsonObject | None, num_steps: int | None) -> None:
    """Warn if a state stands at the end of the run, like that of a finished job, so that no batch is left.

    Args:
        state: State to continue from.
        num_steps: The step after the last; ``None`` for the end of the data.

    Raises:
        ConfigError: The state stands beyond that step.
    """
    step = None if state is None else state.get("step")
    if num_steps is None or not isinstance(step, int) or step < num_steps:
        return  # a step that is no number is refused later, together with the rest of the state
    said = f"steps is {num_steps}, and the state stands before step {step}: no batch is left"
    if step > num_steps:
        raise ConfigError(
            f"{said}; give a later step, None for the data's end, or an earlier state"
        )
    _LOG.warning("%s; give a later step, or None for the data's end, to go on", said)


def check_first(first: Batch, vocab_size: int | None, *, assumed_alone: bool) -> None:
    """Warn if the first batch has token ids that a model of ``vocab_size`` embeddings does not know.

    Raises:
        ConfigError: This rank was taken for the only one, and a process group of several was created after the loader.
    """
    if assumed_alone:
        _refuse_many_ranks()
    tokens = [rows_of(part, "tokens") for part in first.microbatches]
    # A later stage of a pipeline may have no tokens; the first stage has them.
    largest = max((int(rows.max(initial=0)) for rows in tokens if not is_absent(rows)), default=0)
    if vocab_size is not None and largest >= vocab_size:
        _LOG.warning(
            "the first batch has token id %d, but loader.vocab_size is %d, the size of the mix's tokenizer: another "
            "tokenizer made the ids. A model with that many embeddings fails at such ids: set its size by hand, or "
            "name the other tokenizer (omniload mix check shows which one made them)",
            largest,
            vocab_size,
        )


def _refuse_many_ranks() -> None:
    group = group_of_torch()
    if group is not None and group[1] > 1:
        raise ConfigError(
            f"the mix was opened before torch's process group of {group[1]} ranks, so every rank would train on the "
            "same samples: open it after init_process_group (Lightning: in train_dataloader), or start by torchrun; "
            "for a separate loader on each rank, give rank=0 and world_size=1"
        )


def warn_of_rank_behind(rank: int) -> None:
    """Warn that the plane ends before a rank has closed its loader."""
    _LOG.warning(
        "rank 0 has closed its loader, and rank %d has not in the ten seconds since: the data plane ends, and that "
        "rank gets no batch and no state any more. Have ranks wait for one another before they close their loaders, as "
        "by torch.distributed.barrier()",
        rank,
    )


def warn_of_no_batch() -> None:
    """Warn that a mix has no batch at all."""
    _LOG.warning(
        "the data ended before the first batch, because no document is left; for a split, hold out a larger share "
        "(omniload mix check shows how many documents it has)"
    )


def warn_of_no_label(step: int, source: str) -> None:
    """Warn that a reported mean covers no label."""
    _LOG.warning(
        "step %d: a mean of %s was reported, but these rows have no label of it, so it is not kept; for a mean over "
        "the whole step, give labels=, the number of its labels",
        *(step, source),
    )


def warn_of_empty_loop() -> None:
    """Warn of a loop that starts after the last batch was handed out."""
    _LOG.warning(
        "this loop got no batch, because the loop before it got the last one. A mix has no epochs to loop over: "
        "count the steps of all loops with steps=, or give epochs under mix.amounts; open a split anew for each "
        "evaluation"
    )


def warn_of_own_environment(runtime: RuntimeConfig, environment: Mapping[str, str]) -> None:
    """Warn once of settings for roles in a Ray that have no effect on a plane in threads of this process.

    Args:
        runtime: Settings of the mix that is opened in this way, next to another loader.
        environment: Environment variables of this process.
    """
    others = sorted(
        name for name, value in runtime.env.set.items() if environment.get(name) != value
    )
    said = []
    if others:
        said.append(
            f"of runtime.env.set it has not {others}, or with another value: set them where rank 0 is started"
        )
    if runtime.place.loaders is not None:
        said.append(
            "runtime.place.loaders does not hold: its sources must be on the host of rank 0 under the same paths"
        )
    if said and (told := "; ".join(said)) not in _said_of_environment:
        _said_of_environment.add(told)
        _LOG.warning(
            "a loader beside another one over several ranks reads in the process of rank 0; %s",
            told,
        )


def refuse_images_by_mesh() -> NoReturn:
    """Refuse a change of ranks if images are dealt to the ranks of a mesh."""
    raise ConfigError(
        "images are dealt to ranks by their numbers on the mesh, which is not numbered along dp and cp, and "
        "other ranks would have no numbers; number the mesh as init_device_mesh does, dp before cp"
    )
