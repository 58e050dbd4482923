"""What a process keeps of the memory that it frees, beside what Arrow keeps: see ``MIMALLOC_PURGE_DELAY``.

The GNU C library gives the end of its heap back once 128 KiB or so of it are free. Whoever makes and lets go of a few
megabytes of arrays at a time, as each read of a source does, has them on new pages each time, which the kernel clears.
"""

from contextlib import suppress

from omniload.base.linux import calls

__all__ = ["keep_freed"]

_MOST_BYTES = 32 << 20
"""Free at the end of a heap, of which each few threads have one. By itself the library comes to twice as much."""


def keep_freed() -> None:
    """Have this process keep up to 32 MiB of what it frees, for what it makes next; elsewhere than there nothing."""
    with suppress(OSError):  # another C library
        # Both: said of one alone, the other no longer goes by what is freed.
        calls.mallopt(calls.M_MMAP_THRESHOLD, _MOST_BYTES // 2)
        calls.mallopt(calls.M_TRIM_THRESHOLD, _MOST_BYTES)
