"""The first request of a connection: what kernel and daemon agree on. Arithmetic."""

import struct
from typing import NamedTuple

from fusefs.bridge.device.wire import MAJOR, OLDEST_MINOR, Init, init_reply
from omniload.base.errors import StateError

__all__ = ["MAX_PAGES", "Agreement", "agreement"]

MAX_PAGES = 256
"""Pages of the largest request: 1 MiB, the kernel's own limit unless its sysctl is raised."""
_WANTED = (
    Init.ASYNC_READ
    | Init.ATOMIC_O_TRUNC
    | Init.BIG_WRITES
    | Init.AUTO_INVAL_DATA
    | Init.DO_READDIRPLUS
    | Init.ASYNC_DIO
    | Init.PARALLEL_DIROPS
    | Init.MAX_PAGES
    | Init.HANDLE_KILLPRIV_V2
    | Init.INIT_EXT
    | Init.DIRECT_IO_ALLOW_MMAP
    | Init.PASSTHROUGH
)


class Agreement(NamedTuple):
    """What one connection does."""

    reply: bytes
    """Body of the answer to INIT."""
    flags: Init


def agreement(body: memoryview, *, max_background: int, pass_through: bool) -> Agreement:
    """Answer ``fuse_init_in``: everything wanted that the kernel offers.

    Args:
        body: The request.
        max_background: Requests the kernel may keep in flight.
        pass_through: Whether local copies may be handed to the kernel, as root can. It counts such a
            mount as a level of file systems, of which it stacks two on another.

    Raises:
        StateError: The kernel's protocol is too old.
    """
    major, minor, max_readahead, offered = struct.unpack_from("<4I", body)
    if (major, minor) < (MAJOR, OLDEST_MINOR):
        raise StateError(
            f"the kernel speaks FUSE {major}.{minor}, this bridge {MAJOR}.{OLDEST_MINOR} and later; "
            "mount with bridge=pyfuse3"
        )
    if offered & Init.INIT_EXT:
        (more,) = struct.unpack_from("<I", body, 16)
        offered |= more << 32
    flags = Init(_WANTED & offered)
    if not pass_through:
        flags &= ~Init.PASSTHROUGH
    reply = init_reply(
        minor=minor,
        max_readahead=max_readahead,
        agreed=flags,
        max_background=max_background,
        max_pages=MAX_PAGES,
    )
    return Agreement(reply, flags)
