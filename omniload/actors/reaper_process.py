"""A process that outlives whoever opened a data plane by a moment, to end what was left behind.

Ray's own processes notice the SIGKILL of their opener only after most of a minute. The
reaper waits for the end of the opener; then it kills every process that carries the mark of
the plane in its environment, and removes the plane's folders. Ray's agents write their titles over
their environment, as long as there is room in it: they are known by their parent, or by the plane's
folder, where they have their logs open.

This module is the reaper's program, run by its path: it needs psutil alone.
"""

import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil

__all__ = ["LEAVE", "MARKS", "PATIENCE_S", "clean_up", "end_all", "marks_of"]

MARKS = "OMNILOAD_MARKS"
"""Environment variable that processes inherit: the marks of all they were started under, outermost first."""
LEAVE = b"leave\n"
"""What an opener that closes the plane writes to the reaper."""
PATIENCE_S = 30.0
"""How long killed processes may take to end."""
_ROUND_S = 0.05
_TITLE = "ray::"
"""What the titles of Ray's processes begin with."""


def marks_of(process: psutil.Process) -> list[str]:
    """Return the marks that a process carries; none for one that cannot be looked at."""
    with suppress(psutil.Error):
        return process.environ().get(MARKS, "").split(":")
    return []


def end_all(mark: str, folders: Sequence[Path] = ()) -> list[int]:
    """Kill every process that carries a mark, but the caller, and those of Ray that carry it no longer.

    Args:
        mark: The mark.
        folders: Of the plane: a process of Ray with an open file below one is the plane's.

    Returns:
        Process ids of those that were found, and may take a moment to end.
    """
    others = _others()
    marked = {process.pid for process in others if mark in marks_of(process)}
    ended = []
    for process in others:
        if process.pid in marked or _lost_its_mark(process, marked, folders):
            with suppress(psutil.Error):
                process.kill()
                ended.append(process.pid)
    return ended


def _others() -> list[psutil.Process]:
    """Return all processes but this one."""
    found = []
    # Not by ``process_iter``: it keeps those of an earlier look, and who has such a number by now takes no signal.
    for pid in psutil.pids():
        with suppress(psutil.Error):  # it has ended meanwhile
            found.append(psutil.Process(pid))
    return [process for process in found if process.pid != os.getpid()]


def _lost_its_mark(process: psutil.Process, marked: set[int], folders: Sequence[Path]) -> bool:
    """Tell whether a process is one of Ray, started by a marked one, whose title stands where its mark did."""
    with suppress(psutil.Error, OSError):
        # One that is dead and not waited for has no file open, is a marked one's child for ever, and cannot be ended.
        if not process.name().startswith(_TITLE) or process.status() == psutil.STATUS_ZOMBIE:
            return False
        return process.ppid() in marked or any(
            Path(file.path).is_relative_to(folder)
            for file in process.open_files()
            for folder in folders
        )
    return False


def clean_up(
    end: Callable[[], list[int]],
    folders: Sequence[Path] = (),
    *,
    clock: Callable[[], float] = time.monotonic,
    wait: Callable[[float], object] = time.sleep,
) -> list[int]:
    """End what is left, and remove the folders it used.

    Args:
        end: Kills what it finds, and returns the process ids; as ``end_all``.
        folders: Removed afterwards.
        clock: Seconds.
        wait: Waits that many seconds.

    Returns:
        Processes that would not end in time, such as those stuck in a disk's driver.
    """
    until_s = clock() + PATIENCE_S
    # A process that was being started may appear only now: look until none is found.
    while left := end():
        if clock() >= until_s:
            break
        wait(_ROUND_S)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    return left


def _wait_for_end(opener: int) -> None:
    """Wait until the opener ends or says so; its pipe alone may be held by what it forked."""
    waiting = select.poll()
    waiting.register(sys.stdin, select.POLLIN)
    with suppress(OSError):  # it has ended, or the kernel is older than 5.3
        waiting.register(os.pidfd_open(opener), select.POLLIN)
    # Else it had ended before its descriptor was opened, which may be another process's by then.
    if os.getppid() == opener:
        waiting.poll()


def _main(mark: str, opener: str, *folders: str) -> None:
    # Whoever ends a job, or a container, signals all of its processes: this one goes last.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _wait_for_end(int(opener))
    owned = [Path(folder) for folder in folders]
    # Without a mark nothing is ended: in a Ray of others a rank is a worker of it, with files open in the folder.
    end: Callable[[], list[int]] = partial(end_all, mark, owned) if mark else list
    if left := clean_up(end, owned):
        sys.stderr.write(
            f"processes {left} of a data plane were killed and have not ended after {PATIENCE_S:.0f} s; "
            "they wait for the kernel, look at the disk or the mount they use\n"
        )


if __name__ == "__main__":
    _main(*sys.argv[1:])
