"""Which checkpoint an attempt starts from: the newest that is whole, or the one that was asked for. Free of torch.

What lies beyond it, damaged or of work that is given up, is set aside before the ranks
start: renamed, never deleted, so that it is neither resumed from nor in the way of a save.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from omniload.base.errors import IntegrityError, StateError
from omniload.base.state import JsonObject
from trainer_integration.checkpoint.place import CheckpointPlace

__all__ = ["Choice", "Resume", "choose", "require_step", "step_name"]

Resume = Literal["never", "latest"] | int
"""From nothing, from the newest whole checkpoint, or from that of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Where to start from."""

    step: int | None
    """Checkpoint to load; ``None`` starts from nothing."""
    state: JsonObject | None
    """The data plane's state at ``step``."""
    beyond: Mapping[int, str]
    """Later checkpoints, to be set aside, and why, rising."""


def choose(place: CheckpointPlace, resume: Resume, damaged: Mapping[int, str]) -> Choice:
    """Choose a checkpoint by what can be seen without reading tensors.

    Seal, state of the data plane, names and sizes are checked here; the ranks check every byte
    as they load, and tell of what they find.

    Args:
        place: The checkpoints.
        resume: ``latest``, or a step; ``never`` is ``latest`` of a place without any.
        damaged: Steps that ranks could not load, and why.

    Raises:
        IntegrityError: The one asked for is not what was saved, or none of them is.
        StateError: The one asked for is not there, or another release wrote it.
        UnavailableError: The store does not answer.
    """
    steps = place.steps()
    if isinstance(resume, int):
        return _pinned(place, resume, steps)
    found = dict(damaged)
    for step in reversed(steps):
        if step in damaged:
            continue
        try:
            state = place.loader_state_of(step)
        except IntegrityError as error:
            # Not raised: an earlier one may be whole, and what ails this one is told as it is set aside.
            found[step] = str(error)
            continue
        # All that are later were found damaged on the way here.
        return Choice(step=step, state=state, beyond={s: found[s] for s in steps if s > step})
    if steps:
        faults = "; ".join(f"{step_name(step)}: {found[step]}" for step in steps)
        raise IntegrityError(
            f"{place.location} holds no whole checkpoint, and a run is not begun anew over them: {faults}. "
            "Restore one of them, or give another run_dir"
        )
    return Choice(step=None, state=None, beyond={})


def _pinned(place: CheckpointPlace, step: int, steps: tuple[int, ...]) -> Choice:
    require_step(place, step, steps)
    try:
        state = place.loader_state_of(step)
    except IntegrityError as error:
        others = [other for other in steps if other != step]
        raise IntegrityError(
            f"{step_name(step)} was asked for and is damaged: {error}; there are {others}: pass --resume "
            "with one of them, or --resume latest for the newest whole one"
        ) from error
    given_up = f"resumed from {step_name(step)}, as was asked"
    return Choice(step=step, state=state, beyond={s: given_up for s in steps if s > step})


def require_step(place: CheckpointPlace, step: int, steps: tuple[int, ...]) -> None:
    """Refuse a step of which there is no checkpoint.

    Raises:
        StateError: Naming those that there are.
    """
    if step not in steps:
        held = f"it has {list(steps)}" if steps else "it has none"
        raise StateError(f"{place.location} has no checkpoint of step {step}; {held}")


def step_name(step: int) -> str:
    """Return the name of the checkpoint of a step."""
    return f"step-{step:08d}"
