"""The process that owns a group's workers: carries messages between ranks, the desk and the workers."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import stat
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from omniload.base.linux.socket_peer import peer_of
from trainer_integration.loader.shared.dataset import SharedDataset, pack_lists
from trainer_integration.loader.shared.desk import (
    Asked,
    Desk,
    Dropped,
    Ended,
    Event,
    Give,
    Joined,
    Left,
    Made,
    Order,
    Release,
    Replace,
)
from trainer_integration.loader.shared.frames import Frame, Kind, packed, read_frame
from trainer_integration.loader.shared.room import ROWS, Holds, group_room
from trainer_integration.loader.shared.worker import Post, Work, work
from trainer_integration.loader.transport.room import STATES

__all__ = ["START_S", "VERSION", "Setup", "serve"]

_log = logging.getLogger(__name__)
VERSION = 1
START_S = 600.0
"""Time for a server to start, including the making of its dataset."""
_SPARE = 8
"""Workers that a group may replace in its life, because each needs a region of its own."""
_END_S = 5.0
_FIRST_S = 60.0
"""Time for the rank that started the group to connect; later, a group without ranks ends immediately."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A group, as set up by the rank that starts it."""

    work: Work
    fingerprint: dict[str, Any]
    """Values that every rank's loader must have in common."""


@dataclass(slots=True)
class _Worker:
    process: Any
    writer: "asyncio.StreamWriter | _Later"


class _Later:
    """Stores messages for a worker that is still being started."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)


def serve(setup: Setup, listener: socket.socket, context: Any) -> None:
    """Serve ranks until the last has gone; this process has no other task."""
    # The rank decides what an interrupt means, and its handlers are not meant for these children.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _close_sockets(listener.fileno())
    # Threads of torch would be missing in the workers that are forked from this process.
    torch.set_num_threads(1)
    code = 1
    try:
        asyncio.run(_served(setup, listener, context))
        code = 0
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        # ``sys.exit`` is not used, because the exit handlers of the rank were copied with the fork.
        os._exit(code)


async def _served(setup: Setup, listener: socket.socket, context: Any) -> None:
    await _Server(setup, listener, context).run()


def _close_sockets(kept: int) -> None:
    """Close the rank's connections that a fork has copied, because a restarted job needs their ports."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 -- numbers are needed
        number = int(name)
        with contextlib.suppress(OSError):
            if number > 2 and number != kept and stat.S_ISSOCK(os.fstat(number).st_mode):
                # Closed and not shut down, because the rank's own copy of the connection is in use.
                os.close(number)


