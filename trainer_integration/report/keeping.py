"""The report of a run while it goes on: written again and again, as often as its length allows."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from omniload.base.errors import ConfigError, OmniloadError
from omniload.base.log import get_logger
from trainer_integration.report.report import write_report
from trainer_integration.run.run_log import LOG_NAME

__all__ = ["ReportProcess", "kept_report", "main"]

_LOG = get_logger(__name__)
_LEAST_S = 30.0
_SHARE = 0.02
"""Part of the time that the report may take: a long log is read and drawn more seldom."""
_END_S = 60.0
_NICE = 10
"""Of a report beside a rank, which needs its core."""


@contextmanager
def kept_report(run_dir: Path, least_s: float | None = None) -> Iterator[None]:
    """Write the report of a run inside, from a thread, every 30 s (``least_s``) or more seldom.

    The last one is left to the caller.
    """
    ended = threading.Event()
    thread = threading.Thread(
        target=_keep,
        args=(run_dir, ended, least_s or _LEAST_S),
        name="omniload-report",
        daemon=True,
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_END_S)
        if thread.is_alive():
            _LOG.warning("the report of %s is still being written after %.0f s", run_dir, _END_S)


class ReportProcess:
    """The same from a process of its own: what trains shares its interpreter with nobody. Use it in a ``with``."""

    def __init__(self, least_s: float | None = None) -> None:
        self._least_s = least_s or _LEAST_S
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, run_dir: Path) -> None:
        """Keep the report of a run from now on; once."""
        assert self._process is None, "it keeps one report"
        self._process = subprocess.Popen(  # noqa: S603 -- our own interpreter and module
            [sys.executable, "-m", __name__, str(run_dir), str(self._least_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # a terminal's Ctrl-C is the rank's
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End it, so that it writes over no later report."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        # The sign to end; a rank that is killed gives it just as well.
        process.stdin.close()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _keep(run_dir: Path, ended: threading.Event, least_s: float) -> None:
    wait_s, seen = least_s, None
    while not ended.wait(wait_s):
        began_s = time.monotonic()
        try:
            written = (run_dir / LOG_NAME).stat().st_mtime_ns
            if written != seen:
                write_report(run_dir, reload_s=wait_s)
                seen = written
        except ConfigError as error:  # no package for it: told at the end
            _LOG.debug("no report while the run goes on: %s", error)
            return
        except (OmniloadError, OSError) as error:
            _LOG.debug("no report yet: %s", error)
        wait_s = max(least_s, (time.monotonic() - began_s) / _SHARE)


def main() -> None:
    """Keep the report of the run that the first argument names, until standard input ends, as it does with the rank."""
    os.nice(_NICE)
    with kept_report(Path(sys.argv[1]), float(sys.argv[2])):
        sys.stdin.buffer.read()


if __name__ == "__main__":
    main()
