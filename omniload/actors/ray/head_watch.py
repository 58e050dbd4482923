"""Whether the servers of a plane's Ray are there: where one died alone, Ray ends the process without a word of ours."""

import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

import psutil

from omniload.actors.lifeline import answers
from omniload.actors.ray.processes import HeldProcess, Process
from omniload.base.errors import UnavailableError
from omniload.base.units import counted

__all__ = [
    "SERVERS",
    "HeadWatch",
    "Raylet",
    "between_looks_s",
    "check_servers",
    "once_none_is_stopped",
    "raylet_here",
    "why_late",
]

SERVERS = ("gcs_server", "raylet")
"""Without one of these no actor is started, and those that run end within a minute."""
_EVERY_S = 5.0
_MOST_LOOKS = 100
"""A second, by all ranks together: each is a connection that the head takes."""
_RAREST_S = 25.0
"""A cut of 25 s is borne by any rank then, as a lifeline bears it."""
_LATE_S = 1.0
"""A look that is later says that its own process did not run; ten that are less late together say nothing."""
_SILENT_S = 50.0
"""Ray ends a process whose head it has not reached for a minute, with a line of its own: ours comes before."""
_STOPPED_S = 0.1
"""Between looks at a server that is stopped."""
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group."""


def why_late() -> str:
    """Say which server of Ray's that this process started is stopped, or that none is, and how busy the machine is."""
    return _stopped() or (
        "no server of it that this process started is stopped; load on this machine is "
        f"{os.getloadavg()[0]:.1f} on {counted(os.cpu_count() or 0, 'core')}"
    )


def once_none_is_stopped(connect: Callable[[], Any]) -> Any:  # noqa: ANN401 -- what Ray returns
    """Connect to Ray once no server of it that this process started is stopped; who asks limits the wait.

    Ray waits half a minute for a raylet, in which no other thread of Python runs, and then ends this process.
    """
    while _stopped():
        threading.Event().wait(_STOPPED_S)
    return connect()


def _stopped() -> str:
    """Return which of them is, as a job that is suspended in part has it, and what to do; empty where none is."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # one that has ended meanwhile says nothing of the others
            name, pid = process.name(), process.pid
            if name in SERVERS and process.status() == psutil.STATUS_STOPPED:
                return f"its {name}, process {pid}, is stopped (kill -CONT {pid} has it go on)"
    return ""


def between_looks_s(ranks: int) -> float:
    """Return the seconds between two looks of one rank among so many."""
    return min(max(_EVERY_S, ranks / _MOST_LOOKS), _RAREST_S)


class HeadWatch:
    """Looks now and then whether the head of a plane's Ray takes connections: where it died, its opener may live."""

    def __init__(
        self,
        address: str,
        ranks: int,
        now_s: Callable[[], float] = time.monotonic,
        *,
        draw: Callable[[], float] = random.random,
        answers: Callable[[str, float], bool] = answers,
    ) -> None:
        """Have a head that answers now.

        Args:
            address: Host and port of the head.
            ranks: Those that look at it, each for itself.
            now_s: A clock that never goes back.
            draw: Returns a number from 0 to 1, by which ranks that were started together look apart.
            answers: Tells whether somebody takes connections at an address within so many seconds.
        """
        self._address, self._every_s = address, between_looks_s(ranks)
        self._now_s, self._draw, self._answers = now_s, draw, answers
        self._answered_s, self._has_missed, self._is_lost = now_s(), False, False
        self.look_at_s = self._answered_s + draw() * self._every_s
        """When the next look is due."""

    def look(self) -> None:
        """Look, if it is time to; takes up to some seconds."""
        now_s = self._now_s()
        if now_s < self.look_at_s:
            return
        # A process that was stopped, or had no core, has not been without an answer for so long.
        if (late_s := now_s - self.look_at_s) > _LATE_S:
            self._answered_s += late_s
        if self._answers(self._address, _EVERY_S):
            # Ranks that a cut has kept waiting would come together from now on.
            part = self._draw() if self._has_missed else 1.0
            self._answered_s, self._has_missed, self._is_lost = now_s, False, False
            self.look_at_s = now_s + part * self._every_s
        else:
            # From the last answer on, not from the first that was missed: Ray's minute begins there. Up to the end of
            # this look: where the way is cut it takes as long as it may. If longer, the process was stopped in it.
            silent_s = now_s - self._answered_s + min(self._now_s() - now_s, _EVERY_S)
            self._has_missed, self._is_lost = True, silent_s >= _SILENT_S
            self.look_at_s = now_s + _EVERY_S

    def watch(self, left: threading.Event) -> None:
        """Look in a thread of its own until ``left`` is set."""

        def look() -> None:
            while not left.wait(max(0.0, self.look_at_s - self._now_s())):
                self.look()

        threading.Thread(target=look, name="omniload-head-watch", daemon=True).start()

    def check(self) -> None:
        """Return while the head is there, or may only be late.

        Raises:
            UnavailableError: It has not been there for most of a minute.
        """
        if self._is_lost:
            raise UnavailableError(
                f"the head of the data plane's Ray at {self._address} has taken no connection for {_SILENT_S:.0f} s, "
                "and Ray ends this process: its process there has ended, or the way to it is cut; start again from the "
                "last checkpoint"
            )


class Raylet:
    """The raylet of this host's node: batches come through it, and Ray does not tell of its end."""

    def __init__(self, pid: int) -> None:
        """Hold the process of that number; none where it is 0, or has just ended."""
        self._pid, self._held = pid, None
        if pid:
            with suppress(OSError):
                self._held = HeldProcess(Process(pid, Process.own().place))

    def check(self) -> None:
        """Return while it lives, as far as that is seen here.

        Raises:
            UnavailableError: It has ended.
        """
        if self._held is not None and self._held.has_ended():
            raise UnavailableError(
                f"Ray has ended on this host: its raylet, process {self._pid}, has ended with the process that opened "
                "the data plane, whose output says why, or was killed. This rank has no batches without it; where "
                "ranks come and go, end it and join again, else start again from the last checkpoint"
            )

    def close(self) -> None:
        """Let go of it."""
        if self._held is not None:
            self._held.close()
            self._held = None


def raylet_here() -> int:
    """Return the number of the raylet that this process is connected to Ray through; 0 where it is not seen."""
    try:
        worker: Any = import_module("ray._private.worker")
        with socket.socket(socket.AF_UNIX) as asking:
            asking.settimeout(_EVERY_S)
            asking.connect(worker.global_worker.node.raylet_socket_name)
            # Of the process that listens there; 0 for one of another container.
            known = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except (ImportError, AttributeError, TypeError, OSError):
        return 0  # a Ray that has moved it, or is not there: its end is told by the calls that fail
    return int(_CREDENTIALS.unpack(known)[0])


def check_servers(ended: Callable[[], str]) -> None:
    """Return while the servers of Ray that were started here run.

    Args:
        ended: Says which has ended, and how.

    Raises:
        UnavailableError: One has: no role that is lost can be replaced any more.
    """
    if which := ended():
        raise UnavailableError(
            f"Ray's {which}, and the data plane with it: no role can be replaced any more; start again from the last "
            "checkpoint"
        )
