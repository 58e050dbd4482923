"""Names in the abstract namespace, by which processes of this machine find the daemon of a mount.

Such a name leaves no file behind that could outlive its daemon. But any user may take a name, so an
answering process is trusted only if the kernel says that it belongs to the expected user, or to root.
"""

import hashlib
import os
import socket
from pathlib import Path

from omniload.base.linux.socket_peer import peer_of

__all__ = ["address_of", "is_taken", "peer_name"]

_NAMES = Path("/proc/net/unix")


def address_of(kind: str, target: str, uid: int) -> bytes:
    """Return the name at which a mount of a user answers.

    Args:
        kind: Kind of service that answers at the address.
        target: Real path of the mount point.
        uid: The user of the mount.
    """
    # Use a digest: a name in the abstract namespace has at most 107 bytes, a path may have more.
    place = hashlib.sha256(os.fsencode(target)).hexdigest()[:32]
    return f"\0omniload-{kind}-{uid}-{place}".encode()


def peer_name(peer: socket.socket) -> str:
    """Return a description of the process at the other end of a connection."""
    pid, uid = peer_of(peer)
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