class _Server:
    """Carries messages. The desk decides."""

    def __init__(self, setup: Setup, listener: socket.socket, context: Any) -> None:
        self._setup, self._listener, self._context = setup, listener, context
        self._regions = setup.work.workers + _SPARE
        self._room, self._holds = group_room(self._regions), Holds(self._regions)
        self._work = setup.work
        self._desk = Desk(setup.work.workers, setup.work.ahead, setup.work.ranks)
        self._workers: dict[int, _Worker] = {}
        self._region = 0
        self._ranks: dict[int, asyncio.StreamWriter] = {}
        self._joined: set[int] = set()
        self._taken: set[int] = set()
        self._connected: set[socket.socket] = set()
        self._lines: set[socket.socket] = set()
        self._retired: list[tuple[int, ...]] = []
        self._rows = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._over = asyncio.Event()

    async def run(self) -> None:
        """Make the dataset, start the workers, and serve."""
        self._listener.setblocking(False)
        loop = asyncio.get_running_loop()
        # The rank that started this server may be gone before it has connected.
        first = loop.call_later(_FIRST_S, self._end_if_alone)
        self._spawn(self._accept())
        self._spawn(self._begin())
        await self._over.wait()
        first.cancel()
        self._listener.close()
        # All workers are killed before any is waited for, because each takes time to give its memory back.
        for worker in self._workers.values():
            worker.process.kill()
        for worker in self._workers.values():
            worker.process.join()

    def _end_if_alone(self) -> None:
        if not self._connected:
            self._over.set()

    def _spawn(self, coroutine: Any) -> "asyncio.Task[None]":
        task: asyncio.Task[None] = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # A defect of ours: ranks see the server go, and report it.
            traceback.print_exception(error)
            self._over.set()

    async def _begin(self) -> None:
        """Make and pack the dataset in parallel with the loop, which watches meanwhile whether ranks are left."""
        loop = asyncio.get_running_loop()
        # The thread ends before the workers are forked, so that they are forked from a process with one thread.
        with ThreadPoolExecutor(1) as beside:
            try:
                dataset = await loop.run_in_executor(beside, _prepared, self._setup.work.dataset)
            except Exception:  # noqa: BLE001 -- every rank gets the error, with its traceback
                self._ready.set_result(traceback.format_exc())
                return
        self._work = replace(self._setup.work, dataset=dataset)
        for worker in range(self._work.workers):
            await self._start(worker)
        self._ready.set_result(None)

    async def _start(self, worker: int) -> None:
        ours, theirs = socket.socketpair()
        forked: tuple[int, ...] = ()
        if self._context.get_start_method() == "fork":
            # Every connection of this process: one that stays open would hide the process's end from a rank.
            sockets = (self._listener, ours, *self._lines, *self._connected)
            forked = tuple(each.fileno() for each in sockets if each.fileno() >= 0)
        post = Post(worker=worker, region=self._region, server=os.getpid(), forked=forked)
        self._region += 1
        process = self._context.Process(
            target=work, args=(self._work, self._room, theirs, post), daemon=True
        )
        process.start()
        theirs.close()
        self._lines.add(ours)
        reader, writer = await asyncio.open_connection(sock=ours)
        self._workers[worker] = _Worker(process, writer)
        self._spawn(self._hear(worker, process, reader, ours))

    async def _hear(
        self, worker: int, process: Any, reader: asyncio.StreamReader, line: socket.socket
    ) -> None:
        while True:
            try:
                frame = await read_frame(reader)
            except (asyncio.IncompleteReadError, OSError):
                break
            self._do(Made(worker, frame))
        self._lines.discard(line)
        if self._over.is_set():
            return
        await _end_of(process)
        why = f"shared worker {worker} (pid {process.pid}) has ended with exit code {process.exitcode}"
        _log.warning("%s; another takes its place", why)
        self._do(Ended(worker, why))

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._over.is_set():
            peer, _ = await loop.sock_accept(self._listener)
            # Any user of the machine may connect to the address, and the messages are unpickled.
            if peer_of(peer)[1] != os.getuid():
                peer.close()
                continue
            self._connected.add(peer)
            self._spawn(self._serve(peer))

    async def _serve(self, peer: socket.socket) -> None:
        """Serve one rank from its greeting to its end."""
        # The lowest free row, so that as few rows as possible are scanned to find out whether a block is free.
        row = next((row for row in range(ROWS) if row not in self._taken), -1)
        try:
            if row < 0:
                _log.error("more than %d ranks ask for the shared workers of this machine", ROWS)
                return
            self._taken.add(row)
            # A rank may be killed just after it has connected. This is no error, and ends nothing here.
            with contextlib.suppress(asyncio.IncompleteReadError, OSError):
                socket.send_fds(peer, [b"\0"], [self._room.handle, self._holds.handle])
                reader, writer = await asyncio.open_connection(sock=peer)
                self._ranks[row] = writer
                await self._welcome(row, reader, writer)
        finally:
            line = self._ranks.pop(row, None)
            if row in self._joined:
                self._joined.discard(row)
                self._do(Left(row))
            if line is not None:
                line.close()
            if row >= 0:
                self._holds.clear(row)
                self._taken.discard(row)
            self._connected.discard(peer)
            peer.close()
            if not self._connected:
                self._over.set()

    async def _welcome(
        self, row: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        hello = json.loads((await read_frame(reader)).body)
        differs = _difference({**self._setup.fingerprint, "version": VERSION}, hello)
        # If a rank leaves while the dataset is made, the end of its messages shows it.
        first = asyncio.ensure_future(read_frame(reader))
        waited: set[asyncio.Future[Any]] = {first, self._ready}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if not self._ready.done():
            first.cancel()
            return
        if refused := differs or self._ready.result():
            writer.write(packed(Frame(Kind.REFUSED, body=refused.encode())))
            await writer.drain()
            first.cancel()
            return
        self._rows = max(self._rows, row + 1)
        self._joined.add(row)
        self._do(Joined(row))
        told = {
            "version": VERSION,
            "key": self._room.key,
            "regions": self._regions,
            "pid": os.getpid(),
        }
        writer.write(packed(Frame(Kind.WELCOME, row, json.dumps(told).encode())))
        frame = await first
        while True:
            if frame.kind is Kind.ASK:
                self._do(Asked(row, frame.number, frame.body))
            elif frame.kind is Kind.DROP:
                self._do(Dropped(row, frame.number))
            frame = await read_frame(reader)

    def _do(self, event: Event) -> None:
        for command in self._desk.handle(event):
            match command:
                case Order(worker, frame):
                    self._workers[worker].writer.write(packed(frame))
                case Give(rank, frame):
                    if rank in self._ranks:
                        self._holds.hold(rank, frame.slots)
                        # Never waited for, because the unread messages of a rank are at most those it asks for ahead.
                        self._ranks[rank].write(packed(frame))
                case Release(slots):
                    self._retired.append(slots)
                case Replace(worker):
                    self._replace(worker)
        self._collect()

    def _replace(self, worker: int) -> None:
        # The memory was laid out for a fixed number of regions, and every rank that has mapped it knows its size.
        if self._region == self._regions:
            _log.error("%d shared workers have ended; the group ends", _SPARE + 1)
            self._over.set()
            return
        later = _Later()
        self._workers[worker] = _Worker(self._workers[worker].process, later)
        self._spawn(self._restart(worker, later))

    async def _restart(self, worker: int, later: _Later) -> None:
        await self._start(worker)
        # Orders that came while the worker was being started, in their order.
        for data in later.written:
            self._workers[worker].writer.write(data)

    def _collect(self) -> None:
        """Give workers back the blocks that no rank holds any more."""
        left = []
        for slots in self._retired:
            if self._holds.is_held(slots, self._rows):
                left.append(slots)
            else:
                for slot in slots:
                    self._room.free(*divmod(slot, STATES))
        self._retired = left


async def _end_of(process: Any) -> None:
    """Wait until a worker whose connection has closed ends; kill it if it does not end by itself."""
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    # The event loop waits, because ``join`` would block all ranks.
    loop.add_reader(process.sentinel, ended.set)
    try:
        await asyncio.wait_for(ended.wait(), _END_S)
    except TimeoutError:
        process.kill()
        await ended.wait()
    finally:
        loop.remove_reader(process.sentinel)
    process.join()


def _prepared(dataset: Any) -> Any:
    """Return the dataset that workers read: made and packed."""
    if isinstance(dataset, SharedDataset):
        dataset = dataset.made
    pack_lists(dataset)
    return dataset


def _difference(ours: dict[str, Any], theirs: Any) -> str:
    """Return the first difference between a rank's loader and the loader that started the group."""
    if not isinstance(theirs, dict):
        return f"a rank of another release greets with {theirs!r:.60}"
    names = [
        name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)
    ]
    if not names:
        return ""
    told = ", ".join(f"{name} {theirs.get(name)!r} and not {ours.get(name)!r}" for name in names)
    return (
        f"this rank's loader has {told}, unlike the rank that came first; make loaders with share=True in the same "
        "order in every rank, or name each: share='train'"
    )
