"""Chooses the checkpoint of an attempt: the newest that is whole, or the requested one. Free of torch.

Later checkpoints, which are damaged or belong to abandoned work, are set aside before the ranks start. They are renamed
and never deleted, so that no run resumes from them and no save meets them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from omniload.base.errors import IntegrityError, StateError
from omniload.base.state import JsonObject
from trainer_integration.checkpoint.place import CheckpointPlace

__all__ = ["Choice", "Resume", "choose", "require_step", "step_name"]

Resume = Literal["never", "latest"] | int
"""Start from nothing, from the newest whole checkpoint, or from that of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Where to start from."""

    step: int | None
    """Checkpoint to load; ``None`` starts from nothing."""
    state: JsonObject | None
    """The data plane's state at ``step``."""
    beyond: Mapping[int, str]
    """Later checkpoints that will be set aside, and why, rising."""


def choose(place: CheckpointPlace, resume: Resume, damaged: Mapping[int, str]) -> Choice:
    """Choose a checkpoint by what can be checked without reading tensors.

    Seal, state of the data plane, names and sizes are checked here. The ranks check every byte as they load, and report
    what they find.

    Args:
        place: The checkpoints.
        resume: ``latest``, or a step; ``never`` is like ``latest`` in a place without checkpoints.
        damaged: Steps that ranks could not load, and why.

    Raises:
        IntegrityError: The requested checkpoint is not what was saved, or none of them is.
        StateError: The requested checkpoint does not exist, or another release wrote it.
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
            # Not raised, because an earlier checkpoint may be whole; the fault is reported when this one is set aside.
            found[step] = str(error)
            continue
        # All later ones were found damaged before.
        return Choice(step=step, state=state, beyond={s: found[s] for s in steps if s > step})
    if steps:
        faults = "; ".join(f"{step_name(step)}: {found[step]}" for step in steps)
        raise IntegrityError(
            f"{place.location} holds no whole checkpoint, and a run does not begin from the first step over damaged "
            f"ones: {faults}. Restore one of them, or give another run_dir"
        )
    return Choice(step=None, state=None, beyond={})


def _pinned(place: CheckpointPlace, step: int, steps: tuple[int, ...]) -> Choice:
    require_step(place, step, steps)
    try:
        state = place.loader_state_of(step)
    except IntegrityError as error:
        others = [other for other in steps if other != step]
        raise IntegrityError(
            f"{step_name(step)} was asked for and is damaged: {error}; there are others, of steps {others}: pass "
            "--resume with one of them, or --resume latest for the newest whole one"
        ) from error
    given_up = f"resumed from {step_name(step)}, as was asked"
    return Choice(step=step, state=state, beyond={s: given_up for s in steps if s > step})


def require_step(place: CheckpointPlace, step: int, steps: tuple[int, ...]) -> None:
    """Refuse a step without a checkpoint.

    Raises:
        StateError: The message names the existing steps.
    """
    if step not in steps:
        held = f"it has {list(steps)}" if steps else "it has none"
        raise StateError(f"{place.location} has no checkpoint of step {step}; {held}")


def step_name(step: int) -> str:
    """Return the name of the checkpoint of a step."""
    return f"step-{step:08d}"
