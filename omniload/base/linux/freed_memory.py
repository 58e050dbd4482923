"""What a process keeps of the memory that it frees, beside what Arrow keeps: see ``MIMALLOC_PURGE_DELAY``.

The GNU C library gives the end of its heap back once 128 KiB or so of it are free. Whoever makes and lets go of a few
megabytes of arrays at a time, as each read of a source does, has them on new pages each time, which the kernel clears.
"""

import os
from contextlib import suppress

from omniload.base.linux import calls

__all__ = ["keep_freed"]

_MOST_BYTES = 32 << 20
"""Free at the end of a heap, of which each few threads have one. By itself the library comes to twice as much."""
_YOURS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
"""Where one of them is set, the library goes by that."""


def keep_freed() -> None:
    """Have this process keep up to 32 MiB of what it frees, for what it makes next; elsewhere than there nothing.

    What the environment says of it stands: a process of the local runtime is the trainer's own.
    """
    if any(name in os.environ for name in _YOURS):
        return
    with suppress(OSError):  # another C library
        # Both: said of one alone, the other no longer goes by what is freed.
        calls.mallopt(calls.M_MMAP_THRESHOLD, _MOST_BYTES // 2)
        calls.mallopt(calls.M_TRIM_THRESHOLD, _MOST_BYTES)
