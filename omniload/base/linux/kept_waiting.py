"""How long a thread was ready to run, and others had the cores."""

from contextlib import suppress
from pathlib import Path

__all__ = ["kept_waiting_s"]


def kept_waiting_s() -> float:
    """Return how long this thread has waited for a core so far: for other work, or for its own; 0 if nothing tells."""
    with suppress(OSError, IndexError):
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) * 1e-9
    return 0.0
