"""Whether a process is stopped (SIGSTOP), by looks at it now and then."""

from contextlib import suppress
from pathlib import Path

__all__ = ["StopLooks"]


class StopLooks:
    """Looks at one process.

    One that every look sees stopped, and that has run in between, goes on again and again: so it is with ``cpulimit``,
    which has a process run for a part of each tenth of a second. That is a slow one, and no stopped one.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._runs: str | None = None
        """How often its first thread had run, as the last look saw it stopped; ``None`` where that saw it run."""

    def is_stopped(self) -> bool:
        """Tell whether the kernel calls it stopped, and it has not run since the last look that saw it so."""
        folder = Path(f"/proc/{self._pid}")
        before, self._runs = self._runs, None
        try:
            # The name of a process may hold brackets and blanks: what follows is behind the last bracket.
            told = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            if told[0] != "T":
                return False
            # A kernel without it knows the ticks of a processor alone.
            with suppress(FileNotFoundError):
                told = (folder / "schedstat").read_text(encoding="ascii").split()[2:]
        except OSError:
            return False
        self._runs = " ".join(told)
        return before in (None, self._runs)
