"""A mount that comes back: ``omniload fs mount --watch``.

A small process starts the mount's daemon, sleeps until it ends, and mounts again if it ended
for any reason but an unmount: killed, out of memory, a defect. The dead mount is removed
first. Files that were open are lost with the daemon; files that are opened later work.
"""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import assert_never

from fusefs.bridge.process.launch import run_daemon
from fusefs.mounts.lifecycle import WATCHED, MountConfig, start
from omniload.base.errors import ConfigError, IntegrityError, OmniloadError, StateError
from omniload.base.log import get_logger

__all__ = [
    "DaemonEnded",
    "Finish",
    "GiveUp",
    "Lost",
    "MountSupervisor",
    "StartAgain",
    "StartFailed",
    "main",
    "watch",
]

_LOG = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class DaemonEnded:
    """The daemon has ended."""

    code: int
    """Exit code in the form of ``subprocess``: minus the signal number if a signal killed the process."""
    ran_s: float


@dataclass(frozen=True, slots=True)
class StartFailed:
    """The daemon did not start."""

    message: str


@dataclass(frozen=True, slots=True)
class StartAgain:
    """Clear the dead mount and start the daemon."""

    after_s: float


@dataclass(frozen=True, slots=True)
class Finish:
    """Stop watching, because the mount was unmounted."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Stop watching and report it: the mount was unmounted, and files could not be published."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Stop, because mounting again does not help."""

    message: str


Event = DaemonEnded | StartFailed
Command = StartAgain | Finish | Lost | GiveUp


@dataclass(slots=True, kw_only=True)
class MountSupervisor:
    """Decides when a mount is mounted again after its daemon ended."""

    most_attempts: int = 8
    """Most starts in a row without a good run, after which it gives up."""
    longest_wait_s: float = 30.0
    good_run_s: float = 60.0
    """Seconds after which a run of the daemon counts as good, and the count of attempts begins anew."""
    attempts: int = 0

    def handle(self, event: Event) -> Command:
        """Apply an event and return the command that follows from it.

        The first wait is zero, the next half a second; each further wait doubles, up to ``longest_wait_s``.
        """
        match event:
            case DaemonEnded(code=0):
                return Finish()
            # It was unmounted, and published what it could, so mounting again would recover nothing.
            case DaemonEnded(code=IntegrityError.exit_code):
                return Lost()
            case DaemonEnded(code=code, ran_s=ran_s):
                if ran_s >= self.good_run_s:
                    self.attempts = 0
                how = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
                return self._again(f"the daemon {how} after {ran_s:.1f} s")
            case StartFailed(message=message):
                return self._again(message)
            case _:
                assert_never(event)

    def _again(self, reason: str) -> Command:
        if self.attempts >= self.most_attempts:
            return GiveUp(
                f"{self.attempts} starts in a row did not last; the last time {reason}; "
                "see the log, then mount it anew"
            )
        wait_s = 0.0 if self.attempts == 0 else 0.25 * 2**self.attempts
        self.attempts += 1
        _LOG.warning("%s; mounting again (%d of %d)", reason, self.attempts, self.most_attempts)
        return StartAgain(after_s=min(wait_s, self.longest_wait_s))


def watch(
    config: MountConfig, ready: Callable[[], None], machine: MountSupervisor | None = None
) -> None:
    """Mount, and keep mounted until an unmount or a signal. For the main thread.

    Args:
        config: The mount.
        ready: Called once, when it is mounted for the first time.
        machine: Decides when to mount again.

    Raises:
        ConfigError, UnavailableError, StateError: The first start failed, or the watch gave up.
        IntegrityError: The mount ended, and files could not be published.
    """
    machine = machine or MountSupervisor()
    signalled = threading.Event()
    _on_signals(_end_at_once)  # also ends the daemon that is starting
    process = start(config, words=(WATCHED,))
    # Only the first daemon takes over a live mount; later daemons find a dead one.
    config = config.model_copy(update={"take_over": False})

    def end(number: int, _: object) -> None:
        signalled.set()
        process.send_signal(number)

    _on_signals(end)
    ready()
    while True:
        begin = time.monotonic()
        code = process.wait()
        command = machine.handle(DaemonEnded(code, time.monotonic() - begin))
        while isinstance(command, StartAgain):
            if signalled.wait(command.after_s):
                return
            started = _started(config)
            if isinstance(started, subprocess.Popen):
                process = started
                if signalled.is_set():  # the signal came while there was no process to send it to
                    process.terminate()
                break
            command = machine.handle(started)
        else:
            if isinstance(command, Lost):
                raise IntegrityError(f"{config.mountpoint!r}: files are lost; see the log")
            if isinstance(command, GiveUp):
                raise StateError(f"{config.mountpoint!r}: {command.message}")
            return


def _on_signals(handler: Callable[[int, FrameType | None], None]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, handler)


def _end_at_once(number: int, _: object) -> None:
    sys.exit(128 + number)


def _started(config: MountConfig) -> "subprocess.Popen[bytes] | StartFailed":
    try:
        return start(config, words=(WATCHED,))
    except ConfigError:
        raise  # another attempt would not help
    except (OmniloadError, OSError) as error:
        return StartFailed(str(error))


def main() -> None:
    """Run as the process that watches: ``python -m fusefs.mounts.supervisor READY_FD``."""
    run_daemon(
        lambda settings, ready: watch(MountConfig.model_validate_json(settings), ready),
        role="watch",
    )


if __name__ == "__main__":
    main()
