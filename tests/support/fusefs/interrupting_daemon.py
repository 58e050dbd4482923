"""A daemon that interrupts the process that starts it, as Ctrl-C does, and never becomes ready.

``python -m tests.support.fusefs.interrupting_daemon READY_FD FILE [stubborn]``. When SIGTERM asks it to end, it says
so in FILE and ends, unless it is stubborn.
"""

import os
import signal
import sys
from pathlib import Path

from fusefs.bridge.process.launch import run_daemon


def serve(settings, ready):
    def end(number, frame):
        Path(sys.argv[2]).write_text(f"{os.getpid()} told to end by {number}", encoding="utf-8")
        if "stubborn" not in sys.argv:
            sys.exit(0)

    signal.signal(signal.SIGTERM, end)
    os.kill(os.getppid(), signal.SIGINT)
    while True:
        signal.pause()


if __name__ == "__main__":
    run_daemon(serve, role="interrupting")
