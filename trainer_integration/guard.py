"""A process that outlives the launcher by a moment, to end what it left behind.

Ray's own processes notice a launcher's SIGKILL only after most of a minute. The guard
holds a pipe from the launcher; when it closes, every process that still carries the
job's mark in its environment is killed.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress

import psutil

__all__ = ["MARK", "Guard", "end_all"]

MARK = "OMNILOAD_JOB"
"""Environment variable that every process of a job inherits."""


class Guard:
    """The launcher's side: started first, closed last."""

    def __init__(self, job: str) -> None:
        """Start the guard of the job whose processes have ``MARK`` set to ``job``."""
        environment = {name: value for name, value in os.environ.items() if name != MARK}
        self._process = subprocess.Popen(  # noqa: S603 -- our own module, our own interpreter
            [sys.executable, "-m", "trainer_integration.guard", job],
            stdin=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # Ctrl-C at the terminal is for the launcher
        )

    def close(self) -> None:
        """End every marked process that is left, and wait until that is done."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def end_all(job: str) -> int:
    """Kill every process that carries the job's mark, but the caller; return how many there were."""
    ended = 0
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(MARK) == job:
                process.kill()
                ended += 1
    return ended


def main(job: str) -> None:
    """Wait for the launcher to end or to close the pipe, then end what is left of its job."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.read()
    # A process that was being started may appear only now: look until none is found.
    while end_all(job):
        pass


if __name__ == "__main__":
    main(sys.argv[1])
