"""The process at the other end of a local socket, as the kernel recorded it when the connection began."""

import socket
import struct
from typing import Any

__all__ = ["peer_of"]

_CREDENTIALS = struct.Struct("3i")
"""Format of a peer's process, user and group."""


def peer_of(connection: Any) -> tuple[int, int]:  # noqa: ANN401 -- sockets of Python and of trio
    """Return process and user at the other end of a Unix socket; process 0 if it is in another container.

    Raises:
        OSError: The socket is not connected.
    """
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid
