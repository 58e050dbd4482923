"""Time that threads which are ready to run spend without a core: others have it, or it idles all the same.

An idle core has to be woken for new work, which takes a while: a tenth of a millisecond in a virtual machine. Also, a
thread that waits behind another on one core is not always moved to a core that has just become free. If processes wake
each other for every message, this amounts to a tenth of the time.
"""

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

__all__ = ["IdleBesideWork", "kept_waiting_s", "share_idle"]

_EVERY_S = 5e-3
"""Interval at which the number of runnable threads is read, which takes half a hundredth of a core."""
_TICK_S = 0.01
"""Unit of the kernel's count of idle time."""
_LOAD, _STAT = Path("/proc/loadavg"), Path("/proc/stat")
_LEAST_SAMPLES = 20
_MOST_IDLE = 0.25
"""Limit above which the cause is not a machine that wakes up late, but counts that do not belong together."""


def kept_waiting_s() -> float:
    """Return how long this thread has waited for a core so far, for whatever reason; 0 if the kernel does not tell."""
    with suppress(OSError, IndexError):
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) * 1e-9
    return 0.0


def share_idle(idle: float, wanted: Sequence[int], cores: int) -> float:
    """Return the part of the wanted core time that no thread got while a core was idle.

    Args:
        idle: Average number of idle cores.
        wanted: Number of threads that wanted a core, at several moments.
        cores: Number of cores.
    """
    if len(wanted) < _LEAST_SAMPLES:
        return 0.0
    got = sum(min(each, cores) for each in wanted) / len(wanted)
    # If fewer threads than cores want a core, the other cores idle for lack of work.
    beside_work = idle - (cores - got)
    return min(_MOST_IDLE, max(0.0, beside_work / got)) if got else 0.0


class IdleBesideWork:
    """Observes the whole machine in a thread while it is entered; if nothing can be read, its share is 0."""

    def __init__(self) -> None:
        """Observe nothing yet."""
        self.wanted: list[int] = []
        """Number of threads that wanted a core, at each look."""
        self._clocks: list[tuple[float, float, int]] = []
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._look, name="omniload-idle", daemon=True)

    def __enter__(self) -> Self:
        """Begin to observe."""
        self._note()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop observing."""
        self._ends.set()
        self._thread.join()
        self._note()

    @property
    def share(self) -> float:
        """Part of the wanted core time that no thread got, see ``share_idle``; known after the exit."""
        match self._clocks:
            case [(began_s, before_s, cores), (ended_s, after_s, _)]:
                return share_idle((after_s - before_s) / (ended_s - began_s), self.wanted, cores)
            case _:
                return 0.0

    def _note(self) -> None:
        """Note the time, the total idle time of all cores, and the number of cores."""
        with suppress(OSError, ValueError, IndexError):
            whole, *cores = (
                line.split() for line in _STAT.read_text().splitlines() if line.startswith("cpu")
            )
            # After the name: user, nice, system, idle, and waiting for a disk.
            idle_s = (int(whole[4]) + int(whole[5])) * _TICK_S
            self._clocks.append((time.monotonic(), idle_s, len(cores)))

    def _look(self) -> None:
        with suppress(OSError, ValueError, IndexError), _LOAD.open("rb", buffering=0) as told:
            while not self._ends.wait(_EVERY_S):
                told.seek(0)
                # For example ``0.31 0.40 0.35 3/412 9041``; this thread is one of the three.
                self.wanted.append(int(told.read(200).split()[3].partition(b"/")[0]) - 1)
