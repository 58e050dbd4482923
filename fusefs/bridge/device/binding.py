"""The binding over /dev/fuse as a whole: mount, agree, serve, unmount."""

import errno
import os
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fusefs.bridge.device.attaching import attach, detach
from fusefs.bridge.device.loop import Loop
from fusefs.bridge.device.negotiation import agreement
from fusefs.bridge.device.passthrough import Passthrough
from fusefs.bridge.device.requests import Requests
from fusefs.bridge.device.wire import IN_HEADER, OUT_HEADER, Init, Opcode
from fusefs.bridge.options import BridgeOptions
from fusefs.bridge.protocol import FileSystem
from fusefs.bridge.tuning import tune_kernel
from omniload.base.errors import StateError
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
    """Mount, answer until unmounted or told to end, unmount; as ``fusefs.bridge.serving.serve``."""
    target = os.path.realpath(mountpoint)
    device = attach(target, options, name)
    try:
        flags = _agreed(device, options)
        passthrough = Passthrough(device, agreed=Init.PASSTHROUGH in flags)
        filesystem.connected(passthrough)
        loop = Loop(device, filesystem, Requests(filesystem, passthrough))
        with _ended_by_signals(loop, target):
            tune_kernel(options, target)
            ready()
            loop.run()
        loop.close()
        if loop.connected:
            detach(target)
    except BaseException:
        detach(target)
        raise
    finally:
        os.close(device)


def _agreed(device: int, options: BridgeOptions) -> Init:
    """Answer INIT, the first request of a connection."""
    select.select([device], [], [])
    request = memoryview(os.read(device, 1 << 16 | 1 << 20))
    _, opcode, unique, *_ = IN_HEADER.unpack_from(request)
    if opcode != Opcode.INIT:
        raise StateError(f"the kernel began with request {opcode} instead of INIT")
    try:
        agreed = agreement(
            request[IN_HEADER.size :],
            max_background=options.max_background,
            root=os.geteuid() == 0,
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
