"""The reaper: a process that outlives the opener of a data plane by a moment, to end what was left behind.

Ray's own processes notice the SIGKILL of their opener only after most of a minute. The reaper
waits for the end of the opener; then it kills every process that carries the mark of the plane in
its environment, and removes the plane's folders. Ray's agents overwrite their environment with
their titles; they are recognised by their parent, or by their open logs in the plane's folder.

This module is the reaper's program and is run by its path; it needs only psutil.
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
"""Environment variable that processes inherit: the marks of all planes that they belong to, outermost first."""
LEAVE = b"leave\n"
"""Message of an opener that closes the plane to the reaper."""
PATIENCE_S = 30.0
"""Time for killed processes to end."""
_ROUND_S = 0.05
_TITLE = "ray::"
"""Prefix of the titles of Ray's processes."""


def marks_of(process: psutil.Process) -> list[str]:
    """Return the marks that a process carries; none if it cannot be looked at."""
    with suppress(psutil.Error):
        return process.environ().get(MARKS, "").split(":")
    return []


def end_all(mark: str, folders: Sequence[Path] = ()) -> list[int]:
    """Kill every process except the caller that carries a mark, and Ray's processes that have lost the mark.

    Args:
        mark: The mark.
        folders: Folders of the plane; a process of Ray with an open file below one of them belongs to the plane.

    Returns:
        Process ids of the killed processes, which may take a moment to end.
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
    """Return all processes except this one."""
    found = []
    # Not by ``process_iter``, which caches processes: one that has reused a process id would get no signal.
    for pid in psutil.pids():
        with suppress(psutil.Error):  # it has ended meanwhile
            found.append(psutil.Process(pid))
    return [process for process in found if process.pid != os.getpid()]


def _lost_its_mark(process: psutil.Process, marked: set[int], folders: Sequence[Path]) -> bool:
    """Return whether a process of Ray was started by a marked process and has overwritten its mark with its title."""
    with suppress(psutil.Error, OSError):
        # A zombie has no open file, stays the child of a marked process for ever, and cannot be ended.
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
    """End the remaining processes, and remove their folders.

    Args:
        end: Kills what it finds, and returns the process ids; as ``end_all``.
        folders: Folders to remove afterwards.
        clock: Clock, in seconds.
        wait: Waits for the given seconds.

    Returns:
        Processes that did not end in time, such as ones stuck in a disk's driver.
    """
    until_s = clock() + PATIENCE_S
    # A process that was being started may appear only now, so repeat until none is found.
    while left := end():
        if clock() >= until_s:
            break
        wait(_ROUND_S)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    return left


def _wait_for_end(opener: int) -> None:
    """Wait until the opener ends or says that it leaves; not only for the pipe, which its forks may hold open."""
    waiting = select.poll()
    waiting.register(sys.stdin, select.POLLIN)
    with suppress(OSError):  # it has ended, or the kernel is older than 5.3
        waiting.register(os.pidfd_open(opener), select.POLLIN)
    # Otherwise it had ended before its descriptor was opened, which may belong to another process.
    if os.getppid() == opener:
        waiting.poll()


def _main(mark: str, opener: str, *folders: str) -> None:
    # Ignore signals to the whole job or container, because this process must end last.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _wait_for_end(int(opener))
    owned = [Path(folder) for folder in folders]
    # Without a mark no process is ended: in a given Ray, a rank is a worker of it, with open files in the folder.
    end: Callable[[], list[int]] = partial(end_all, mark, owned) if mark else list
    if left := clean_up(end, owned):
        sys.stderr.write(
            f"processes {left} of a data plane were killed and have not ended after {PATIENCE_S:.0f} s; they are "
            "blocked in the kernel: check the disk or the mount that they use\n"
        )


if __name__ == "__main__":
    _main(*sys.argv[1:])
