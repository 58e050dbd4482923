"""Memory for what a store reads: large reads get pages of their own, and huge ones where the kernel has them.

The first touch of a page is a trap into the kernel, and a large ``bytes`` object is new pages
each time: 4,096 traps for 16 MiB, which cost about as much as taking the bytes from a socket.
Memory mapped for huge pages costs eight.
"""

import mmap
from contextlib import suppress

__all__ = ["LARGE_BYTES", "huge_page_buffer"]

LARGE_BYTES = 2 << 20
"""From here on a mapping of its own pays: a huge page of the machines this is for."""


def huge_page_buffer(size_bytes: int) -> memoryview:
    """Return writable memory for one large read; it goes when the last view of it does."""
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)
