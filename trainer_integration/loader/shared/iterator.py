"""Batches from workers that a machine's ranks share, in the order of this rank's sampler.

A ``Client`` is the rank's place in their group: its requests, and the memory in which batches arrive.
"""

import itertools
import json
import logging
import os
import pickle
import socket
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch.utils.data._utils.pin_memory import pin_memory
from typing_extensions import override

from omniload.base.errors import IntegrityError, StateError, UnavailableError
from trainer_integration.loader.iterators import CLOSED, Prefetching, WorkerTimeoutError
from trainer_integration.loader.shared.frames import Frame, Kind, Wire
from trainer_integration.loader.shared.room import Holds, RanksRoom
from trainer_integration.loader.shared.server import START_S, VERSION
from trainer_integration.loader.shared.worker import EPOCH

__all__ = ["Client", "Shared"]

_log = logging.getLogger(__name__)
_TIMES = 3
"""Servers in a row that may end without having sent a batch."""
_TELL_S = 60.0
_CLIENTS: "weakref.WeakSet[Client]" = weakref.WeakSet()


class _Ready(NamedTuple):
    """A batch that is unpickled already."""

    batch: Any


class Client:
    """A rank of the group. Batches arrive in any order, and wait here for their turn."""

    def __init__(self, connect: Callable[[], socket.socket], fingerprint: dict[str, Any]) -> None:
        """Join the group that ``connect`` reaches or starts.

        Raises:
            StateError: This rank's loader differs from those of the others.
            UnavailableError: The server has ended, or does not answer.
        """
        self._connect, self._fingerprint = connect, {**fingerprint, "version": VERSION}
        self._tasks = itertools.count()
        self._wanted: dict[int, bytes] = {}
        """Keys of requests whose batches have not arrived."""
        self._came: dict[int, Frame | _Ready] = {}
        self._lost = 0
        self._owner = os.getpid()
        self._join()
        _CLIENTS.add(self)

    def _join(self) -> None:
        until_s = time.monotonic() + START_S
        while True:
            connection = self._connect()
            try:
                self._greet(connection)
            except (EOFError, ConnectionError) as error:
                # The group ended as this rank came, or its starter died. The next rank to come starts another.
                connection.close()
                if time.monotonic() > until_s:
                    raise UnavailableError(
                        f"servers of the shared workers end as soon as they have started, for {START_S:g} s"
                    ) from error
            except BaseException:
                connection.close()
                raise
            else:
                return

    def _greet(self, connection: socket.socket) -> None:
        wire = Wire(connection)
        wire.send(Frame(Kind.HELLO, body=json.dumps(self._fingerprint).encode()))
        try:
            # One byte, because descriptors can only be sent with data.
            mark, handles, _, _ = socket.recv_fds(connection, 1, 2)
        except TimeoutError:
            raise UnavailableError(
                f"the server of the shared workers has not answered within {START_S:g} s"
            ) from None
        if not mark:
            raise EOFError("the server has gone")
        if len(handles) != 2:
            raise IntegrityError(
                f"the server of the shared workers sent {len(handles)} descriptors, not 2"
            )
        room, holds = handles
        try:
            # A second limit of the same length, because the dataset is made between the two messages.
            welcome = wire.receive(START_S)
            if welcome is None:
                raise UnavailableError(
                    f"the shared workers' dataset was not made within {START_S:g} s; make it in less"
                )
            if welcome.kind is not Kind.WELCOME:
                raise StateError(welcome.body.decode(errors="replace"))
            told = json.loads(welcome.body)
            self._holds = Holds(told["regions"], holds)
            self._row = welcome.number
            # A duplicate, because a room closes the descriptor that it takes over.
            self._room = RanksRoom(os.dup(room), self._holds, welcome.number, told["key"])
        finally:
            os.close(room)
            os.close(holds)
        self.server, self._wire = told["pid"], wire
        # A client that is dropped leaves the group, because the server sees the end of the connection.
        self._hang_up = weakref.finalize(self, connection.close)

    @property
    def is_open(self) -> bool:
        """Whether this rank is in the group, or would join it again."""
        return self._hang_up.alive and self._owner == os.getpid()

    def ask(self, key: bytes) -> int:
        """Ask for a batch, and return the number under which it will arrive."""
        task = next(self._tasks)
        self._wanted[task] = key
        self._send(Frame(Kind.ASK, task, key))
        return task

    def _send(self, frame: Frame) -> None:
        try:
            self._wire.send(frame)
        except OSError as error:
            self._take_over(error)

    def drop(self, tasks: Iterable[int]) -> None:
        """Cancel requests for batches."""
        for task in tasks:
            if (came := self._came.pop(task, None)) is not None:
                self._release(came)
            elif self._wanted.pop(task, None) is not None and self._hang_up.alive:
                self._send(Frame(Kind.DROP, task))

    def _release(self, came: "Frame | _Ready") -> None:
        if isinstance(came, Frame):
            self._holds.clear(self._row, came.slots)

    def wait(self, task: int, limit_s: float, told: Callable[[], str]) -> Any:
        """Return a batch.

        Args:
            task: Result of ``ask``.
            limit_s: How long to wait; 0 for as long as the server lives.
            told: Returns a description of the awaited batch.

        Raises:
            WorkerTimeoutError: The batch has not arrived.
            RuntimeError: The worker has died at the batch, or the servers die one after another.
            Exception: Error of the dataset, with the worker's traceback.
        """
        began_s = tell_s = time.monotonic()
        while task not in self._came:
            assert task in self._wanted, f"task {task} was neither asked for nor has it come"
            if not self._hang_up.alive:
                raise RuntimeError(CLOSED)
            now_s = time.monotonic()
            if limit_s and now_s - began_s > limit_s:
                raise WorkerTimeoutError(
                    f"DataLoader timed out after {limit_s:g} seconds: the shared workers (server {self.server}) have "
                    f"not given {told()}"
                )
            if now_s - tell_s > _TELL_S:
                _log.warning("%.0f s waited for %s of the shared workers", now_s - began_s, told())
                tell_s = now_s
            self._take(min(_TELL_S, limit_s or _TELL_S))
        return self._opened(self._came.pop(task), told)

    def _take(self, limit_s: float) -> None:
        try:
            frame = self._wire.receive(limit_s)
        except (EOFError, OSError) as error:
            self._take_over(error)
            return
        if frame is None:
            return
        # Reset by a worker's message, not by a welcome: servers that admit ranks and end would be followed forever.
        self._lost = 0
        # The batch was dropped while it was on its way, so its blocks are free again.
        if self._wanted.pop(frame.number, None) is None:
            self._release(frame)
        else:
            self._came[frame.number] = frame

    def _opened(self, frame: "Frame | _Ready", told: Callable[[], str]) -> Any:
        if isinstance(frame, _Ready):
            return frame.batch
        if frame.kind is Kind.BATCH:
            return pickle.loads(frame.body)  # noqa: S301 -- of this job's own worker, through a server of this user
        if frame.kind is Kind.FAILED:
            pickle.loads(frame.body).reraise()  # noqa: S301 -- as above
        raise RuntimeError(f"{frame.body.decode(errors='replace')}, at {told()}")

    def _take_over(self, error: Exception) -> None:
        """Join the group again; the first rank that notices the end of the server starts another."""
        self._hang_up()
        self._lost += 1
        what = f"the server of the shared workers (pid {self.server}) has ended ({error!r})"
        if self._lost > _TIMES:
            raise RuntimeError(
                f"{what}, the {self._lost}th in a row without a batch; look into the system's log for what kills it"
            )
        _log.warning("%s; this rank goes on with another", what)
        for task, came in list(self._came.items()):
            # The batch's memory belongs to this rank as long as the room is known, and then as long as a tensor exists.
            if isinstance(came, Frame) and came.kind is Kind.BATCH:
                self._came[task] = _Ready(pickle.loads(came.body))  # noqa: S301 -- as in ``_opened``
        self._join()
        try:
            for task, key in list(self._wanted.items()):
                self._wire.send(Frame(Kind.ASK, task, key))
        except OSError as again:
            self._take_over(again)  # the new server has ended as well; ``_TIMES`` limits the depth

    def close(self) -> None:
        """Leave the group. Batches that the trainer holds stay as they are."""
        self._wanted.clear()
        self._came.clear()
        self._hang_up()


