"""Ending with one's parent, however that ends. Linux."""

import ctypes
import os
import signal

__all__ = ["die_with"]

_PR_SET_PDEATHSIG = 1


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends.

    Args:
        parent_pid: The parent, as it knows itself. A parent that ended before this call
            leaves another one, and then this process is killed here. That the parent is
            process 1 says nothing: in a container the launcher may be it.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)
