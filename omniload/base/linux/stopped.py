"""Whether a process is stopped (SIGSTOP), judged by occasional looks."""

from contextlib import suppress
from pathlib import Path

__all__ = ["StopLooks"]


class StopLooks:
    """Looks at one process.

    A process that is stopped at every look but has run in between is repeatedly continued. For example, ``cpulimit``
    lets a process run for a part of each tenth of a second. Such a process is slow, not stopped.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._runs: str | None = None
        """Run count of its first thread at the last look, if that look found it stopped; otherwise ``None``."""

    def is_stopped(self) -> bool:
        """Return whether the process is stopped and has not run since the last look that found it stopped."""
        folder = Path(f"/proc/{self._pid}")
        before, self._runs = self._runs, None
        try:
            # The name of a process may contain brackets and blanks, so the other fields are after the last bracket.
            told = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            if told[0] != "T":
                return False
            # A kernel without this file offers only the ticks in the other fields.
            with suppress(FileNotFoundError):
                told = (folder / "schedstat").read_text(encoding="ascii").split()[2:]
        except OSError:
            return False
        self._runs = " ".join(told)
        return before in (None, self._runs)
