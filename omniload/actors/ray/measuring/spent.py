"""Processor time and memory of processes, as the kernel tells them."""

from contextlib import suppress
from pathlib import Path

import psutil

__all__ = ["memory_of", "rays_own", "spent_by"]


def rays_own() -> list[psutil.Process]:
    """Return Ray's own processes: those below this one that are no actors."""
    below = psutil.Process().children(recursive=True)
    return [process for process in below if not _name_of(process).startswith("ray::")]


def _name_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()[:1])
    except psutil.Error:
        return ""


def memory_of(process: psutil.Process) -> int:
    """Return its memory, what several share by parts; 0 where it has ended."""
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:
        return 0


def spent_by(process: psutil.Process) -> float:
    """Return the processor seconds of a process so far: to the nanosecond, of its threads, where the kernel tells."""
    spent_s = 0.0
    with suppress(OSError):  # it has ended
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            with suppress(OSError):  # the thread has ended
                spent_s += int((task / "schedstat").read_text().split()[0]) * 1e-9
    if spent_s:
        return spent_s
    with suppress(psutil.Error):
        found = process.cpu_times()
        return float(found.user + found.system)
    return 0.0
