"""Where roles post their heartbeats, and ranks that wait read them, without asking anybody.

A role that is stopped or stuck cannot answer. So each posts by itself: into memory in the
local runtime, into a small file a second in the folder of the plane's Ray.
"""

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from typing_extensions import override

from omniload.actors.rank_locks import rank_has_ended
from omniload.base.concurrency.calls_under_way import calls_under_way, figures_of_calls
from omniload.base.concurrency.threads import ending, start_thread
from omniload.base.errors import OmniloadError
from omniload.base.log import RoleLog
from omniload.base.writing import write_whole
from omniload.machine.progress import Progress, Task, dp_rank_of, is_rank, is_silent

__all__ = ["Activity", "Board", "Figures", "FolderBoard", "MemoryBoard"]

_BEAT_S, _LAST_S = 1.0, 30.0


class Figures:
    """Numbers by name; names of what only grows end in ``_total``. Safe to call from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}

    def count(self, name: str, by: float = 1.0) -> float:
        """Add to a figure, and return what it is then."""
        with self._lock:
            value = self._values[name] = self._values.get(name, 0.0) + by
        return value

    def note(self, **values: float) -> None:
        """Set figures to what they are now."""
        with self._lock:
            self._values.update(values)

    def forget(self, names: Iterable[str]) -> None:
        """Have no such figures any more."""
        gone = set(names)
        with self._lock:
            self._values = {k: v for k, v in self._values.items() if k not in gone}

    def read(self) -> dict[str, float]:
        """Return all of them."""
        with self._lock:
            return dict(self._values)


class Activity:
    """What one role does at present. Safe to call from several threads."""

    def __init__(
        self, name: str, *, reads: bool = False, log: RoleLog | None = None, host: str = ""
    ) -> None:
        """Begin with nothing to do.

        Args:
            name: Of the role.
            reads: Whether calls to stores that are under way in this process are the role's.
            log: Gets what is logged while the role does something, and what it fails with.
            host: What people call this host; by default its own name.
        """
        self.name, self._reads, self._log = name, reads, log
        self._host = host or socket.gethostname()
        self._lock = threading.Lock()
        # In the order in which they began: the first is the oldest, which is what a role is said to do.
        self._tasks: dict[object, Task] = {}
        self.figures = Figures()
        self.idle: Callable[[], Task | None] = lambda: None
        """Says what the role waits for while it has no task."""

    @contextmanager
    def doing(self, what: str, waits_for: tuple[str, ...] = ()) -> Iterator[Callable[[str], None]]:
        """Do ``what`` inside; gives a function that says in other words what it is by now; by none, as at first."""
        # Several threads may do what has one name.
        key = object()
        task = Task(doing=what, since_s=time.monotonic(), waits_for=waits_for)
        with self._lock:
            self._tasks[key] = task

        def says(what: str) -> None:
            with self._lock:
                if key in self._tasks:
                    self._tasks[key] = replace(task, doing=what or task.doing)

        try:
            with self.speaking():
                yield says
        except Exception as error:
            self._note_failure(what, error)
            raise
        finally:
            with self._lock:
                del self._tasks[key]

    def speaking(self) -> AbstractContextManager[None]:
        """Have what this thread logs inside put into the role's log too."""
        return nullcontext() if self._log is None else self._log.speaking()

    def _note_failure(self, what: str, error: Exception) -> None:
        if self._log is not None:
            # What is wrong outside is said by its words; a trace is for a fault of ours.
            traced = None if isinstance(error, OmniloadError) else error
            self._log.note(logging.ERROR, f"{what}: {type(error).__name__}: {error}", traced)

    def rest(self, what: str, waits_for: tuple[str, ...] = ()) -> None:
        """Say what the role waits for from now on while it has no task."""
        task = Task(doing=what, since_s=time.monotonic(), waits_for=waits_for)
        self.idle = lambda: task

    def go(self) -> None:
        """Say nothing from now on of what the role waits for while it has no task."""
        self.idle = lambda: None

    def progress(self) -> Progress:
        """Return the role's heartbeat of now."""
        with self._lock:
            tasks = tuple(self._tasks.values())
        # Not in the lock: a planner looks into its machine for what it waits for, under a lock of its own.
        if not tasks and (idle := self.idle()) is not None:
            tasks = (idle,)
        found = calls_under_way() if self._reads else []
        if self._reads:
            self.figures.note(**figures_of_calls())
        calls = tuple(Task(doing=what, since_s=since_s) for what, since_s in found)
        return Progress(
            name=self.name,
            pid=os.getpid(),
            beat_s=time.monotonic(),
            tasks=tasks,
            calls=calls,
            figures=self.figures.read(),
            log="" if self._log is None else str(self._log.path),
            host=self._host,
        )


