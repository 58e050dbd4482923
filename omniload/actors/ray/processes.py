"""Processes of actors, as seen and ended from another process of the same machine."""

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

__all__ = ["HeldProcess", "Process"]


@dataclass(frozen=True, slots=True)
class Process:
    """Where a process is: numbers of processes mean something on one machine, in one namespace, only."""

    pid: int
    place: str
    node: str = ""
    """Number of its node of Ray, where that was said."""

    @classmethod
    def own(cls, node: str = "") -> Self:
        """Return this process."""
        # Numbers of namespaces are those of a boot: two machines may well have the same.
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = Path("/proc/self/ns/pid").readlink()
        return cls(os.getpid(), f"{boot} {namespace}", node)


class HeldProcess:
    """A process by a descriptor of the kernel: a signal never reaches another one that got its number."""

    def __init__(self, process: Process) -> None:
        """Take hold of a process.

        Raises:
            ProcessLookupError: It has ended, or is on another machine.
        """
        if process.place != Process.own().place:
            raise ProcessLookupError(f"process {process.pid} is on another machine")
        self._pid = process.pid
        self._descriptor = os.pidfd_open(process.pid)

    def is_stopped(self) -> bool:
        """Tell whether the kernel calls it stopped (SIGSTOP), and not only slow."""
        try:
            # The name of a process may hold brackets and blanks: what follows is behind the last bracket.
            after_name = Path(f"/proc/{self._pid}/stat").read_text(encoding="utf-8").rpartition(")")
        except OSError:
            return False
        return after_name[2].split()[0] == "T"

    def kill(self) -> None:
        """End it; it may have ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def close(self) -> None:
        """Let go of the descriptor."""
        os.close(self._descriptor)
