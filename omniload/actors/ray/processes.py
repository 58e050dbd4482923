"""Processes of actors, as seen and ended from another process of the same machine."""

import os
import select
import signal
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from omniload.actors.ray.release import Release
from omniload.base.errors import UnavailableError
from omniload.base.linux.stopped import StopLooks

__all__ = ["HeldProcess", "Opener", "Process", "end_by_sigterm"]


_PIDFD_THREAD = os.O_EXCL
"""Linux's value of this flag."""


def end_by_sigterm() -> None:
    """Let SIGTERM end this process at once; called when an actor begins.

    Ray's own handler waits until no call is inside. But every role has a call that stays, and ranks wait in a data
    constructor. Such an actor would serve nothing any more, but still post heartbeats, so it would not be replaced.
    """
    # Ray begins actors in the main thread; only a test calls this in another.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@dataclass(frozen=True, slots=True)
class Process:
    """A process and its place, because a process id is only valid on one machine, in one namespace."""

    pid: int
    place: str
    node: str = ""
    """Id of its node of Ray, if known."""
    thread: int = 0
    """Id of one of its threads that ends exactly when the process does; 0 if there is none."""
    release: Release | None = None
    """What it runs, if it holds a role, as only such a process names a thread."""

    @classmethod
    def own(cls, node: str = "", thread: int = 0) -> Self:
        """Return this process."""
        # Namespace ids are only unique within a boot, so two machines may have the same.
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = Path("/proc/self/ns/pid").readlink()
        release = Release.own() if thread else None
        return cls(os.getpid(), f"{boot} {namespace}", node, thread, release)


class HeldProcess:
    """A process held by a pidfd, so that a signal never reaches another process that has reused its id."""

    def __init__(self, process: Process) -> None:
        """Open a pidfd of a process.

        Raises:
            ProcessLookupError: It has ended, or is on another machine.
        """
        if process.place != Process.own().place:
            raise ProcessLookupError(f"process {process.pid} is on another machine")
        self._process = os.pidfd_open(process.pid)
        self._thread = _thread_of(process)
        self.descriptor = self._process if self._thread is None else self._thread
        """Descriptor that becomes readable once the process has ended, or can do nothing more."""
        self._looks = StopLooks(process.pid)

    def is_stopped(self) -> bool:
        """Return whether the process is stopped (SIGSTOP), and not just slow; see ``StopLooks``."""
        return self._looks.is_stopped()

    def has_ended(self) -> bool:
        """Return whether the process has ended, by itself or by a signal, or is freeing its memory before the end."""
        look = select.poll()
        look.register(self.descriptor, select.POLLIN)
        return bool(look.poll(0))

    def kill(self) -> None:
        """Kill the process, which may have ended already."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, signal.SIGKILL)

    def close(self) -> None:
        """Let go of it."""
        if self._thread is not None:
            os.close(self._thread)
        os.close(self._process)


def _thread_of(process: Process) -> int | None:
    """Return a descriptor that becomes readable once a process can do nothing more; ``None`` before Linux 6.9.

    The kernel reports the end of a process after freeing its memory, which takes 0.5 s for a GiB of 4 KiB pages on two
    busy cores. The threads of a killed process end before that, after 3 ms in the median.
    """
    if not process.thread:
        return None
    try:
        thread = os.pidfd_open(process.thread, _PIDFD_THREAD)
    except OSError:
        return None
    # Another process may have reused the id of a thread that has ended.
    if Path(f"/proc/{process.pid}/task/{process.thread}").exists():
        return thread
    os.close(thread)
    return None


class Opener:
    """The process that opened a plane, as seen by a rank of the same host.

    Its Ray ends with it, and a call to the head of an ended Ray blocks for a minute and then ends the calling process.
    So the opener is checked before each such call.
    """

    def __init__(self, pid: int, place: str) -> None:
        """Hold the opener, unless it is in another container or on another host, where its process id is not valid.

        Raises:
            UnavailableError: It has ended.
        """
        self._held: HeldProcess | None = None
        if place == Process.own().place:
            try:
                self._held = HeldProcess(Process(pid, place))
            except ProcessLookupError:
                raise self._ended() from None

    def check(self) -> None:
        """Return while it lives, as far as that is seen here.

        Raises:
            UnavailableError: It has ended.
        """
        if self._held is not None and self._held.has_ended():
            raise self._ended()

    def _ended(self) -> UnavailableError:
        return UnavailableError(
            "the process that opened the data plane has ended; start again from the last checkpoint"
        )

    def close(self) -> None:
        """Let go of it."""
        if self._held is not None:
            self._held.close()
            self._held = None