class Board(Protocol):
    """Last heartbeats of all roles of a plane."""

    def read(self) -> dict[str, Progress]:
        """Return them by name."""
        ...


class MemoryBoard(Board):
    """Roles of this process: their heartbeats are of now."""

    def __init__(self) -> None:
        self._roles: dict[str, Activity] = {}

    def add(self, activity: Activity) -> Activity:
        """Take in a role; return its activity."""
        self._roles[activity.name] = activity
        return activity

    @override
    def read(self) -> dict[str, Progress]:
        return {
            name: role.progress() for name, role in self._roles.copy().items()
        }  # roles are added meanwhile


class FolderBoard(Board):
    """Roles of several processes of one machine: a file each, in memory where the folder is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def post(self, activity: Activity) -> Callable[[], None]:
        """Write the heartbeat of a role of this process now and every second.

        Returns:
            A function that ends it.
        """
        ended = threading.Event()
        # Before the thread: a role is on the board once it is there, for whoever waits for it.
        self.note(activity.progress())

        def beat() -> None:
            is_last = False
            while not is_last:
                is_last = ended.wait(_BEAT_S)
                # At the end too: what it counted since stays with its plane's last status.
                self.note(activity.progress())

        # A thread of its own: a call that hangs keeps the role's own, and the heartbeat is to say in which call.
        thread = threading.Thread(target=beat, name="omniload-heartbeat", daemon=True)
        start_thread(thread)
        # One that comes later would bring back whom others forget.
        return ending(thread, ended, _LAST_S, f"the last heartbeat in {self.folder}")

    @override
    def read(self) -> dict[str, Progress]:
        found: dict[str, Progress] = {}
        for path in self.folder.glob("*.json"):
            # A file that goes or is of another make is no heartbeat; the role then has none.
            try:
                progress = Progress.from_json(json.loads(path.read_bytes()))
            except (OSError, ValueError, KeyError, TypeError):
                continue
            found[progress.name] = self._seen(progress)
        return found

    def _seen(self, progress: Progress) -> Progress:
        """Return a heartbeat; where it is old and of a rank of this host, with whether that one has ended."""
        if not (is_rank(progress.name) and is_silent(progress, time.monotonic())):
            return progress
        return replace(progress, has_ended=rank_has_ended(self.folder, progress.name))

    def note(self, progress: Progress) -> None:
        """Write the heartbeat of a role, by the clock of this host."""
        heartbeat = json.dumps(progress.to_json()).encode()
        try:
            write_whole(self._place_of(progress.name), heartbeat)
        except OSError:
            return  # the plane is being closed, or its disk is full: its heart is seen to stop

    def forget(self, name: str) -> None:
        """Take a role that has ended off the board."""
        self._place_of(name).unlink(missing_ok=True)

    def forget_ranks(self, dp_size: int) -> None:
        """Take ranks off the board that are not among ``dp_size``: those that died could not do so themselves."""
        for name in self.read():
            if is_rank(name) and dp_rank_of(name) >= dp_size:
                self.forget(name)

    def _place_of(self, name: str) -> Path:
        return self.folder / f"{name.replace(' ', '-')}.json"
