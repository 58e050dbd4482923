"""Becomes a command that nobody waits for; run as a file, with the standard library only.

The process that starts this one waits for it alone. Its child, which the command becomes, is of
nobody: a program that takes the starter's place by exec has no child that it does not know.
"""

import ctypes
import os
import platform
import sys

__all__ = ["detach"]

_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_THIS_PROCESS, _IDLE = 1, 3 << 13


def detach(words: list[str]) -> None:
    """Run a command in a process of no parent, at the lowest priority of processor and disk."""
    if os.fork():
        os._exit(0)
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:  # a disk scheduler without classes passes over it
        ctypes.CDLL(None).syscall(number, _THIS_PROCESS, 0, _IDLE)
    os.execv(words[0], words)  # noqa: S606 -- the words of the starter


if __name__ == "__main__":
    detach(sys.argv[1:])
