"""A daemon as a fork of this process, which has everything loaded already.

Starting another Python costs a command half a second of processor time for nothing but the
modules that it has itself. A fork is right only where no other thread runs: a lock that
one holds would stay held in the child for ever.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from fusefs.bridge.process.launch import clear_dead_mount, failure_of, serve_reporting
from omniload.base.errors import StateError
from omniload.base.log import get_logger, set_up_logging
from omniload.base.writing import open_log

__all__ = ["DEFECT_CODE", "ForkedProcess", "check_alone", "fork", "start_forked"]

_log = get_logger(__name__)

_READY = b"ready"
DEFECT_CODE = 70
"""Exit code of a daemon that ended by a defect; its traceback is in the log."""
_DEFAULT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ForkedProcess:
    """A child process; ``wait`` and ``terminate`` as ``subprocess.Popen`` has them."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self) -> int:
        """Return its exit code when it has ended; below zero the signal that ended it."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def terminate(self) -> None:
        """Ask it to end, unless it has."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGTERM)


def check_alone() -> None:
    """Check that this process may be forked: no other thread of Python's runs.

    Raises:
        StateError: One does.
    """
    if (threads := threading.active_count()) > 1:
        raise StateError(
            f"a process of {threads} threads cannot be forked into a mount or a command; start "
            "'omniload image run' as a process of its own"
        )


def start_forked(
    serve: Callable[[Callable[[], None]], None], mountpoint: str, *, log_path: str, role: str
) -> ForkedProcess:
    """Fork, let the child serve, and return when its mount is usable.

    ``serve`` calls its argument once the mount is usable. A dead mount in its place is taken away
    first. What the child would write to a terminal goes to its log.

    Raises:
        ConfigError: The mount point is no directory, the log cannot be written, or what the
            child reports.
        UnavailableError: As the child reports.
        StateError: As the child reports, or it ended without a word.
    """
    clear_dead_mount(mountpoint)
    log = open_log(log_path)
    ready, status = os.pipe()

    def child() -> int:
        os.close(ready)
        return _be_daemon(serve, status, log, role)

    daemon = fork(child)
    os.close(status)
    os.close(log)
    with os.fdopen(ready, "rb") as pipe:
        answer = pipe.read()
    if answer != _READY:
        code = daemon.wait()
        raise failure_of(answer, code, log_path)
    return daemon


def fork(child: Callable[[], int]) -> ForkedProcess:
    """Fork; the child carries out ``child`` and ends with the code it returns, doing nothing else.

    It does not run what this process would at its end: exit handlers, ``finally`` of callers.
    """
    for stream in filter(None, (sys.stdout, sys.stderr)):  # a process may be started without
        stream.flush()  # or the child would write it again
    pid = os.fork()
    if pid:
        return ForkedProcess(pid)
    code = DEFECT_CODE
    try:
        code = child()
    except BaseException:  # noqa: BLE001 -- the child must never go on as its parent
        _log.exception("defect in a forked process")
    finally:
        try:
            for stream in filter(None, (sys.stdout, sys.stderr)):
                with suppress(
                    OSError, ValueError
                ):  # a full disk, a pipe that nobody reads any more
                    stream.flush()
        finally:
            os._exit(code)  # whatever comes up, such as the error of a signal


def _be_daemon(
    serve: Callable[[Callable[[], None]], None], status: int, log: int, role: str
) -> int:
    os.setsid()
    for number in _DEFAULT:
        signal.signal(number, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    # Whoever forked may have put something of its own in their place.
    sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1, closefd=False) for n in (1, 2))
    set_up_logging("INFO", role=role)
    return serve_reporting(serve, status, role=role)
