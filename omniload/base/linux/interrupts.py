"""SIGINT while nothing has to be cleaned up: during the import of a command, and after it is over.

A ``KeyboardInterrupt`` is of no use there. It prints a traceback through the modules being imported; or it is lost,
because an interrupt in a callback of the import system is printed and ignored. This module is imported before that of
the command line, so it imports little itself.
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
"""Exit code of a command that SIGINT ended, as in shells."""


@contextmanager
def ending_when_interrupted() -> Iterator[None]:
    """Make SIGINT end the process at once inside, and raise ``KeyboardInterrupt`` again afterwards."""
    is_ours = end_when_interrupted()
    try:
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def end_when_interrupted() -> bool:
    """Make SIGINT end the process at once from now on; return whether this changed anything.

    A handler of another program stays, and an ignored signal stays ignored, as in a background job.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return False
    try:
        signal.signal(signal.SIGINT, end_as_interrupted)
    except ValueError:  # not the main thread, which alone has handlers
        return False
    return True


def end_as_interrupted(*_: object) -> None:
    """End the process at once with exit code 130; buffers are not written, as a write may have been interrupted."""
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED_EXIT)
