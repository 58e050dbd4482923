"""All processes of this machine, as they are now."""

from collections.abc import Iterator
from contextlib import suppress

import psutil

__all__ = ["every_process"]


def every_process() -> Iterator[psutil.Process]:
    """Return all processes, none by what was known of its number before.

    ``psutil.process_iter`` keeps them between two looks. Where a suite has started as many as there are numbers, one
    that is found so is another one by now, and takes no signal.
    """
    for pid in psutil.pids():
        with suppress(psutil.Error):  # it has ended meanwhile
            yield psutil.Process(pid)