def _after_fork() -> None:
    # A child that keeps the connection open would hide this rank's end from the server.
    for client in list(_CLIENTS):
        client._hang_up()


os.register_at_fork(after_in_child=_after_fork)


class Shared(Prefetching):
    """Batches of the group's workers, asked for ahead."""

    def __init__(self, loader: Any) -> None:
        """Begin an epoch, or continue in the epoch of a state that ``loader`` was given."""
        super().__init__(loader)
        self._begin(loader)

    @override
    def _begin(self, loader: Any) -> None:
        self._epoch = EPOCH.pack(next(loader._share.epochs))
        # In every epoch, so that a group that has ended meanwhile is joined anew.
        self._client = loader._share.joined(loader, self._base_seed)
        self._end = weakref.finalize(self, _drop, self._client, self._asked)
        # At the interpreter's end the connection closes, which says as much; sending a message then might fail halfway.
        self._end.atexit = False
        super()._begin(loader)

    @override
    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self._end()
        super()._reset(loader, first_iter)

    @override
    def _submit(self, index: Any) -> int:
        task: int = self._client.ask(self._epoch + pickle.dumps(index))
        return task

    @override
    def _next_data(self) -> Any:
        if not self._asked:
            self._end()
            raise StopIteration
        if not self._end.alive:
            raise RuntimeError(CLOSED)
        try:
            batch = self._client.wait(self._asked[0], self._timeout, self._awaited)
        except WorkerTimeoutError:
            raise  # the batch may still arrive
        # An error belongs to its batch, and the next call continues with the batch after it.
        except Exception:
            self._go_on()
            raise
        self._go_on()
        return pin_memory(batch) if self._pin_memory else batch  # type: ignore[no-untyped-call]

    def _awaited(self) -> str:
        return f"the batch of indices {self._progress.order.epoch.index_of(self._given)!r:.400}"


# No method, because a finalizer would keep the iterator alive through it, and never be called.
def _drop(client: Client, asked: "deque[int]") -> None:
    client.drop(asked)
