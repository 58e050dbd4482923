"""The binding over /dev/fuse as a whole: mount, agree, serve, unmount."""

import errno
import os
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from fusefs.bridge.api.options import BridgeOptions
from fusefs.bridge.api.protocol import FileSystem
from fusefs.bridge.api.waiting import run_blocking
from fusefs.bridge.device.attachment import attach, detach
from fusefs.bridge.device.loop import REQUEST_BYTES, Loop
from fusefs.bridge.device.negotiation import agreement
from fusefs.bridge.device.passthrough import Passthrough
from fusefs.bridge.device.requests import Requests
from fusefs.bridge.device.wire import IN_HEADER, OUT_HEADER, Init, Opcode
from fusefs.bridge.process.handover import FINISH_WITHIN_S, Door, handed_over, listen, take
from fusefs.bridge.process.tuning import tune_kernel
from omniload.base.errors import StateError
from omniload.base.linux.mount_table import fuse_mount_at
from omniload.base.log import get_logger

__all__ = ["serve"]

_LOG = get_logger(__name__)
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def serve(
    filesystem: FileSystem,
    mountpoint: str,
    options: BridgeOptions,
    *,
    name: str,
    ready: Callable[[], None],
) -> None:
    """Mount, answer until unmounted or asked to end, unmount; as ``fusefs.bridge.server.serve``.

    With ``take_over``, go on with the mount another process has there instead of mounting.
    """
    target = os.path.realpath(mountpoint)
    connection = (
        _taken_over(target, filesystem)
        if options.take_over
        else _mounted(target, filesystem, options, name)
    )
    handed = False
    try:
        handed = _served(connection, target, options, ready)
    finally:
        if connection.loop.connected and not handed:
            detach(target)
        connection.loop.close()
        os.close(connection.device)


@dataclass(frozen=True, slots=True)
class _Connection:
    """A mount of this process."""

    device: int
    filesystem: FileSystem
    passthrough: Passthrough
    loop: Loop


def _connected(
    device: int,
    filesystem: FileSystem,
    *,
    can_pass_through: bool,
    request_bytes: int = REQUEST_BYTES,
) -> _Connection:
    passthrough = Passthrough(device, agreed=can_pass_through)
    filesystem.connected(passthrough)
    loop = Loop(device, filesystem, Requests(filesystem, passthrough), request_bytes)
    return _Connection(device, filesystem, passthrough, loop)


def _mounted(target: str, filesystem: FileSystem, options: BridgeOptions, name: str) -> _Connection:
    device = attach(target, options, name)
    try:
        flags = _agreed(device, options, copies=filesystem.hands_over_copies)
        return _connected(device, filesystem, can_pass_through=Init.PASSTHROUGH in flags)
    except BaseException:
        detach(target)
        os.close(device)
        raise


def _taken_over(target: str, filesystem: FileSystem) -> _Connection:
    taken = take(target)
    try:
        _check_same_mount(taken.state["mount"], target)
        handed_state = taken.state["passthrough"]
        connection = _connected(
            taken.device,
            filesystem,
            can_pass_through=handed_state["agreed"],
            # The process that began the connection may have agreed to more; older releases did not say.
            request_bytes=max(REQUEST_BYTES, taken.state.get("request_bytes", 0)),
        )
        connection.passthrough.resume(handed_state)
        run_blocking(filesystem.taken_over(taken.state["filesystem"]))
    except BaseException:
        taken.decline()
        raise
    taken.confirm()
    return connection


def _check_same_mount(device: str, target: str) -> None:
    """Check that both processes mean one mount: containers may share names of sockets, but no mounts.

    Raises:
        StateError: The other process has another one.
    """
    if device != (found := _mounted_as(target)):
        raise StateError(
            f"the process that answers for {target!r} serves device {device}, here it is {found}; "
            "take it over where it is mounted"
        )


def _mounted_as(target: str) -> str | None:
    mount = fuse_mount_at(target)
    return mount.device if mount else None


def _served(
    connection: _Connection, target: str, options: BridgeOptions, ready: Callable[[], None]
) -> bool:
    """Serve to the end; return whether the mount lives on in another process."""
    loop, listener, handed = connection.loop, listen(target), False
    door = Door(listener) if listener is not None else None

    def state() -> dict[str, Any]:
        if not loop.finish_tasks(FINISH_WITHIN_S):
            raise StateError(f"requests still wait for the store after {FINISH_WITHIN_S:.0f} s")
        handed_state = run_blocking(connection.filesystem.handed_over())
        return {
            "mount": _mounted_as(target),
            "passthrough": connection.passthrough.state(),
            "request_bytes": loop.request_bytes,
            "filesystem": handed_state,
        }

    def hand_over() -> None:
        nonlocal handed
        assert door is not None
        # One at a time: another peer that asks while requests are finished waits.
        loop.unwatch(door.fileno())
        loop.take_requests(on=False)
        handed = handed_over(door.next(), door, connection.device, state)
        if handed:
            loop.end()
        else:
            loop.take_requests(on=True)
            loop.watch(door.fileno(), hand_over)

    if door is not None:
        loop.watch(door.fileno(), hand_over)
    with _ended_by_signals(loop, target), door or nullcontext():
        tune_kernel(options, target)
        ready()
        loop.run()
    return handed


def _agreed(device: int, options: BridgeOptions, *, copies: bool) -> Init:
    """Answer INIT, the first request of a connection."""
    select.select([device], [], [])
    request = memoryview(os.read(device, 1 << 16 | 1 << 20))
    wanted = options.read_only if options.passthrough is None else options.passthrough
    _, opcode, unique, *_ = IN_HEADER.unpack_from(request)
    if opcode != Opcode.INIT:
        raise StateError(f"the kernel began with request {opcode} instead of INIT")
    try:
        agreed = agreement(
            request[IN_HEADER.size :],
            max_background=options.max_background,
            pass_through=copies and wanted and os.geteuid() == 0,
        )
    except StateError:
        os.write(device, OUT_HEADER.pack(OUT_HEADER.size, -errno.EPROTO, unique))
        raise
    head = OUT_HEADER.pack(OUT_HEADER.size + len(agreed.reply), 0, unique)
    os.writev(device, (head, agreed.reply))
    return agreed.flags


@contextmanager
def _ended_by_signals(loop: Loop, target: str) -> Iterator[None]:
    def end(number: int, _: object) -> None:
        _LOG.info("signal %s: unmounting %s", number, target)
        loop.end()

    before = {number: signal.signal(number, end) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
