"""What keeps threads that are ready to run from a core: others have it, or it idles all the same.

A core that has gone idle is woken for whatever comes next, which takes a while, in a virtual machine a tenth of a
millisecond; and what waits behind another on one core is not always moved to one that has just become free. Where
processes wake each other for every message, that is a tenth of the time.
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
"""How often it is asked how much wants a core, which takes half a hundredth of one."""
_TICK_S = 0.01
"""Unit in which the kernel tells how long cores were idle."""
_LOAD, _STAT = Path("/proc/loadavg"), Path("/proc/stat")
_LEAST_SAMPLES = 20
_MOST_IDLE = 0.25
"""More is no machine that wakes up late, but counts that do not belong together."""


def kept_waiting_s() -> float:
    """Return how long this thread has waited for a core so far: for other work, or for its own; 0 if nothing tells."""
    with suppress(OSError, IndexError):
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) * 1e-9
    return 0.0


def share_idle(idle: float, wanted: Sequence[int], cores: int) -> float:
    """Return the part of what is wanted of some cores that nobody has, as a core idles meanwhile.

    Args:
        idle: Cores that idled, on average.
        wanted: How many threads wanted one, at several moments.
        cores: That there are.
    """
    if len(wanted) < _LEAST_SAMPLES:
        return 0.0
    got = sum(min(each, cores) for each in wanted) / len(wanted)
    # Where fewer threads than cores want one, the others idle for want of work.
    beside_work = idle - (cores - got)
    return min(_MOST_IDLE, max(0.0, beside_work / got)) if got else 0.0


class IdleBesideWork:
    """Looks at the whole machine, in a thread, for as long as it is entered; where nothing can be seen it finds 0."""

    def __init__(self) -> None:
        """Look at nothing yet."""
        self.wanted: list[int] = []
        """How many threads wanted a core, at each look."""
        self._clocks: list[tuple[float, float, int]] = []
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._look, name="omniload-idle", daemon=True)

    def __enter__(self) -> Self:
        """Begin to look."""
        self._note()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Look no more."""
        self._ends.set()
        self._thread.join()
        self._note()

    @property
    def share(self) -> float:
        """Part of what was wanted of cores meanwhile that nobody had, see ``share_idle``; known once it was left."""
        match self._clocks:
            case [(began_s, before_s, cores), (ended_s, after_s, _)]:
                return share_idle((after_s - before_s) / (ended_s - began_s), self.wanted, cores)
            case _:
                return 0.0

    def _note(self) -> None:
        """Note the time, how long cores have been idle, all together, and how many there are."""
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
                # ``0.31 0.40 0.35 3/412 9041``; this thread is one of the three.
                self.wanted.append(int(told.read(200).split()[3].partition(b"/")[0]) - 1)
