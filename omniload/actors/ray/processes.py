"""Processes of actors, as seen and ended from another process of the same machine."""

import os
import select
import signal
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from omniload.base.errors import UnavailableError
from omniload.base.linux.stopped import StopLooks

__all__ = ["HeldProcess", "Opener", "Process", "end_by_sigterm"]


_PIDFD_THREAD = os.O_EXCL
"""As Linux defines it."""


def end_by_sigterm() -> None:
    """Have SIGTERM end this process at once, as an actor begins.

    Ray's own answer waits until no call is inside. One that stays is in every role, and ranks wait in a data
    constructor: it would serve nobody from then on, give heartbeats, and be replaced by nobody.
    """
    # Ray begins actors in the main thread; nothing but a test calls it in another.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@dataclass(frozen=True, slots=True)
class Process:
    """Where a process is: numbers of processes mean something on one machine, in one namespace, only."""

    pid: int
    place: str
    node: str = ""
    """Number of its node of Ray, where that was said."""
    thread: int = 0
    """Number of a thread of it that ends with it and not before; 0 where there is none."""

    @classmethod
    def own(cls, node: str = "", thread: int = 0) -> Self:
        """Return this process."""
        # Numbers of namespaces are those of a boot: two machines may well have the same.
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = Path("/proc/self/ns/pid").readlink()
        return cls(os.getpid(), f"{boot} {namespace}", node, thread)


class HeldProcess:
    """A process by a descriptor of the kernel: a signal never reaches another one that got its number."""

    def __init__(self, process: Process) -> None:
        """Take hold of a process.

        Raises:
            ProcessLookupError: It has ended, or is on another machine.
        """
        if process.place != Process.own().place:
            raise ProcessLookupError(f"process {process.pid} is on another machine")
        self._process = os.pidfd_open(process.pid)
        self._thread = _thread_of(process)
        self.descriptor = self._process if self._thread is None else self._thread
        """Can be read once the process has ended, or can do nothing more."""
        self._looks = StopLooks(process.pid)

    def is_stopped(self) -> bool:
        """Tell whether it is stopped (SIGSTOP), and not only slow; see ``StopLooks``."""
        return self._looks.is_stopped()

    def has_ended(self) -> bool:
        """Tell whether it has ended, by itself or by a signal, or frees its memory before it has."""
        look = select.poll()
        look.register(self.descriptor, select.POLLIN)
        return bool(look.poll(0))

    def kill(self) -> None:
        """End it; it may have ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, signal.SIGKILL)

    def close(self) -> None:
        """Let go of it."""
        if self._thread is not None:
            os.close(self._thread)
        os.close(self._process)


def _thread_of(process: Process) -> int | None:
    """Return a descriptor that can be read once a process can do nothing more; ``None`` where Linux is older than 6.9.

    The kernel calls a process ended once it has freed its memory: 0.5 s for a GiB in pages of 4 KiB, on two busy
    cores. Threads of one that is killed end before that, in 3 ms in the median, and the last of them with it.
    """
    if not process.thread:
        return None
    try:
        thread = os.pidfd_open(process.thread, _PIDFD_THREAD)
    except OSError:
        return None
    # Another process may have got the number of a thread that has ended.
    if Path(f"/proc/{process.pid}/task/{process.thread}").exists():
        return thread
    os.close(thread)
    return None


class Opener:
    """The process that opened a plane, as a rank of the same host sees it.

    Its Ray ends with it, and a call to the head of one that has ended blocks for a minute, and then ends the process
    that called: so it is looked at before each such call.
    """

    def __init__(self, pid: int, place: str) -> None:
        """Hold it; none where its number means nothing here, in a container of its own or on another host.

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
