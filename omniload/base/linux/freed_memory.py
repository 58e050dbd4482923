"""How much freed memory a process keeps, in addition to what Arrow keeps: see ``MIMALLOC_PURGE_DELAY``.

The GNU C library returns the end of its heap once about 128 KiB of it are free. A process that repeatedly allocates
and frees a few megabytes of arrays, as each read of a source does, then gets new pages each time, which the kernel has
to clear.
"""

import os
from contextlib import suppress

from omniload.base.linux import calls

__all__ = ["keep_freed"]

_MOST_BYTES = 32 << 20
"""Free bytes at the end of a heap; every few threads share one heap. By its own rule, the library reaches twice as
much."""
_YOURS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
"""Variables of the user; if one of them is set, the library follows it."""


def keep_freed() -> None:
    """Make this process keep up to 32 MiB of freed memory for later allocations; without effect in other C libraries.

    Settings in the environment take precedence, because a process of the local runtime belongs to the trainer.
    """
    if any(name in os.environ for name in _YOURS):
        return
    with suppress(OSError):  # another C library
        # Both are needed: if only one is set, the library stops adapting the other to what is freed.
        calls.mallopt(calls.M_MMAP_THRESHOLD, _MOST_BYTES // 2)
        calls.mallopt(calls.M_TRIM_THRESHOLD, _MOST_BYTES)
