"""How an actor is seen to be there, wherever whoever looks is."""

import os
import threading
import time
from pathlib import Path

from omniload.actors.heartbeats import Activity, Board, FolderBoard, MemoryBoard
from omniload.actors.ray.hosts.connection import node_here
from omniload.actors.ray.hosts.room import host_here
from omniload.actors.ray.processes import Process
from omniload.base.log import RoleLogs, speak_for
from omniload.base.state import JsonObject

__all__ = ["PresentActor"]


class PresentActor:
    """What every actor answers to whoever keeps the roster, or waits on another host."""

    _told_board: Board

    def _appear(
        self, name: str, board: FolderBoard | None, logs: Path | None, *, reads: bool = False
    ) -> Activity:
        """Be seen to be there; return the role's activity. Whatever this process logs is the role's.

        Without a board on this host its heartbeats are told to whoever asks.
        """
        log = RoleLogs(logs).of(name)
        speak_for(log)
        activity = Activity(name, reads=reads, log=log, host=host_here())
        if board is None:
            own = MemoryBoard()
            self._told_board = own
            return own.add(activity)
        self._told_board = board
        board.post(activity)
        return activity

    def stay(self) -> None:
        """Return never: the call fails with the process, and so tells of its end."""
        threading.Event().wait()

    def pid(self) -> int:
        """Return the actor's process."""
        return os.getpid()

    def process(self) -> Process:
        """Return where the actor's process is."""
        return Process.own(node_here())

    def heartbeats(self) -> tuple[float, list[JsonObject]]:
        """Return the clock of this host, and by it the heartbeats of all roles of this host."""
        return time.monotonic(), [role.to_json() for role in self._told_board.read().values()]
