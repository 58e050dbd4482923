"""Ends with its parent, however that ends: a process of ours, or a command that a process becomes.

Run as a file it becomes the command, with the standard library only: code between fork and exec of a
process with threads (a store's client has some, gRPC's react to forks) may hang or fail.
"""

import ctypes
import os
import signal
import sys

__all__ = ["CANNOT_RUN", "become", "end_with_parent"]

CANNOT_RUN = 126
"""Exit code where the command cannot be run, as shells have it."""
_PR_SET_PDEATHSIG = 1


def end_with_parent(number: int, parent: int | None = None) -> bool:
    """Have the kernel send this process a signal when its parent ends; return whether that still lives.

    Args:
        number: The signal.
        parent: The parent, as it knows itself: one that ended before this call has left another
            one. None: it is not looked at. That it is process 1 says nothing: in a container a
            launcher may be it.
    """
    # Before the look at the parent, so that one which ends in between is noticed by either.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    return parent is None or os.getppid() == parent


def become(parent: int, words: list[str]) -> int:
    """Turn this process into a command; return its exit code where that fails.

    Args:
        parent: Process whose death ends the command (SIGTERM).
        words: The command; its program is looked for on ``PATH``.
    """
    if not end_with_parent(signal.SIGTERM, parent):
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
