"""The binding over libfuse as a whole: mount, serve, unmount or hand over."""

import contextlib
import mmap
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from fusefs.bridge.api.options import BridgeOptions
from fusefs.bridge.api.protocol import FileSystem
from fusefs.bridge.api.waiting import all_done, run_blocking
from fusefs.bridge.device.passthrough import NO_PASSTHROUGH
from fusefs.bridge.libfuse.loop import Loop
from fusefs.bridge.process.handover import FINISH_WITHIN_S, Door, handed_over, listen
from fusefs.bridge.process.launch import why_not
from fusefs.bridge.process.tuning import tune_kernel
from omniload.base.errors import ConfigError, StateError
from omniload.base.extras import missing_extra
from omniload.base.linux.mount_table import fuse_mount_at
from omniload.base.log import get_logger

try:
    import pyfuse3

    from fusefs.bridge.libfuse.requests import Requests
except ModuleNotFoundError as error:
    raise missing_extra("this mount (--bridge device does without)", error) from error
except ImportError as error:
    raise ConfigError(f"{error}; install the system package libfuse3") from error

__all__ = ["serve"]

_LOG = get_logger(__name__)
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
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
        loop: Runs pyfuse3.
    """

    def __init__(
        self, filesystem: FileSystem, options: BridgeOptions, target: str, loop: Loop
    ) -> None:
        self._filesystem = filesystem
        self._options = options
        self._target = target
        self._loop = loop
        self._request_bytes = _largest_request()
        self._door: Door | None = None
        self.handed = False
        """Whether the mount lives on in another process."""

    def run(self, ready: Callable[[], None]) -> None:
        """Answer until unmounted, asked to end, or handed over."""
        main = pyfuse3.main()
        self._loop.start(main)
        # Dropped where the end comes first: its thread may wait inside the mount until that is gone.
        self._loop.start(self._begin(ready))
        before = {number: signal.signal(number, self._end) for number in _SIGNALS}
        try:
            self._loop.run(main)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            if self._door is not None:
                self._door.close()
            self._loop.close()

    def _end(self, number: int, _: object) -> None:
        _LOG.info("signal %s: unmounting %s", number, self._target)
        self._loop.end()

    async def _begin(self, ready: Callable[[], None]) -> None:
        # Asked by a thread, so that the loop answers it. Its answer comes after that of INIT, which
        # would put read-ahead back to what libfuse asks for. What the answer says does not matter.
        await all_done((_in_daemon_thread(partial(os.statvfs, self._target)),))
        tune_kernel(self._options, self._target)
        listener = listen(self._target) if self._loop.reader.device is not None else None
        if listener is not None:
            self._door = Door(listener)
            self._loop.watch(self._door.fileno(), self._hand_over)
        ready()

    def _hand_over(self) -> None:
        door, device = self._door, self._loop.reader.device
        assert door is not None, "it rang"
        assert device is not None, "it was waited for"
        # One at a time: another peer that asks while requests are finished waits.
        self._loop.unwatch(door.fileno())
        self._loop.take_requests(on=False)
        self.handed = handed_over(door.next(), door, device, partial(self._state, device))
        if self.handed:
            pyfuse3.terminate()
        else:
            # libfuse waits in its reads, and must.
            os.set_blocking(device, True)
            self._loop.take_requests(on=True)
            self._loop.watch(door.fileno(), self._hand_over)

    def _state(self, device: int) -> dict[str, Any]:
        """Return what the next process needs, once no request is under way."""
        if not self._loop.finish_tasks(FINISH_WITHIN_S):
            raise StateError(f"requests still wait for the store after {FINISH_WITHIN_S:.0f} s")
        handed_state = run_blocking(self._filesystem.handed_over())
        # The open file is one for both processes. libfuse waits in its reads, the next process
        # must not; here nobody reads before this is undone.
        os.set_blocking(device, False)
        mount = fuse_mount_at(self._target)
        return {
            "mount": mount.device if mount else None,
            "passthrough": NO_PASSTHROUGH,
            "request_bytes": self._request_bytes,
            "filesystem": handed_state,
        }


def _in_daemon_thread(call: Callable[[], object]) -> "Future[Any]":
    """Make a call that may never return in a thread that the process does not wait for; its outcome is dropped."""
    done: Future[Any] = Future()

    def run() -> None:
        with contextlib.suppress(OSError):
            call()
        done.set_result(None)

    # A daemon: where the mount ends before it is answered, its process must not wait for it.
    threading.Thread(target=run, name="bridge-statvfs", daemon=True).start()
    return done


def _loop_in_use() -> Loop:
    """Return the loop that ``serve`` put in the place of trio."""
    loop: Loop = pyfuse3.trio.lowlevel.current_trio_token()  # type: ignore[attr-defined]
    return loop


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
    loop = Loop(pyfuse3.terminate, _loop_in_use)
    service = _Service(filesystem, options, target, loop)
    trio = pyfuse3.trio  # type: ignore[attr-defined]  # a name of its own, see ``Loop``
    try:
        pyfuse3.init(Requests(filesystem), mountpoint, asked)
    except RuntimeError as error:
        reason = why_not(target, options) or f"{error}; see the log"
        raise StateError(f"{mountpoint!r} cannot be mounted: {reason}") from error
    # From here on whatever comes up, a signal too, takes the mount away: else it would be a dead one.
    try:
        filesystem.connected(_Libfuse())
        pyfuse3.trio = loop.as_trio  # type: ignore[attr-defined]
        service.run(ready)
    finally:
        pyfuse3.trio = trio  # type: ignore[attr-defined]
        # Without ``unmount``, libfuse closes its descriptor and the mount goes on by the other one.
        pyfuse3.close(unmount=not service.handed)
