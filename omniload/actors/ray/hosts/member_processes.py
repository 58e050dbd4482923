"""Processes of a plane's members: held on this host, and on each other one looked at by its watch."""

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
    """Processes of members, on whichever host. For one thread; what is told of an end is told in another."""

    def __init__(self, watches: Watches) -> None:
        """Begin with nobody; ``watches`` are those of the other hosts."""
        self._watches = watches
        self._here: dict[Member, HeldProcess] = {}
        self._ends = EndWatch()

    def take(
        self, member: Member, process: Process, board: Path | None, ended: Callable[[], None]
    ) -> None:
        """Hold the process of a member, to look at it, to be told of its end, and to end it; none that has ended.

        One of another host is Ray's to end, and to tell of: it is looked at there alone.

        Args:
            member: Whose process it is.
            process: It.
            board: Folder of another host that the member posts its heartbeats to; ``None`` where it posts to none.
            ended: Called once it has ended, in another thread.
        """
        if process.place != Process.own().place:
            self._watches.add(member.name, process, board)
            return
        with suppress(ProcessLookupError):
            held = self._here[member] = HeldProcess(process)
            self._ends.add(held, ended)

    def look(self, now_s: float, later: Later) -> None:
        """Have other hosts look at theirs; see ``Watches.look``."""
        self._watches.look(now_s, later)

    def stopped(self) -> frozenset[str]:
        """Return the names of members whose process is stopped, on other hosts as was heard last."""
        here = [member.name for member, process in self._here.items() if process.is_stopped()]
        return self._watches.stopped().union(here)

    def beats(self, now_s: float) -> dict[str, Progress]:
        """Return heartbeats of members of other hosts that answer, each by the clock of its host."""
        return self._watches.beats(now_s)

    def end(self, member: Member) -> bool:
        """Let go of a member; return whether its process was held here, and is ended."""
        self._watches.forget(member.name)
        process = self._here.pop(member, None)
        if process is None:
            return False
        process.kill()
        self._ends.forget(process)
        process.close()
        return True

    def close(self) -> None:
        """Let go of the processes that are held; they go on."""
        self._ends.close()
        while self._here:
            self._here.popitem()[1].close()


class EndWatch:
    """Tells at once of the end of held processes, in a thread for all of them.

    Ray tells of it too, by way of its raylet, its head and a call that fails: 20 to 110 ms later on two busy cores.
    """

    def __init__(self) -> None:
        """Watch nobody yet."""
        self._poll, self._lock = select.epoll(), threading.Lock()
        self._watched: dict[int, tuple[HeldProcess, Callable[[], None]]] = {}
        self._closing = os.eventfd(0, os.EFD_CLOEXEC)
        self._poll.register(self._closing, select.EPOLLIN)
        self._thread: threading.Thread | None = None

    def add(self, process: HeldProcess, tell: Callable[[], None]) -> None:
        """Call ``tell`` once, in the thread that watches, when a process has ended."""
        with self._lock:
            self._watched[process.descriptor] = process, tell
        # Once: what has ended stays so, and would be told for as long as it is held.
        self._poll.register(process.descriptor, select.EPOLLIN | select.EPOLLONESHOT)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="omniload-ends", daemon=True)
            self._thread.start()

    def forget(self, process: HeldProcess) -> None:
        """Tell of a process no more; before it is closed, as another one may get its descriptor's number."""
        with self._lock:
            self._watched.pop(process.descriptor, None)
        # A fork may hold a copy of the descriptor, so that closing it would not end this.
        self._poll.unregister(process.descriptor)

    def close(self) -> None:
        """Watch nobody any more."""
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
                # In the lock, and looked at again: a number may be another process's by now.
                watched = [self._watched[each] for each in found if each in self._watched]
                ended = [tell for process, tell in watched if process.has_ended()]
            for tell in ended:
                tell()
