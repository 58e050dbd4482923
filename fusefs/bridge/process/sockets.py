"""Names in the abstract namespace, by which processes of this machine find the daemon of a mount.

Such a name leaves no file behind that could outlive its daemon. But any user may take one, so a process that
answers counts only if the kernel says that it is the user expected, or root.
"""

import hashlib
import os
import socket
import struct
from pathlib import Path

__all__ = ["address_of", "credentials_of", "is_taken", "peer_name"]

_PEER = struct.Struct("3i")
_NAMES = Path("/proc/net/unix")


def address_of(kind: str, target: str, uid: int) -> bytes:
    """Return the name at which a mount of a user answers.

    Args:
        kind: Kind of service that answers at the address.
        target: Real path of the mount point.
        uid: The user of the mount.
    """
    # A digest: a name in the abstract namespace has 107 bytes at most, a path any number.
    place = hashlib.sha256(os.fsencode(target)).hexdigest()[:32]
    return f"\0omniload-{kind}-{uid}-{place}".encode()


def credentials_of(peer: socket.socket) -> tuple[int, int]:
    """Return process and user at the other end of a connection, as they were when it was made."""
    pid, uid, _ = _PEER.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, uid


def peer_name(peer: socket.socket) -> str:
    """Return the other end of a connection in words."""
    pid, uid = credentials_of(peer)
    return f"process {pid} of user {uid}"


def is_taken(address: bytes) -> bool:
    """Return whether some process has a name, whether or not it answers there."""
    try:
        names = _NAMES.read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    # /proc shows the zero byte that such a name begins with as "@".
    shown = address.decode().replace("\0", "@")
    return any(line.endswith(f" {shown}") for line in names.splitlines())
