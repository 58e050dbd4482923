"""A process that outlives the launcher by a moment, to end what it left behind.

Ray's own processes notice a launcher's SIGKILL only after most of a minute. The guard
holds a pipe from the launcher; when it closes, every process that still carries the
job's mark in its environment is killed, and the folder of the job's Ray is removed.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

__all__ = ["MARK", "Guard", "clean_up", "end_all", "ray_folder_in"]

MARK = "OMNILOAD_LAUNCH"
"""Environment variable that every process of a job inherits."""
_ROUND_S = 0.05
_PATIENCE_S = 30.0
_RAY_FOLDER_PREFIX = "omniload-ray-"


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


def end_all(job: str, folders: set[Path] | None = None) -> list[int]:
    """Kill every process that carries the job's mark, but the caller.

    Args:
        job: Value of the mark.
        folders: Gets the folder of each Ray process that is found.

    Returns:
        Process ids of those that were found, and may take a moment to end.
    """
    ended = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(MARK) == job:
                folder = ray_folder_in(process.cmdline())
                if folder is not None and folders is not None:
                    folders.add(folder)
                process.kill()
                ended.append(process.pid)
    return ended


def ray_folder_in(arguments: Sequence[str]) -> Path | None:
    """Return the folder of a job's own Ray that a command line names, if it does."""
    prefix = re.escape(f"{tempfile.gettempdir()}{os.sep}{_RAY_FOLDER_PREFIX}")
    for argument in arguments:
        if found := re.search(rf"{prefix}\w+", argument):
            return Path(found[0])
    return None


def clean_up(
    end: Callable[[set[Path]], list[int]],
    *,
    clock: Callable[[], float] = time.monotonic,
    wait: Callable[[float], object] = time.sleep,
) -> list[int]:
    """End what is left of a job, and remove the folders it used.

    Args:
        end: Kills what it finds, adds to the folders, and returns the process ids; as ``end_all``.
        clock: Seconds.
        wait: Waits that many seconds.

    Returns:
        Processes that would not end in time, such as those stuck in a disk's driver.
    """
    folders: set[Path] = set()
    until_s = clock() + _PATIENCE_S
    # A process that was being started may appear only now: look until none is found.
    while left := end(folders):
        if clock() >= until_s:
            break
        wait(_ROUND_S)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    return left


def main(job: str) -> None:
    """Wait for the launcher to end or to close the pipe, then end what is left of its job."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.read()
    if left := clean_up(lambda folders: end_all(job, folders)):
        sys.stderr.write(
            f"processes {left} of the job were killed and have not ended after {_PATIENCE_S:.0f} s; "
            "they wait for the kernel, look at the disk or the mount they use\n"
        )


if __name__ == "__main__":
    main(sys.argv[1])
