"""The first step that no rank has, as seen from outside: a change of the mix takes effect from there."""

import time
from pathlib import Path

from pydantic import ValidationError

from omniload.actors.status_file import read_status
from omniload.base.errors import StateError
from omniload.base.reading import read_kept_file
from omniload.commands.edits.pulse import UP_S
from omniload.commands.runs.looks import last_steps, taken_steps
from omniload.mix.edits.answers import ANSWER_NAME, EditAnswer
from omniload.mix.journal.bounded import last_told
from omniload.mix.run_record import RunLife, read_run_record

__all__ = ["TOLD", "untaken_from"]

TOLD = ("losses", "rewards")
"""Folders of a run in which ranks report their steps."""
_MOST_BYTES = 64 << 20


def untaken_from(run: Path, planned: int, *, is_up: bool = False) -> int:
    """Return the first step that no rank has, as far as the run's folder shows.

    Plans are ahead of this step, by up to 64 small steps, and are taken back for a change. So the mix at the first
    unplanned step says little about the mix at the step where a change takes effect. The status is up to a second old;
    the ranks' reports of their steps, and the plane's last answer, may be later. Even so, ranks may be some steps
    further.

    Args:
        run: Folder of the run.
        planned: First step that is not planned; a run at rest is changed from there.
        is_up: Whether its plane is known to be up; if not, the age of its status decides, by clocks that may differ.
    """
    life = read_run_record(run).last
    if (taken := _taken_before(run, is_up=is_up)) is None:
        return planned
    told = (last_told(run / folder, life.began_s) for folder in TOLD)
    lasts = (
        taken,
        _open_at_answer(run, life),
        *(-1 if last is None else last + 1 for last in told),
    )
    return min(planned, max(life.from_step, *lasts))


def _taken_before(run: Path, *, is_up: bool) -> int | None:
    """Return the step after the last that a rank has, from the status; ``None`` without a plane or such a report."""
    try:
        status = read_status(run)
    except StateError:
        return None
    is_young = is_up or abs(time.time() - status.written_at) <= UP_S
    if status.has_ended or not is_young:
        return None
    steps = [-1 if step is None else step for step in last_steps(status).values()]
    # The step of a rank that counts by itself is unknown; before ranks are present, none has a step.
    return None if taken_steps(status) and not steps else max(steps, default=-1) + 1


def _open_at_answer(run: Path, life: RunLife) -> int:
    """Return the first step that was open to a change at the last answer; 0 if that was for an earlier start."""
    place = run / ANSWER_NAME
    try:
        if place.stat().st_mtime < life.began_s:
            return 0
        content = read_kept_file(place, most_bytes=_MOST_BYTES, what="an answer")
        taken = EditAnswer.model_validate_json(content).taken
    except (FileNotFoundError, ValidationError):  # no answer yet, or of another release
        return 0
    return 0 if taken is None else taken.planned
