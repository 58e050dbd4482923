"""Changes of the mix of a running job: requested by a file in its folder, and answered by another file.

The process that opened the plane looks for a question ten times a second, as long as the plane is open.
Only questions of the process's own user are accepted. A question that was there before the plane began to
open is not answered, because its sender has been told already that there was no answer.
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
"""Identifies a question."""


def last_question(folder: Path | None) -> Mark | None:
    """Return the mark of the question in a run's folder, if there is one."""
    return None if folder is None else _mark_of(folder / REQUEST_NAME)


def answer_edits(
    folder: Path | None, change: Callable[[EditRequest], EditTaken], answered: Mark | None
) -> Callable[[], None]:
    """Answer questions in a run's folder, in a thread; without a folder do nothing.

    Args:
        folder: Folder of the run.
        change: Makes a change.
        answered: A question from before the plane was claimed, which is not answered.

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
            # Noted even if it could not be answered; otherwise it would be tried ten times a second.
            before = mark

    thread = threading.Thread(target=keep, name="omniload-edits", daemon=True)
    start_thread(thread)

    def end() -> None:
        ended.set()
        thread.join(_CLOSE_S)

    return end


def _mark_of(place: Path) -> Mark | None:
    """Return the mark of a file, which differs from that of any other file of its name; ``None`` without a file."""
    try:
        status = place.stat()
    except OSError:
        return None
    # Each question is a new file that was renamed into place. The inode number distinguishes files of the same clock
    # tick, and the time distinguishes files that reuse an inode number.
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
    """Return a question, or the answer to a question of another release; ``None`` if there is nobody to answer."""
    content = b""
    try:
        # Permission to write into the run's folder, such as a group's, is not permission to change the run.
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
            f"the run's release cannot read this request ({fault_in(error)}), so nothing has changed: send the "
            "request with the release that the run uses"
        )
        return EditAnswer(id=asked, refused=refused, kind="StateError")
