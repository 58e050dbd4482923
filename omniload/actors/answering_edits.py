"""Changes of the mix of a running job: asked for by a file in its folder, answered by another.

The process that opened the plane looks for a question ten times a second, for as long as the plane is
open. Questions are taken from the user that the process belongs to. One that lay there before the plane
began to open is not answered: whoever asked it has been told that there was no answer.
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from omniload.base.concurrency.threads import start_thread
from omniload.base.errors import IntegrityError, project_error
from omniload.base.log import get_logger
from omniload.base.reading import read_kept_file
from omniload.base.writing import write_whole
from omniload.mix.edits.answers import (
    ANSWER_NAME,
    REQUEST_NAME,
    EditAnswer,
    EditRequest,
    EditTaken,
    fault_in,
    id_in,
)

__all__ = ["Mark", "answer_edits", "last_question"]

_LOOK_S = 0.1
_CLOSE_S = 5.0
_MOST_BYTES = 64 << 20
_ROOT = 0
_LOG = get_logger(__name__)

Mark = tuple[int, int]
"""Tells a question from others."""


def last_question(folder: Path | None) -> Mark | None:
    """Return the question that lies in a run's folder, if there is one."""
    return None if folder is None else _mark_of(folder / REQUEST_NAME)


def answer_edits(
    folder: Path | None, change: Callable[[EditRequest], EditTaken], answered: Mark | None
) -> Callable[[], None]:
    """Answer what is asked in a run's folder, in a thread; without a folder do nothing.

    Args:
        folder: Of the run.
        change: Makes a change.
        answered: The question that is not answered any more: that of before the plane was claimed.

    Returns:
        A function that ends it.
    """
    if folder is None:
        return lambda: None
    ended = threading.Event()
    place = folder / REQUEST_NAME

    def keep() -> None:
        before = answered
        while not ended.wait(_LOOK_S):
            mark = _mark_of(place)
            if mark is not None and mark != before:
                try:
                    _answer(folder, change)
                except OSError as error:
                    _LOG.warning("a change of the mix cannot be answered: %s", error)
            # Also where it could not be answered: else it would be tried ten times a second.
            before = mark

    thread = threading.Thread(target=keep, name="omniload-edits", daemon=True)
    start_thread(thread)

    def end() -> None:
        ended.set()
        thread.join(_CLOSE_S)

    return end


def _mark_of(place: Path) -> Mark | None:
    """Return what tells a file from another of its name; nothing where there is none."""
    try:
        status = place.stat()
    except OSError:
        return None
    # Each question is a new file, put in place by its name: its number tells it from one of the same tick of the
    # clock, the time from an earlier one whose number is given out again.
    return status.st_ino, status.st_mtime_ns


def _answer(folder: Path, change: Callable[[EditRequest], EditTaken]) -> None:
    request = _read(folder / REQUEST_NAME)
    if request is None:
        return
    try:
        answer = (
            request
            if isinstance(request, EditAnswer)
            else EditAnswer(id=request.id, taken=change(request))
        )
    except Exception as error:  # noqa: BLE001 -- whoever asked must hear of it, and the run goes on
        failure = project_error(error, "a change of the mix")
        if failure is not error:
            _LOG.error("a change of the mix failed", exc_info=error)
        answer = EditAnswer(id=request.id, refused=str(failure), kind=type(failure).__name__)
    write_whole(folder / ANSWER_NAME, answer.model_dump_json().encode(), mode=0o600)


def _read(place: Path) -> EditRequest | EditAnswer | None:
    """Return a question, or the answer to one of another release; nothing where nobody could be answered."""
    content = b""
    try:
        # Whoever may write into the folder of a run, a group for one, may not change the run by that alone.
        owner = place.stat().st_uid
        if owner not in (os.geteuid(), _ROOT):
            _LOG.warning(
                "%s is ignored: it is of user %d, the plane of %d", place, owner, os.geteuid()
            )
            return None
        content = read_kept_file(place, most_bytes=_MOST_BYTES, what="a change of a mix")
        return EditRequest.model_validate_json(content)
    except FileNotFoundError:
        return None  # withdrawn
    except (ValidationError, IntegrityError) as error:
        _LOG.warning("%s is ignored: %s", place, error)
        if not isinstance(error, ValidationError) or not (asked := id_in(content)):
            return None
        refused = (
            f"it is asked in words that the run's release does not know ({fault_in(error)}), and nothing has changed: "
            "ask with the release that the run is of"
        )
        return EditAnswer(id=asked, refused=refused, kind="StateError")
