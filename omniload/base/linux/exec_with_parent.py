"""Ends with its parent, however the parent ends: a process of ours, or a command that a process becomes.

Run as a file, it becomes the command and uses only the standard library. The reason is that code between fork and exec
of a process with threads may hang or fail; a store's client has threads, and gRPC's react to forks.
"""

import ctypes
import os
import signal
import sys

__all__ = ["CANNOT_RUN", "become", "end_with_parent"]

CANNOT_RUN = 126
"""Exit code if the command cannot be run, as in shells."""
_PR_SET_PDEATHSIG = 1


def end_with_parent(number: int, parent: int | None = None) -> bool:
    """Make the kernel send this process a signal when its parent ends; return whether the parent still lives.

    Args:
        number: The signal.
        parent: Process id of the parent, as the parent knows it. If the parent ended before this call, this process
            has another parent. None: the parent is not checked. Parent 1 does not prove this, because a launcher may
            be process 1 in a container.
    """
    # Before the check of the parent, so that a parent that ends in between is noticed by one of both.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    return parent is None or os.getppid() == parent


def become(parent: int, words: list[str]) -> int:
    """Turn this process into a command; return its exit code if that fails.

    Args:
        parent: Process whose end ends the command (SIGTERM).
        words: The command; its program is searched on ``PATH``.
    """
    if not end_with_parent(signal.SIGTERM, parent):
        return 128 + signal.SIGTERM
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores them, and exec passes that on
    try:
        os.execvp(words[0], words)  # noqa: S606 -- the user's own command
    except OSError as error:
        sys.stderr.write(f"{words[0]}: {error.strerror}\n")
        return CANNOT_RUN


if __name__ == "__main__":
    sys.exit(become(int(sys.argv[1]), sys.argv[2:]))
