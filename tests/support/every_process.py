"""All processes of this machine, as they are now."""

from collections.abc import Iterator
from contextlib import suppress

import psutil

__all__ = ["every_process"]


def every_process() -> Iterator[psutil.Process]:
    """Return all processes, without what psutil remembers about earlier processes with the same numbers.

    ``psutil.process_iter`` keeps its objects between two calls. If a test suite has started more processes than there
    are process numbers, a kept object may stand for a different process, which then refuses signals.
    """
    for pid in psutil.pids():
        with suppress(psutil.Error):  # it has ended meanwhile
            yield psutil.Process(pid)
