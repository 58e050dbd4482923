"""Memory for reads of a store: large reads get pages of their own, and huge pages if the kernel has them.

The first touch of a page is a trap into the kernel, and a large ``bytes`` object consists of new pages
each time: 4,096 traps for 16 MiB, which cost about as much as reading the bytes from a socket.
Memory that is mapped with huge pages needs eight.
"""

import mmap
from contextlib import suppress

__all__ = ["LARGE_BYTES", "huge_page_buffer"]

LARGE_BYTES = 2 << 20
"""Size from which a separate mapping pays off: one huge page of the usual machines."""


def huge_page_buffer(size_bytes: int) -> memoryview:
    """Return writable memory for one large read; it is freed with the last view of it."""
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # the kernel may have no huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)
