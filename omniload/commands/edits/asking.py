"""Requests for a change of a run's mix: from the plane that is up or, without a plane, in the run's own files."""

import os
import time
import uuid
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError
from pydantic_core import PydanticSerializationError

from omniload.actors.claim import LOCK_NAME
from omniload.base.errors import (
    ConfigError,
    IntegrityError,
    OmniloadError,
    StateError,
    UnavailableError,
    system_refusals,
)
from omniload.base.linux.file_lock import FileLock, locked
from omniload.base.reading import read_kept_file
from omniload.base.settings.paths import why_no_text
from omniload.base.writing import write_whole
from omniload.commands.edits.at_rest import change_at_rest
from omniload.mix.edits.answers import (
    ANSWER_NAME,
    REQUEST_NAME,
    EditAnswer,
    EditRequest,
    EditTaken,
    fault_in,
    id_in,
)
from omniload.mix.edits.edit import (
    AddSource,
    Change,
    SkipSteps,
    require_no_secrets,
    said_of_going_back,
)
from omniload.mix.edits.edits_file import EDITS_NAME
from omniload.mix.run_record import no_run_in

__all__ = ["change_mix"]

_ASKING_NAME = ".edit.lock"
_LOOK_S = 0.05
_MOST_BYTES = 64 << 20
_ERRORS = {e.__name__: e for e in (ConfigError, StateError, UnavailableError, IntegrityError)}


@system_refusals("the run's folder")
def change_mix(
    run: Path, change: Change, at: int | None, timeout_s: float, *, at_rest: bool = True
) -> EditTaken:
    """Have the mix of a run changed.

    Args:
        run: Folder of the run.
        change: The change.
        at: First step that the change is to apply to; ``None`` for the first step that is not planned.
        timeout_s: Longest wait for the plane's answer.
        at_rest: Whether to change a run without a plane, from the end of its planned steps on.

    Raises:
        OmniloadError: The change is refused, and nothing has changed.
        StateError: There is no run.
        UnavailableError: The plane did not answer in time, is up on a host that this one cannot hear, or another
            command is changing the mix; or, without ``at_rest``, no plane is up.
    """
    require_no_secrets(change)  # before the request, because the request is a file too
    if isinstance(change, AddSource):
        _require_utf8(change)
    if not (run / LOCK_NAME).exists():
        raise no_run_in(run, LOCK_NAME)
    try:
        # One command asks at a time, because a plane has one file for requests and one for answers.
        with locked(run / _ASKING_NAME, waits=False):
            try:
                # A plane that is up holds the lock. If it can be taken, no plane is up, and one that opens waits for
                # it.
                held = FileLock(run / LOCK_NAME, shared=True)
            except BlockingIOError as error:
                _require_no_skip(run, change, str(error.strerror))
                return _ask_plane(run, change, at, timeout_s, str(error.strerror))
            try:
                if not at_rest:
                    raise UnavailableError(
                        f"no data plane of {run} is up, by its lock here; start the job again"
                    )
                return change_at_rest(run, change, at)
            finally:
                held.close()
    except BlockingIOError:
        raise UnavailableError(
            f"another command changes the mix of {run} at this moment; ask again when it has ended"
        ) from None


def _require_utf8(change: AddSource) -> None:
    """Refuse a source that JSON cannot represent, whatever paths a mix file may name, because the request is JSON.

    Raises:
        ConfigError: The message names the path.
    """
    try:
        change.model_dump_json()
    except PydanticSerializationError as error:
        remedy = "rename the file or its folder, or name a link to it where all names are UTF-8"
        path = change.source.paths[0]
        raise ConfigError(
            f"source {change.name!r}: a change of a mix is kept as JSON, and {path!r:.200} {why_no_text(path, remedy)}"
        ) from error


def _require_no_skip(run: Path, change: Change, holder: str) -> None:
    if isinstance(change, SkipSteps):
        raise StateError(
            f"the data plane of {run} is open in {holder}: steps are skipped by going back before them; end the run, "
            f"skip them, and {said_of_going_back(change.first)}"
        )


def _ask_plane(
    run: Path, change: Change, at: int | None, timeout_s: float, holder: str
) -> EditTaken:
    """Ask the plane that is up, open in ``holder``, and wait for its answer; raises the errors of ``change_mix``."""
    request = EditRequest(id=uuid.uuid4().hex, change=change, at=at)
    place = run / REQUEST_NAME
    until_s = time.monotonic() + timeout_s
    # The plane's user must be able to read what root asks.
    write_whole(place, request.model_dump_json().encode(), mode=0o600 if os.geteuid() else 0o644)
    try:
        # An answer to an earlier request may still be there; the ids distinguish them.
        while (answer := _answer_in(run / ANSWER_NAME, request.id)) is None:
            if time.monotonic() > until_s:
                raise UnavailableError(
                    f"the data plane of {run}, open in {holder}, did not answer within {timeout_s:g} s; whether the "
                    f"change is taken up, {run / EDITS_NAME} says"
                )
            # By files, because the run's folder is the one thing that the command and the plane surely share.
            time.sleep(_LOOK_S)
    finally:
        # Removed with or without an answer, because a later plane must not carry out an abandoned request.
        with suppress(OSError):
            place.unlink()
    if answer.taken is None:
        # The error is looked up by name, because a plane of another release may have errors that this release lacks.
        raise _ERRORS.get(answer.kind, OmniloadError)(str(answer.refused))
    return answer.taken


def _answer_in(place: Path, asked: str) -> EditAnswer | None:
    """Return the answer to a request, by its id; ``None`` if there is none yet.

    Raises:
        StateError: The answer is in a form that this release does not know.
    """
    try:
        content = read_kept_file(place, most_bytes=_MOST_BYTES, what="an answer")
    except FileNotFoundError:
        return None
    try:
        answer = EditAnswer.model_validate_json(content)
    except ValidationError as error:
        if id_in(content) != asked:
            return None  # of another release, to another command; our answer will replace it
        raise StateError(
            f"{place}: the data plane has answered, in words of another release than this one ({fault_in(error)}): "
            f"whether the change is taken up, {EDITS_NAME} beside it says; ask with the release that the run is of"
        ) from error
    return answer if answer.id == asked else None
