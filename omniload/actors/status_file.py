"""The status of a data plane in the folder of its run, written once a second for commands that watch it."""

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
from pydantic import ValidationError

from omniload.actors.heartbeat_board import Board
from omniload.base.concurrency.threads import ending, start_thread
from omniload.base.errors import StateError
from omniload.base.log import get_logger
from omniload.base.reading import read_kept_file
from omniload.base.writing import write_whole
from omniload.machine.progress import Progress
from omniload.machine.status import PlaneStatus, status_of
from omniload.mix.edits.answers import fault_in
from omniload.mix.run_record import no_run_in

__all__ = ["STATUS_NAME", "read_status", "write_status"]

STATUS_NAME = "status.json"
"""File in the run's folder."""
_EVERY_S, _LAST_S = 1.0, 30.0
_MOST_BYTES = 64 << 20
_LOG = get_logger(__name__)


def write_status(folder: Path | None, board: Board, host: str = "") -> Callable[[], None]:
    """Write the status now, and every second in a thread; without a folder do nothing.

    Args:
        folder: Folder of the run.
        board: Heartbeats of all roles.
        host: Name of this host in the heartbeats; by default its own name.

    Returns:
        A function that ends it; the last status stays, and says that it is the last.
    """
    if folder is None:
        return lambda: None
    ended, began_s = threading.Event(), time.monotonic()
    place, here = folder / STATUS_NAME, host or socket.gethostname()
    been_to = 0
    with suppress(StateError):  # the first start has none
        been_to = read_status(folder).reached

    def status(roles: dict[str, Progress], before: dict[str, Progress]) -> PlaneStatus:
        return _status(roles, before, here, began_s).model_copy(update={"been_to": been_to})

    def keep(before: dict[str, Progress]) -> None:
        is_last = False
        while not is_last:
            is_last = ended.wait(_EVERY_S)
            # At the end, some roles have gone already; their last figures stay.
            roles = (before if is_last else {}) | board.read()
            _write(place, status(roles, before), is_last)
            before = roles

    # Written by the opener itself, because for a command that looks now, a run without a status is not running.
    _write(place, status(first := board.read(), {}), is_last=False)
    thread = threading.Thread(target=keep, args=(first,), name="omniload-status", daemon=True)
    start_thread(thread)
    # Only a disk that does not answer takes this long.
    return ending(thread, ended, _LAST_S, f"the last status in {place}")


def read_status(folder: Path) -> PlaneStatus:
    """Return the last status of a run.

    Raises:
        StateError: There is no status, or it is damaged, or of another release.
    """
    place = folder / STATUS_NAME
    try:
        return PlaneStatus.model_validate_json(
            read_kept_file(place, most_bytes=_MOST_BYTES, what="a status")
        )
    except (FileNotFoundError, NotADirectoryError):
        raise no_run_in(folder, STATUS_NAME) from None
    except ValidationError as error:
        said = (
            f"is not of this release ({fault_in(error)}); watch with the release that the run uses"
        )
        if error.errors()[0]["type"] == "json_invalid":
            said = f"is damaged ({fault_in(error)}); a running plane writes it every second: look again"
        raise StateError(f"{place} {said}") from error


def _status(
    roles: dict[str, Progress], before: dict[str, Progress], here: str, began_s: float
) -> PlaneStatus:
    now_s = time.monotonic()
    lines = [
        role.model_copy(update={"memory_bytes": _memory_of(role.pid)})
        if role.host == here
        else role
        for role in status_of(roles, before, now_s)
    ]
    # The only use of wall time: a reader of the file may be on another host, or come after a restart.
    return PlaneStatus(
        written_at=time.time(),
        up_s=now_s - began_s,
        host=here,
        pid=os.getpid(),
        roles=tuple(lines),
    )


def _memory_of(pid: int) -> int | None:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return None


def _write(place: Path, status: PlaneStatus, is_last: bool) -> None:
    try:
        said = status.model_copy(update={"has_ended": is_last})
        write_whole(place, said.model_dump_json().encode())
    except OSError as error:
        _LOG.debug("the status of the run is not written: %s", error)
