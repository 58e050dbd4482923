"""SIGINT where nothing has to be cleaned up: while a command is imported, and once it is over.

A ``KeyboardInterrupt`` is of no use there. It is a traceback through whatever was imported; or it is lost, as
one that comes in a callback of the import system is printed and ignored. This module is imported before
that of the command line, so it imports little itself.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = [
    "INTERRUPTED_EXIT",
    "end_as_interrupted",
    "end_when_interrupted",
    "ending_when_interrupted",
]

INTERRUPTED_EXIT = 130
"""Exit code of a command that SIGINT ended, as a shell gives it."""


@contextmanager
def ending_when_interrupted() -> Iterator[None]:
    """Have SIGINT end the process at once inside, and raise ``KeyboardInterrupt`` again behind."""
    is_ours = end_when_interrupted()
    try:
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def end_when_interrupted() -> bool:
    """Have SIGINT end the process at once from now on; return whether it did not before.

    A handler of somebody else stays, and the signal stays ignored where it is, as in a job in the background.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return False
    try:
        signal.signal(signal.SIGINT, end_as_interrupted)
    except ValueError:  # not the main thread, which alone has handlers
        return False
    return True


def end_as_interrupted(*_: object) -> None:
    """End the process at once with exit code 130; buffers stay unwritten, for a write may be what was interrupted."""
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED_EXIT)
