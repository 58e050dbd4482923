"""Requests to a running job about its mix, and their answers: two small files in the run's folder."""

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
"""Name of the file of the request, which the command line writes."""
ANSWER_NAME = "edit-answer.json"
"""Name of the file of the answer, which the process that opened the plane writes."""

_ID = "^[0-9a-f]{32}$"
RequestId = Annotated[str, Field(pattern=_ID)]


def id_in(content: bytes) -> str:
    """Return the id that a request or an answer has in every release; empty if it has none."""
    try:
        found = json.loads(content).get("id")
    except (ValueError, AttributeError, RecursionError):
        return ""
    return found if isinstance(found, str) and re.fullmatch(_ID, found) else ""


def fault_in(error: ValidationError) -> str:
    """Return the first place where content from another release differs from this release's format."""
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}"


class EditRequest(StrictModel):
    """A request for a change."""

    version: Literal[1] = 1
    id: RequestId
    """Id of the request, repeated in the answer."""
    change: Change
    at: Annotated[int, Field(ge=0, le=LARGEST_STEP)] | None = None
    """First step that the change is to apply to; ``None`` for the first step that no rank has received."""


class EditTaken(StrictModel):
    """A change that was accepted."""

    edit: Edit
    planned: int
    """First step that was not planned then, or whose plan was withdrawn; the edit does not apply to earlier steps."""
    slowest: int
    """Next step of the slowest rank, as last reported: if steps are small, ranks report only once in many steps."""
    before: dict[str, float]
    """Shares at the edit's step without the edit."""
    after: dict[str, float]
    """Shares from that step on, with the edit."""
    amounts: dict[str, tuple[str | None, str | None]] = Field(
        default_factory=dict, exclude_if=lambda value: not value
    )
    """Amounts that differ without and with the edit, instead of shares, for a run that draws amounts."""
    until: int | None = None
    """Step of the next stage, which ends weights that were set and applies as it was declared."""
    until_epochs: dict[str, float] | None = Field(
        default=None, exclude_if=lambda value: value is None
    )
    """Epochs that the next stage waits for if its step is not known yet, for weights that were set."""
    taken_back: tuple[int, ...] = Field(default=(), exclude_if=lambda value: not value)
    """Edits of weights that no longer apply, because they were made after the beginning of a stage that waits for
    epochs, and this beginning is determined anew."""

    unsure: str = Field(default="", exclude_if=lambda value: not value)
    """Condition for the run to reach the edit's step, if this is not certain."""

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
        """Return the effect of an edit.

        Args:
            before: The history without the edit.
            after: The history with the edit.
            planned: First unplanned step.
            slowest: Next step of the slowest rank.
            at_rest: Whether no plane of the run is up.
        """
        # A stage that waited for epochs may have begun after the edit.
        edit = after.edits[len(before.edits)]
        after = History(after.base, after.edits[: edit.revision])
        unsure = _unsure(after, edit, planned, at_rest=at_rest)
        if (drawn := after.latest.mix.amounts) is not None:
            # In a run with amounts, a skip or its undo changes none of them, and there are no shares.
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
        # Weights that were set end where a later stage begins; other changes apply to all later stages too.
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
        """The edit as one line for logs."""
        return (
            f"edit {self.edit.revision} ({said_of(self.edit.change)}) holds from step {self.edit.step} on; "
            f"steps before {self.planned} were planned already and keep the mix they have"
            + (f"; {self.unsure}" if self.unsure else "")
        )


def _unsure(after: History, edit: Edit, planned: int, *, at_rest: bool) -> str:
    if edit.step < planned:
        return ""  # skipped steps, or steps planned anew, do exist
    if at_rest and edit.undoes in never_held(after.edits):
        skip = after.edits[edit.undoes - 1]
        waiting = [stage.from_epochs for stage in after.latest.mix.stages if stage.waits]
        had_begun = after.of_revision(skip.revision - 1).mix.stages
        begun = [s.from_step for s in had_begun if s.from_epochs in waiting and not s.waits]
        # A skip takes back stages that began by epochs after its step, and only a planner determines their beginning
        # anew.
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
        # The folder does not know the number of steps of the next start: a step beyond it is a typo, or for a longer
        # run.
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
    """The outcome of a requested change."""

    version: Literal[1] = 1
    id: RequestId
    taken: EditTaken | None = None
    refused: str | None = None
    """Reason for which nothing was changed."""
    kind: str = ""
    """Class of the error of a refusal."""
