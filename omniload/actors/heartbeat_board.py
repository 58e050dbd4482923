"""Boards on which roles post their heartbeats, and waiting ranks read them without a question to anybody.

A role that is stopped or stuck cannot answer. So each role posts by itself: into memory in the
local runtime, and once a second into a small file in the folder of the plane's Ray.
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
    """Numbers by name; names of counters end in ``_total``. Safe to call from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}

    def count(self, name: str, by: float = 1.0) -> float:
        """Add to a figure, and return its new value."""
        with self._lock:
            value = self._values[name] = self._values.get(name, 0.0) + by
        return value

    def note(self, **values: float) -> None:
        """Set figures to their present values."""
        with self._lock:
            self._values.update(values)

    def forget(self, names: Iterable[str]) -> None:
        """Remove figures."""
        gone = set(names)
        with self._lock:
            self._values = {k: v for k, v in self._values.items() if k not in gone}

    def read(self) -> dict[str, float]:
        """Return all figures."""
        with self._lock:
            return dict(self._values)


class Activity:
    """The present activities of one role. Safe to call from several threads."""

    def __init__(
        self, name: str, *, reads: bool = False, log: RoleLog | None = None, host: str = ""
    ) -> None:
        """Begin with nothing to do.

        Args:
            name: Name of the role.
            reads: Whether the calls to stores under way in this process belong to the role.
            log: Receives records that are logged during an activity of the role, and its failures.
            host: Name of this host for people; by default its own name.
        """
        self.name, self._reads, self._log = name, reads, log
        self._host = host or socket.gethostname()
        self._lock = threading.Lock()
        # In the order in which they began: the first is the oldest, which is shown as the role's activity.
        self._tasks: dict[object, Task] = {}
        self.figures = Figures()
        self.idle: Callable[[], Task | None] = lambda: None
        """Returns what the role waits for while it has no task."""

    @contextmanager
    def doing(self, what: str, waits_for: tuple[str, ...] = ()) -> Iterator[Callable[[str], None]]:
        """Show ``what`` as an activity inside; yield a function that replaces its words, or restores them if empty."""
        # Several threads may have activities with the same words.
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
        """Write this thread's log records to the role's log too."""
        return nullcontext() if self._log is None else self._log.speaking()

    def _note_failure(self, what: str, error: Exception) -> None:
        if self._log is not None:
            # An error from outside is logged by its message; a trace is only for a defect of ours.
            traced = None if isinstance(error, OmniloadError) else error
            self._log.note(logging.ERROR, f"{what}: {type(error).__name__}: {error}", traced)

    def rest(self, what: str, waits_for: tuple[str, ...] = ()) -> None:
        """Set what the role waits for from now on while it has no task."""
        task = Task(doing=what, since_s=time.monotonic(), waits_for=waits_for)
        self.idle = lambda: task

    def go(self) -> None:
        """Clear what the role waits for while it has no task."""
        self.idle = lambda: None

    def progress(self) -> Progress:
        """Return the role's present heartbeat."""
        with self._lock:
            tasks = tuple(self._tasks.values())
        # Outside the lock, because a planner asks its machine what it waits for, under a lock of its own.
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
        """Return the heartbeats by the names of their roles."""
        ...


class MemoryBoard(Board):
    """Roles of this process; their heartbeats are always current."""

    def __init__(self) -> None:
        self._roles: dict[str, Activity] = {}

    def add(self, activity: Activity) -> Activity:
        """Add a role; return its activity."""
        self._roles[activity.name] = activity
        return activity

    @override
    def read(self) -> dict[str, Progress]:
        return {
            name: role.progress() for name, role in self._roles.copy().items()
        }  # roles are added meanwhile


class FolderBoard(Board):
    """Roles of several processes of one machine: a file for each, in memory if the folder is there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def post(self, activity: Activity) -> Callable[[], None]:
        """Write the heartbeat of a role of this process now and every second.

        Returns:
            A function that ends it.
        """
        ended = threading.Event()
        # Before the thread starts, so that a role is on the board as soon as it exists.
        self.note(activity.progress())

        def beat() -> None:
            is_last = False
            while not is_last:
                is_last = ended.wait(_BEAT_S)
                # Once more at the end, so that its last figures are in the plane's last status.
                self.note(activity.progress())

        # A separate thread, because a hanging call blocks the role's own, and the heartbeat must name that call.
        thread = threading.Thread(target=beat, name="omniload-heartbeat", daemon=True)
        start_thread(thread)
        # A later heartbeat would bring back a role that others remove from the board.
        return ending(thread, ended, _LAST_S, f"the last heartbeat in {self.folder}")

    @override
    def read(self) -> dict[str, Progress]:
        found: dict[str, Progress] = {}
        for path in self.folder.glob("*.json"):
            # A file that disappears, or has another format, is no heartbeat; the role then has none.
            try:
                progress = Progress.from_json(json.loads(path.read_bytes()))
            except (OSError, ValueError, KeyError, TypeError):
                continue
            found[progress.name] = self._seen(progress)
        return found

    def _seen(self, progress: Progress) -> Progress:
        """Return a heartbeat; if it is old and of a rank of this host, note whether that rank has ended."""
        if not (is_rank(progress.name) and is_silent(progress, time.monotonic())):
            return progress
        return replace(progress, has_ended=rank_has_ended(self.folder, progress.name))

    def note(self, progress: Progress) -> None:
        """Write the heartbeat of a role, in the time of this host's clock."""
        heartbeat = json.dumps(progress.to_json()).encode()
        try:
            write_whole(self._place_of(progress.name), heartbeat)
        except OSError:
            return  # the plane is being closed, or its disk is full: its heart is seen to stop

    def forget(self, name: str) -> None:
        """Remove an ended role from the board."""
        self._place_of(name).unlink(missing_ok=True)

    def forget_ranks(self, dp_size: int) -> None:
        """Remove ranks beyond ``dp_size`` from the board, because ranks that died could not do so themselves."""
        for name in self.read():
            if is_rank(name) and dp_rank_of(name) >= dp_size:
                self.forget(name)

    def _place_of(self, name: str) -> Path:
        return self.folder / f"{name.replace(' ', '-')}.json"
