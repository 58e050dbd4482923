"""Times at which the machine itself stops: a shared host takes cores away, and nothing on them runs.

python -m benchmarks.faults.machine_stops --help
"""

import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Self

import click
import numpy as np

from omniload.base.linux.exec_with_parent import end_with_parent

__all__ = ["MachineStops", "seconds_within", "spans_in"]

_PERIOD_S = 0.002
_SHORTEST_S = 0.010
"""Shortest delay that counts; shorter ones are the usual cost of waking."""
_RECORD = struct.Struct("=dd")


class MachineStops:
    """Starts one process on each core, with the highest priority, that records when it was not woken in time.

    Such a process has priority over all others, so their work does not delay it. If it is not woken on a core, then
    nothing ran on that core. If the priority is not allowed (``real_time`` is False), other work delays the process
    too.
    """

    def __init__(self) -> None:
        self.real_time = _may_be_real_time()
        self._watchers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory()
        for core in sorted(os.sched_getaffinity(0)):
            command = [sys.executable, "-m", "benchmarks.faults.machine_stops", "--core", str(core)]
            self._watchers.append(
                subprocess.Popen([*command, "--to", f"{self._folder.name}/{core}"])
            )
        return self

    def __exit__(self, *_: object) -> None:
        for watcher in self._watchers:
            watcher.kill()
            watcher.wait()
        self._folder.cleanup()

    def spans(self) -> list[tuple[float, float]]:
        """Return the spans in which some core stood still, in order and disjoint: seconds of ``time.monotonic``.

        Raises:
            RuntimeError: A watching process has ended.
        """
        ended = [watcher.args for watcher in self._watchers if watcher.poll() is not None]
        if ended:
            raise RuntimeError(f"{ended[0]} ended by itself; stops of the machine are not known")
        return spans_in(Path(self._folder.name))


def spans_in(folder: Path) -> list[tuple[float, float]]:
    """Return the spans of all files in a folder, in order and disjoint; overlapping spans of cores are joined."""
    found = sorted(
        record for path in folder.iterdir() for record in _RECORD.iter_unpack(path.read_bytes())
    )
    apart: list[tuple[float, float]] = []
    for begin_s, end_s in found:
        if apart and begin_s <= apart[-1][1]:
            apart[-1] = apart[-1][0], max(end_s, apart[-1][1])
        else:
            apart.append((begin_s, end_s))
    return apart


def seconds_within(spans: list[tuple[float, float]], begin_s: float, end_s: float) -> float:
    """Return the part of a time that lies in disjoint spans."""
    if not spans:
        return 0.0
    begins_s, ends_s = np.array(spans).T
    return float(np.clip(np.minimum(ends_s, end_s) - np.maximum(begins_s, begin_s), 0, None).sum())


def _may_be_real_time() -> bool:
    """Return whether child processes may have real-time priority; nothing stays changed."""
    try:
        before, kept = os.sched_getscheduler(0), os.sched_getparam(0)
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        os.sched_setscheduler(0, before, kept)
    except PermissionError:
        return False
    return True


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--core", required=True, type=int, help="The core to watch.")
@click.option(
    "--to", "path", required=True, type=Path, help="File for starts and ends, two doubles each."
)
def main(core: int, path: Path) -> None:
    """Record when a core stands still, until killed.

    \b
    Example:
      python -m benchmarks.faults.machine_stops --core 0 --to stops
    """  # noqa: D301 -- click's own marker
    end_with_parent(signal.SIGKILL)
    os.sched_setaffinity(0, {core})
    if _may_be_real_time():
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    with path.open("ab", buffering=0) as out:
        before_s = time.monotonic()
        while True:
            time.sleep(_PERIOD_S)
            now_s = time.monotonic()
            if now_s - before_s > _PERIOD_S + _SHORTEST_S:
                out.write(_RECORD.pack(before_s + _PERIOD_S, now_s))
            before_s = now_s


if __name__ == "__main__":
    main()
