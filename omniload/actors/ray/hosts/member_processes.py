"""Processes of a plane's members: those of this host are held here, those of another host are observed by its watch."""

import os
import select
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from omniload.actors.ray.hosts.watches import Later, Watches
from omniload.actors.ray.processes import HeldProcess, Process
from omniload.machine.progress import Progress
from omniload.machine.roster.members import Member

__all__ = ["EndWatch", "MemberProcesses"]


class MemberProcesses:
    """Processes of members on all hosts. For one thread; ``ended`` callbacks run in another thread."""

    def __init__(self, watches: Watches) -> None:
        """Begin without processes; ``watches`` observe the other hosts."""
        self._watches = watches
        self._here: dict[Member, HeldProcess] = {}
        self._ends = EndWatch()

    def take(
        self, member: Member, process: Process, board: Path | None, ended: Callable[[], None]
    ) -> None:
        """Hold the process of a member, to observe it, to report its end, and to end it; do nothing if it has ended.

        A process of another host is only observed. Ray ends it and reports its end.

        Args:
            member: Member that runs in the process.
            process: The process.
            board: Folder on another host that the member posts its heartbeats to; ``None`` if it posts to no folder.
            ended: Called in another thread once the process has ended.
        """
        if process.place != Process.own().place:
            self._watches.add(member.name, process, board)
            return
        with suppress(ProcessLookupError):
            held = self._here[member] = HeldProcess(process)
            self._ends.add(held, ended)

    def look(self, now_s: float, later: Later) -> None:
        """Have the other hosts look at their processes; see ``Watches.look``."""
        self._watches.look(now_s, later)

    def stopped(self) -> frozenset[str]:
        """Return the names of members whose process is stopped; for other hosts, according to their last answer."""
        here = [member.name for member, process in self._here.items() if process.is_stopped()]
        return self._watches.stopped().union(here)

    def beats(self, now_s: float) -> dict[str, Progress]:
        """Return heartbeats of members on hosts that answer, each by the clock of its host."""
        return self._watches.beats(now_s)

    def end(self, member: Member) -> bool:
        """Stop observing a member, and end its process if it is held here; return whether it was."""
        self._watches.forget(member.name)
        process = self._here.pop(member, None)
        if process is None:
            return False
        process.kill()
        self._ends.forget(process)
        process.close()
        return True

    def close(self) -> None:
        """Release the held processes, which continue to run."""
        self._ends.close()
        while self._here:
            self._here.popitem()[1].close()


class EndWatch:
    """Reports the end of held processes immediately, with one thread for all of them.

    Ray also reports it, through its raylet, its head and a failing call, but 20 to 110 ms later on two busy cores.
    """

    def __init__(self) -> None:
        """Begin without processes."""
        self._poll, self._lock = select.epoll(), threading.Lock()
        self._watched: dict[int, tuple[HeldProcess, Callable[[], None]]] = {}
        self._closing = os.eventfd(0, os.EFD_CLOEXEC)
        self._poll.register(self._closing, select.EPOLLIN)
        self._thread: threading.Thread | None = None

    def add(self, process: HeldProcess, tell: Callable[[], None]) -> None:
        """Call ``tell`` once, in the watching thread, when a process has ended."""
        with self._lock:
            self._watched[process.descriptor] = process, tell
        # One shot, because a process that has ended stays readable and would be reported for as long as it is held.
        self._poll.register(process.descriptor, select.EPOLLIN | select.EPOLLONESHOT)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="omniload-ends", daemon=True)
            self._thread.start()

    def forget(self, process: HeldProcess) -> None:
        """Stop watching a process; call this before closing it, because its descriptor's number may be reused."""
        with self._lock:
            self._watched.pop(process.descriptor, None)
        # Closing the descriptor alone is not enough: a forked process may hold a copy of it.
        self._poll.unregister(process.descriptor)

    def close(self) -> None:
        """Stop watching."""
        os.eventfd_write(self._closing, 1)
        if self._thread is not None:
            self._thread.join()
        self._poll.close()
        os.close(self._closing)

    def _run(self) -> None:
        while True:
            found = [descriptor for descriptor, _ in self._poll.poll()]
            if self._closing in found:
                return
            with self._lock:
                # Looked up and checked under the lock, because a number may belong to another process by now.
                watched = [self._watched[each] for each in found if each in self._watched]
                ended = [tell for process, tell in watched if process.has_ended()]
            for tell in ended:
                tell()
