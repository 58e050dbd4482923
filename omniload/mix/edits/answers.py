"""What is asked of a running job about its mix, and what it answers: two small files in the run's folder."""

import json
import re
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError

from omniload.base.config import StrictModel
from omniload.mix.config import LARGEST_STEP
from omniload.mix.edits.amounts import differing
from omniload.mix.edits.edit import Change, Edit, SetWeights, never_held, said_of
from omniload.mix.edits.history import History
from omniload.mix.edits.stages import taken_back

__all__ = [
    "ANSWER_NAME",
    "REQUEST_NAME",
    "EditAnswer",
    "EditRequest",
    "EditTaken",
    "RequestId",
    "fault_in",
    "id_in",
]

REQUEST_NAME = "edit-request.json"
"""File of the question, written by the command line."""
ANSWER_NAME = "edit-answer.json"
"""File of the answer, written by the process that opened the plane."""

_ID = "^[0-9a-f]{32}$"
RequestId = Annotated[str, Field(pattern=_ID)]


def id_in(content: bytes) -> str:
    """Return the id of a question or an answer of whatever release, which every one of them has; empty without one."""
    try:
        found = json.loads(content).get("id")
    except (ValueError, AttributeError, RecursionError):
        return ""
    return found if isinstance(found, str) and re.fullmatch(_ID, found) else ""


def fault_in(error: ValidationError) -> str:
    """Say where words of another release differ from ours first."""
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}"


class EditRequest(StrictModel):
    """A change that is asked for."""

    version: Literal[1] = 1
    id: RequestId
    """The answer has the same."""
    change: Change
    at: Annotated[int, Field(ge=0, le=LARGEST_STEP)] | None = None
    """First step that it is to hold at; ``None`` for the first that no rank was given."""


class EditTaken(StrictModel):
    """A change that was taken up."""

    edit: Edit
    planned: int
    """First step that was not planned then, or whose plan was taken back; the edit holds no earlier."""
    slowest: int
    """Step that the slowest rank wanted next, as far as ranks had told: of small steps they tell once in many."""
    before: dict[str, float]
    """Shares at the edit's step without it."""
    after: dict[str, float]
    """Shares from its step on."""
    amounts: dict[str, tuple[str | None, str | None]] = Field(
        default_factory=dict, exclude_if=lambda value: not value
    )
    """Of a run that draws amounts, in place of shares: those that differ without it and with it."""
    until: int | None = None
    """Of weights that are set: step of the next stage, which holds from there on as it was declared."""
    until_epochs: dict[str, float] | None = Field(
        default=None, exclude_if=lambda value: value is None
    )
    """Of weights that are set: what the next stage waits for, where nobody knows its step."""
    taken_back: tuple[int, ...] = Field(default=(), exclude_if=lambda value: not value)
    """Edits of weights that no longer hold: they were made behind the beginning of a stage that waits for epochs, which
    is found anew."""

    unsure: str = Field(default="", exclude_if=lambda value: not value)
    """What has to be for the run to come to the edit's step, where nobody knows whether it does."""

    @classmethod
    def of(
        cls,
        before: History,
        after: History,
        planned: int,
        slowest: int,
        *,
        at_rest: bool = False,
    ) -> Self:
        """Return what an edit has changed.

        Args:
            before: The history without it.
            after: The history with it.
            planned: First step that was not planned.
            slowest: Step that the slowest rank wants next.
            at_rest: Whether no plane of the run is up.
        """
        # Behind it a stage that waited for epochs may have begun already.
        edit = after.edits[len(before.edits)]
        after = History(after.base, after.edits[: edit.revision])
        unsure = _unsure(after, edit, planned, at_rest=at_rest)
        if (drawn := after.latest.mix.amounts) is not None:
            # Of a run that draws amounts a skip, or its undoing, changes none; it has no shares.
            found = differing(before.latest.mix.amounts or {}, edit.amounts or drawn)
            return cls(
                edit=edit,
                planned=planned,
                slowest=slowest,
                before={},
                after={},
                amounts=found,
                unsure=unsure,
            )
        # Weights that are set end where a later stage begins; other changes go on through all of them.
        holds = edit.stages[1:] if isinstance(edit.change, SetWeights) else ()
        return cls(
            edit=edit,
            planned=planned,
            slowest=slowest,
            before=before.shares_at(edit.step),
            after=after.shares_at(edit.step),
            taken_back=taken_back(before, edit.step, edit.undoes),
            until=next((stage.from_step for stage in holds[:1] if not stage.waits), None),
            until_epochs=next((stage.from_epochs for stage in holds[:1] if stage.waits), None),
            unsure=unsure,
        )

    @property
    def said(self) -> str:
        """The edit in a line, for logs."""
        return (
            f"edit {self.edit.revision} ({said_of(self.edit.change)}) holds from step {self.edit.step} on; "
            f"steps before {self.planned} were planned already and keep the mix they have"
            + (f"; {self.unsure}" if self.unsure else "")
        )


def _unsure(after: History, edit: Edit, planned: int, *, at_rest: bool) -> str:
    if edit.step < planned:
        return ""  # steps that are skipped, or planned anew: those there are
    if at_rest and edit.undoes in never_held(after.edits):
        skip = after.edits[edit.undoes - 1]
        waiting = [stage.from_epochs for stage in after.latest.mix.stages if stage.waits]
        had_begun = after.of_revision(skip.revision - 1).mix.stages
        begun = [s.from_step for s in had_begun if s.from_epochs in waiting and not s.waits]
        # A skip takes back what had begun by epochs behind its step, and only a planner finds it anew.
        upto = f", up to step {min(begun):,}, where a stage by epochs had begun" if begun else ""
        return (
            f"the skip held at no step: the run goes on from any state that it had before{upto}; one saved since, "
            f"behind step {skip.step:,}, holds other samples and is refused"
        )
    stop = after.base.mix.stop
    if at_rest:
        said = f"no data plane is up: it holds once the run goes on to step {edit.step:,}"
        if edit.step == planned:
            return said
        # How many steps its next start has, no folder knows: one beyond them is a slip, or meant for a longer run.
        data = "" if stop == "never" else f", or its data (stop is {stop}),"
        known = f"its last step so far is {planned - 1:,}" if planned else "it has no step so far"
        return f"{said}; {known}: should the steps that it is given{data} end it before, the edit never holds"
    if stop == "never" or edit.step == planned:
        return ""
    return (
        f"the run ends with its data (stop is {stop}), at a step that nobody knows yet: should that be before step "
        f"{edit.step:,}, the edit never holds"
    )


class EditAnswer(StrictModel):
    """What became of a change that was asked for."""

    version: Literal[1] = 1
    id: RequestId
    taken: EditTaken | None = None
    refused: str | None = None
    """Why nothing was changed."""
    kind: str = ""
    """Class of the error of a refusal."""
