"""A worker of a group: torch's own loop, with connections to the server in place of its queues."""

import os
import pickle
import queue
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch._utils import ExceptionWrapper
from torch.utils.data._utils.worker import _worker_loop
from typing_extensions import override

from omniload.base.linux.parent_watch import end_with
from trainer_integration.loader.shared.frames import Frame, Kind, Wire
from trainer_integration.loader.transport.room import STATES, Room
from trainer_integration.loader.transport.sealing import LayingPickler, Sealed, SealingCollate

__all__ = ["EPOCH", "GroupCollate", "Post", "Work", "work"]

EPOCH = struct.Struct(">Q")
"""Number of the epoch, which precedes the pickled indices of a batch; together they are its key."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Settings of a group's workers, from the loader of the rank that started the group."""

    dataset: Any
    kind: int
    auto_collation: bool
    collate_fn: Callable[[Any], Any]
    drop_last: bool
    seed: int
    worker_init_fn: Callable[[int], object] | None
    workers: int
    ahead: int
    ranks: int
    """Ranks of the machine that are expected to join."""


class GroupCollate(SealingCollate):
    """A ``collate_fn`` whose batches can be read by any process that has the room."""

    pickler = LayingPickler

    def __init__(self, collate: Callable[[Any], Any], room: Room, region: int) -> None:
        """Lay batches into a region; a worker that replaces another has a region that was never used."""
        super().__init__(collate, room)
        self._number = region

    @override
    def _region(self) -> int:
        return self._number

    def slots_of(self, sealed: Sealed) -> tuple[int, ...]:
        """Return the slots of a batch, counted over all regions."""
        return tuple(self._number * STATES + slot for slot in sealed.slots)


class _Line:
    """torch's index queue, result queue and final event in one; the end of the server is the final signal."""

    def __init__(self, wire: Wire, collate: GroupCollate, worker: int) -> None:
        self._wire, self._collate, self._over, self._worker = wire, collate, False, worker

    def get(self, timeout: float) -> Any:
        try:
            frame = self._wire.receive(timeout)
        except (EOFError, OSError):
            self._over = True
            return None
        if frame is None:
            raise queue.Empty
        index = pickle.loads(frame.body[EPOCH.size :])  # noqa: S301 -- from a rank whose user the server has checked
        return frame.number, index

    def put(self, made: tuple[int, Any]) -> None:
        job, data = made
        if isinstance(data, Sealed):
            frame = Frame(Kind.BATCH, job, data.data, self._collate.slots_of(data))
        else:
            frame = Frame(Kind.FAILED, job, _pickled_error(data, self._worker))
        self._wire.send(frame)

    def is_set(self) -> bool:
        return self._over

    def cancel_join_thread(self) -> None:
        """Do nothing, because there is no such thread."""

    def close(self) -> None:
        self._wire.close()


def _pickled_error(error: ExceptionWrapper, worker: int) -> bytes:
    try:
        return pickle.dumps(error)
    except Exception:  # noqa: BLE001 -- the class cannot be pickled, but its traceback can
        told = RuntimeError(f"the worker's error cannot be pickled:\n{error.exc_msg}")
        return pickle.dumps(
            ExceptionWrapper((type(told), told, None), f"in shared worker {worker}")  # type: ignore[no-untyped-call]
        )


@dataclass(frozen=True, kw_only=True)
class Post:
    """A worker's place in its group."""

    worker: int
    region: int
    """Region of the room; a worker that replaces another has a region that was never used."""
    server: int
    """Process that the worker ends with."""
    forked: tuple[int, ...]
    """Descriptors of the server that a fork copies; they are closed so that ranks see the server's end."""


def work(settings: Work, room: Room, line: socket.socket, post: Post) -> None:
    """Make batches for ``line``, this worker's end of a pair, until the server goes away."""
    # This comes first: from here on, a server that dies takes the worker with it.
    end_with(post.server)
    for descriptor in post.forked:
        os.close(descriptor)
    worker, region = post.worker, post.region
    collate = GroupCollate(settings.collate_fn, room, region)
    # One object in three places; torch's loop calls different methods of each.
    queues: Any = _Line(Wire(line), collate, worker)
    _worker_loop(
        settings.kind,
        settings.dataset,
        queues,
        queues,
        queues,
        settings.auto_collation,
        collate,
        settings.drop_last,
        settings.seed,
        settings.worker_init_fn,
        worker,
        settings.workers,
        True,  # persistent_workers
        None,
    )
