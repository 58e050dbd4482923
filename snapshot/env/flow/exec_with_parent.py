"""Becomes a command that gets SIGTERM when its parent is killed; run as a file, with the standard library only.

Done by a process of its own between parent and command: code between fork and exec of a
process with threads (a store's client has some, gRPC's react to forks) may hang or fail.
"""

import ctypes
import os
import signal
import sys

__all__ = ["CANNOT_RUN", "become"]

CANNOT_RUN = 126
"""Exit code where the command cannot be run, as shells have it."""
_PR_SET_PDEATHSIG = 1


def become(parent: int, words: list[str]) -> int:
    """Turn this process into a command; return its exit code where that fails.

    Args:
        parent: Process whose death ends the command (SIGTERM).
        words: The command; its program is looked for on ``PATH``.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it died before it could be followed
        return 128 + signal.SIGTERM
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores them, and exec hands that on
    try:
        os.execvp(words[0], words)  # noqa: S606 -- the user's own command
    except OSError as error:
        sys.stderr.write(f"{words[0]}: {error.strerror}\n")
        return CANNOT_RUN


if __name__ == "__main__":
    sys.exit(become(int(sys.argv[1]), sys.argv[2:]))
