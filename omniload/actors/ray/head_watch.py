"""Watches the servers of a plane's Ray; if one died alone, Ray would end the process without an error of ours."""

import os
import random
import socket
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
from omniload.base.linux.socket_peer import peer_of
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
"""Ray's servers; without one of them no actor can be started, and the running ones end within a minute."""
_EVERY_S = 5.0
_MOST_LOOKS = 100
"""Looks per second by all ranks together, as each is a connection to the head."""
_RAREST_S = 25.0
"""Longest interval between looks, so that every rank survives a network cut of 25 s, as a lifeline does."""
_LATE_S = 1.0
"""If a look is later than this, the rank's own process was not running; ten looks with less delay mean nothing."""
_SILENT_S = 50.0
"""Ray ends a process that has not reached its head for a minute, with its own message; ours has to come before."""
_STOPPED_S = 0.1
"""Interval of looks at a stopped server."""


def why_late() -> str:
    """Return which of Ray's servers started by this process is stopped, or else how busy the machine is."""
    return _stopped() or (
        f"none of its servers that this process started is stopped; load on this machine is {os.getloadavg()[0]:.1f} "
        f"on {counted(os.cpu_count() or 0, 'core')}"
    )


def once_none_is_stopped(connect: Callable[[], Any]) -> Any:  # noqa: ANN401 -- what Ray returns
    """Connect to Ray once none of its servers started by this process is stopped; the caller limits the wait.

    Otherwise Ray waits half a minute for a raylet, during which no other Python thread runs, and ends this process.
    """
    while _stopped():
        threading.Event().wait(_STOPPED_S)
    return connect()


def _stopped() -> str:
    """Return which server is stopped, as in a partly suspended job, and the remedy; empty if none is."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # ended meanwhile, which says nothing about the others
            name, pid = process.name(), process.pid
            if name in SERVERS and process.status() == psutil.STATUS_STOPPED:
                return f"its {name}, process {pid}, is stopped (kill -CONT {pid} resumes it)"
    return ""


def between_looks_s(ranks: int) -> float:
    """Return the seconds between two looks of one of ``ranks`` ranks."""
    return min(max(_EVERY_S, ranks / _MOST_LOOKS), _RAREST_S)


class HeadWatch:
    """Checks regularly whether the head of a plane's Ray accepts connections, as it may die without its opener."""

    def __init__(
        self,
        address: str,
        ranks: int,
        now_s: Callable[[], float] = time.monotonic,
        *,
        draw: Callable[[], float] = random.random,
        answers: Callable[[str, float], bool] = answers,
    ) -> None:
        """Begin with a head that has just answered.

        Args:
            address: Host and port of the head.
            ranks: Number of ranks that check it, each for itself.
            now_s: Monotonic clock.
            draw: Returns a number from 0 to 1 that spreads the looks of ranks which started together.
            answers: Returns whether connections to an address are accepted within the given seconds.
        """
        self._address, self._every_s = address, between_looks_s(ranks)
        self._now_s, self._draw, self._answers = now_s, draw, answers
        self._answered_s, self._has_missed, self._is_lost = now_s(), False, False
        self.look_at_s = self._answered_s + draw() * self._every_s
        """Time of the next look."""

    def look(self) -> None:
        """Look if it is time; this takes up to some seconds."""
        now_s = self._now_s()
        if now_s < self.look_at_s:
            return
        # Time in which this process was stopped, or had no core, does not count as time without an answer.
        if (late_s := now_s - self.look_at_s) > _LATE_S:
            self._answered_s += late_s
        if self._answers(self._address, _EVERY_S):
            # Otherwise ranks that waited during a cut would look at the same moment from now on.
            part = self._draw() if self._has_missed else 1.0
            self._answered_s, self._has_missed, self._is_lost = now_s, False, False
            self.look_at_s = now_s + part * self._every_s
        else:
            # From the last answer, where Ray's minute begins, to the end of this look; a longer look was a stop.
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
        """Return if the head answers, or may only be late.

        Raises:
            UnavailableError: It has not answered for most of a minute.
        """
        if self._is_lost:
            raise UnavailableError(
                f"the head of the data plane's Ray at {self._address} has accepted no connection for {_SILENT_S:.0f} "
                "s, so Ray ends this process: the head's process has ended, or the connection to it is cut; start "
                "again from the last checkpoint"
            )


class Raylet:
    """The raylet of this host's node, through which batches come; Ray does not report its end."""

    def __init__(self, pid: int) -> None:
        """Hold the process with that id; none if it is 0, or has just ended."""
        self._pid, self._held = pid, None
        if pid:
            with suppress(OSError):
                self._held = HeldProcess(Process(pid, Process.own().place))

    def check(self) -> None:
        """Return if the raylet lives, as far as this process can see.

        Raises:
            UnavailableError: It has ended.
        """
        if self._held is not None and self._held.has_ended():
            raise UnavailableError(
                f"Ray has ended on this host: its raylet, process {self._pid}, was killed, or ended with the process "
                "that opened the data plane, whose output then says why. This rank gets no batches without the "
                "raylet. If the ranks of the job may change, end this rank and join again; otherwise start again "
                "from the last checkpoint"
            )

    def close(self) -> None:
        """Release the process."""
        if self._held is not None:
            self._held.close()
            self._held = None


def raylet_here() -> int:
    """Return the id of the raylet through which this process is connected to Ray; 0 if it cannot be seen."""
    try:
        worker: Any = import_module("ray._private.worker")
        with socket.socket(socket.AF_UNIX) as asking:
            asking.settimeout(_EVERY_S)
            asking.connect(worker.global_worker.node.raylet_socket_name)
            return peer_of(asking)[0]
    except (ImportError, AttributeError, TypeError, OSError):
        return 0  # this Ray has another place for it, or is gone; failing calls will report its end


def check_servers(ended: Callable[[], str]) -> None:
    """Return if the servers of Ray that were started here run.

    Args:
        ended: Returns which server has ended, and how.

    Raises:
        UnavailableError: One has ended, so lost roles cannot be replaced any more.
    """
    if which := ended():
        raise UnavailableError(
            f"Ray's {which}, and the data plane with it: no role can be replaced any more; start again from the last "
            "checkpoint"
        )
