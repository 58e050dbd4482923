"""The binding over libfuse as a whole: mount, serve on a trio loop, unmount or hand over."""

import contextlib
import mmap
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fusefs.bridge.api.options import BridgeOptions
from fusefs.bridge.api.protocol import FileSystem
from fusefs.bridge.api.waiting import run_blocking
from fusefs.bridge.device.passthrough import NO_PASSTHROUGH
from fusefs.bridge.process.handover import FINISH_WITHIN_S, Door, handed_over, listen
from fusefs.bridge.process.launch import why_not
from fusefs.bridge.process.tuning import device_of_mount, mount_table, tune_kernel
from omniload.base.errors import ConfigError, StateError
from omniload.base.extras import missing_extra
from omniload.base.log import get_logger

try:
    import pyfuse3
    import trio

    from fusefs.bridge.libfuse.gate import Gate
    from fusefs.bridge.libfuse.requests import Requests
except ModuleNotFoundError as error:
    raise missing_extra("this mount (--bridge device does without)", error) from error
except ImportError as error:
    raise ConfigError(f"{error}; install the system package libfuse3") from error

__all__ = ["serve"]

_LOG = get_logger(__name__)
_LIBFUSE_PAGES = 256
_MAX_PAGES = Path("/proc/sys/fs/fuse/max_pages_limit")


class _Libfuse:
    """What libfuse 3 before 3.17 can do: no passthrough."""

    can_pass_through = False

    def passes_through(self, _: int) -> bool:
        return False

    def outdated(self, inode: int) -> None:
        # ENOENT: the kernel has forgotten it.
        with contextlib.suppress(OSError):
            pyfuse3.invalidate_inode(pyfuse3.InodeT(inode), attr_only=True)


class _Service:
    """One mount from the first request to the last that this process answers.

    Args:
        filesystem: What is shown.
        options: The kernel's side.
        target: Real path of the mount point.
        gate: What pyfuse3 takes for trio.
    """

    def __init__(
        self, filesystem: FileSystem, options: BridgeOptions, target: str, gate: Gate
    ) -> None:
        self._filesystem = filesystem
        self._options = options
        self._target = target
        self._gate = gate
        self._request_bytes = _largest_request()
        self.handed = False
        """Whether the mount lives on in another process."""

    async def run(self, ready: Callable[[], None]) -> None:
        """Answer until unmounted, asked to end, or handed over."""
        async with trio.open_nursery() as nursery:

            async def serve_requests() -> None:
                await pyfuse3.main()
                nursery.cancel_scope.cancel()

            await nursery.start(self._end_on_signal)
            nursery.start_soon(serve_requests)
            # In a thread, so that the loop answers it. Its answer comes after that of INIT, which
            # would put read-ahead back to what libfuse asks for. What the answer says does not matter.
            with contextlib.suppress(OSError):
                await trio.to_thread.run_sync(os.statvfs, self._target, abandon_on_cancel=True)
            tune_kernel(self._options, self._target)
            listener = listen(self._target) if self._gate.device is not None else None
            if listener is not None:
                nursery.start_soon(self._hand_over_when_asked, listener)
            ready()

    async def _end_on_signal(
        self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
            task_status.started()
            async for number in signals:
                _LOG.info("signal %s: unmounting %s", number, self._target)
                pyfuse3.terminate()
                return

    async def _hand_over_when_asked(self, listener: socket.socket) -> None:
        device = self._gate.device
        assert device is not None, "it was waited for"

        def state() -> dict[str, Any]:
            return trio.from_thread.run(self._state, device)

        with Door(listener) as door:
            while not self.handed:
                await trio.lowlevel.wait_readable(door)
                # In a thread: a silent peer keeps no request waiting. Never abandoned,
                # so the end of either process meanwhile leaves the mount to one of them.
                self.handed = await trio.to_thread.run_sync(
                    handed_over, door.next(), door, device, state
                )
                if not self.handed:
                    os.set_blocking(device, True)
                    self._gate.open()
        pyfuse3.terminate()

    async def _state(self, device: int) -> dict[str, Any]:
        """Take no more requests and return what the next process needs."""
        self._gate.close()
        if not await self._gate.finish(FINISH_WITHIN_S):
            raise StateError(f"requests still wait for the store after {FINISH_WITHIN_S:.0f} s")
        handed_state = run_blocking(self._filesystem.handed_over())
        # The open file is one for both processes. libfuse waits in its reads, the next process
        # must not; here nobody reads before this is undone.
        os.set_blocking(device, False)
        return {
            "mount": device_of_mount(self._target, mount_table()),
            "passthrough": NO_PASSTHROUGH,
            "request_bytes": self._request_bytes,
            "filesystem": handed_state,
        }


def _largest_request() -> int:
    """Return the bytes of the largest request libfuse may have agreed to.

    It offers a buffer of 256 pages (3.17 and later: of as many as the kernel allows) and one page
    or 4 KiB for the headers; the kernel refuses to be read with less than what was agreed.
    """
    try:
        allowed = int(_MAX_PAGES.read_text(encoding="ascii"))
    except (OSError, ValueError):
        allowed = 0  # Linux before 6.13
    return (max(_LIBFUSE_PAGES, allowed) + 1) * mmap.PAGESIZE


def serve(
    filesystem: FileSystem,
    mountpoint: str,
    options: BridgeOptions,
    *,
    name: str,
    ready: Callable[[], None],
) -> None:
    """Mount, answer until unmounted or asked to end, unmount; as ``fusefs.bridge.server.serve``."""
    target = os.path.realpath(mountpoint)
    asked = set(pyfuse3.default_options) | {
        f"fsname={name}",
        f"subtype={name}",
        "default_permissions",
    }
    asked |= {"ro"} if options.read_only else set()
    asked |= {"allow_other"} if options.allow_other else set()
    asked |= {"suid", "dev"} if options.trusted else set()
    gate = Gate()
    try:
        pyfuse3.init(Requests(filesystem, gate), mountpoint, asked)
    except RuntimeError as error:
        reason = why_not(target, options) or f"{error}; see the log"
        raise StateError(f"{mountpoint!r} cannot be mounted: {reason}") from error
    filesystem.connected(_Libfuse())
    service = _Service(filesystem, options, target, gate)
    pyfuse3.trio = gate  # type: ignore[attr-defined]  # see there
    try:
        trio.run(service.run, ready)
    finally:
        pyfuse3.trio = trio  # type: ignore[attr-defined]
        # Without ``unmount``, libfuse closes its descriptor and the mount goes on by the other one.
        pyfuse3.close(unmount=not service.handed)
