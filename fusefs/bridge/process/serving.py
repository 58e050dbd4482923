"""Duties of a process besides answering requests: end at a signal, and hand its mount over to another process."""

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from fusefs.bridge.api.protocol import FileSystem
from fusefs.bridge.api.waiting import run_blocking
from fusefs.bridge.process.handover import FINISH_WITHIN_S, Door, handed_over, listen
from omniload.base.errors import StateError
from omniload.base.linux.mount_table import fuse_mount_at
from omniload.base.log import get_logger

__all__ = ["HandOver", "ServedMount", "Serving", "ended_by_signals", "mounted_as"]

_LOG = get_logger(__name__)
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def mounted_as(target: str) -> str | None:
    """Return the device number of the mount at a path; ``None`` if there is none."""
    mount = fuse_mount_at(target)
    return mount.device if mount else None


@contextmanager
def ended_by_signals(end: Callable[[], None], target: str) -> Iterator[None]:
    """Call ``end`` at each signal that asks a process to end."""

    def asked(number: int, _: object) -> None:
        _LOG.info("signal %s: unmounting %s", number, target)
        end()

    before = {number: signal.signal(number, asked) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Serving(Protocol):
    """The loop of a binding, as far as a hand-over stops and resumes it."""

    def watch(self, descriptor: int, call: Callable[[], None]) -> None:
        """Call back whenever a descriptor is readable."""
        ...

    def unwatch(self, descriptor: int) -> None:
        """End ``watch``."""
        ...

    def take_requests(self, *, on: bool) -> None:
        """Start or stop reading new requests; while stopped, requests stay in the kernel."""
        ...

    def finish_tasks(self, within_s: float) -> bool:
        """Run until no request is under way; return whether all finished in time."""
        ...


@dataclass(frozen=True, slots=True)
class ServedMount:
    """A mount that this process serves."""

    target: str
    """Real path of the mount point."""
    device: int
    """Descriptor of /dev/fuse."""
    filesystem: FileSystem
    loop: Serving


class HandOver:
    """Hands a mount over to another process. Used on the thread of its loop.

    Args:
        mount: The mount.
        state: Returns the state of this binding for the next process; called once no request is under way.
        over: Called once the mount belongs to the next process.
        let_go: Same as for ``handed_over``.
    """

    def __init__(
        self,
        mount: ServedMount,
        state: Callable[[], Mapping[str, Any]],
        over: Callable[[], None],
        let_go: Callable[[], None],
    ) -> None:
        self._mount, self._state, self._over, self._let_go = mount, state, over, let_go
        self.handed = False
        """Whether the mount continues in another process."""
        listener = listen(mount.target)
        self._door = None if listener is None else Door(listener)
        if self._door is not None:
            mount.loop.watch(self._door.fileno(), self._asked)

    def close(self) -> None:
        """Free the address at which other processes ask for the mount."""
        if self._door is not None:
            self._door.close()

    def _asked(self) -> None:
        door, loop, device = self._door, self._mount.loop, self._mount.device
        assert door is not None, "it rang"
        # One peer at a time: another one waits while requests are finished.
        loop.unwatch(door.fileno())
        loop.take_requests(on=False)
        is_blocking = os.get_blocking(device)
        self.handed = handed_over(door.next(), door, device, self._whole_state, self._let_go)
        if self.handed:
            self._over()
            return
        # Restore the flag of before, because libfuse needs blocking reads.
        os.set_blocking(device, is_blocking)
        loop.take_requests(on=True)
        loop.watch(door.fileno(), self._asked)

    def _whole_state(self) -> dict[str, Any]:
        mount = self._mount
        if not mount.loop.finish_tasks(FINISH_WITHIN_S):
            raise StateError(f"requests still wait for the store after {FINISH_WITHIN_S:.0f} s")
        handed_state = run_blocking(mount.filesystem.handed_over())
        # Both processes share one open file description, and the next process must not block in its reads. This process
        # does not read until the flag is set back.
        os.set_blocking(mount.device, False)
        return {"mount": mounted_as(mount.target), "filesystem": handed_state, **self._state()}
