"""Files that the kernel reads from a local copy by itself (FUSE_PASSTHROUGH, Linux 6.9, root), and notices to it.

The kernel wants all opens of such an inode alike: while it is open, every further open must name
the same backing file, and none may use the page cache. So there is one backing file for each
inode; the first open that brings a local copy registers it, and the last close removes it.
"""

import fcntl
import os
import struct
from dataclasses import dataclass
from typing import Any

from fusefs.bridge.device.wire import outdated_notice
from omniload.base.log import get_logger

__all__ = ["NO_PASSTHROUGH", "Passthrough"]

_LOG = get_logger(__name__)
_BACKING_OPEN = 0x4010E501
_BACKING_CLOSE = 0x4004E502
_BACKING_MAP = struct.Struct("<iIQ")
NO_PASSTHROUGH = {"agreed": False, "backings": [], "handles": []}
"""``Passthrough.state`` for a connection that another binding began, without passthrough."""


@dataclass(slots=True)
class _Backing:
    number: int
    opens: int


class Passthrough:
    """Backing files of one connection.

    Args:
        device: The connection's /dev/fuse.
        agreed: Whether kernel and daemon agreed on passthrough at the start.
    """

    def __init__(self, device: int, *, agreed: bool) -> None:
        self._device = device
        self.can_pass_through = agreed
        self._backings: dict[int, _Backing] = {}
        self._inodes: dict[int, int] = {}
        self._others: dict[int, int] = {}

    def passes_through(self, inode: int) -> bool:
        """Return whether an inode is open from its local copy now."""
        return inode in self._backings

    def outdated(self, inode: int) -> None:
        """Make the kernel ask again for the attributes of an inode."""
        try:
            os.write(self._device, outdated_notice(inode))
        except OSError as error:
            _LOG.debug("inode %s: %s", inode, error)  # ENOENT: the kernel has forgotten it

    def opened(self, inode: int, handle: int, local_fd: int | None) -> int | None:
        """Note an open and return the number of its backing file, or None for a normal open.

        Args:
            inode: The inode to open.
            handle: The new handle.
            local_fd: Descriptor of a local copy; closed here.
        """
        try:
            backing = self._backings.get(inode)
            # All opens of an inode must be alike: if one is read by this process, so is the next.
            if backing is None and local_fd is not None and inode not in self._others:
                backing = self._registered(inode, local_fd)
        finally:
            if local_fd is not None:
                # The kernel holds its own reference to a registered file.
                os.close(local_fd)
        self._inodes[handle] = inode
        if backing is None:
            self._others[inode] = self._others.get(inode, 0) + 1
            return None
        backing.opens += 1
        return backing.number

    def closed(self, handle: int) -> None:
        """Note that a handle is closed; the last one of an inode removes its backing file."""
        inode = self._inodes.pop(handle, None)
        if inode is None:
            return
        backing = self._backings.get(inode)
        if backing is None:
            self._others[inode] -= 1
            if not self._others[inode]:
                del self._others[inode]
            return
        backing.opens -= 1
        if not backing.opens:
            del self._backings[inode]
            self._give_up(backing.number)

    def state(self) -> dict[str, Any]:
        """Return the backing files as JSON values, because they belong to the connection, not to a process."""
        return {
            "agreed": self.can_pass_through,
            "backings": [[i, b.number, b.opens] for i, b in self._backings.items()],
            "handles": [[handle, inode] for handle, inode in self._inodes.items()],
        }

    def resume(self, state: dict[str, Any]) -> None:
        """Continue from ``state``."""
        self._backings = {i: _Backing(number, opens) for i, number, opens in state["backings"]}
        self._inodes = {pair[0]: pair[1] for pair in state["handles"]}
        # The state does not list these inodes: an open file without a backing file is read by this process.
        for inode in self._inodes.values():
            if inode not in self._backings:
                self._others[inode] = self._others.get(inode, 0) + 1

    def _registered(self, inode: int, local_fd: int) -> _Backing | None:
        if not self.can_pass_through:
            return None
        request = bytearray(_BACKING_MAP.pack(local_fd, 0, 0))
        try:
            number = fcntl.ioctl(self._device, _BACKING_OPEN, request, True)
        except OSError as error:
            # Not root, an old kernel, or a file system that cannot back another one: this process reads the file.
            _LOG.debug("inode %s is not passed through: %s", inode, error)
            self.can_pass_through = False
            return None
        return self._backings.setdefault(inode, _Backing(number, 0))

    def _give_up(self, number: int) -> None:
        try:
            fcntl.ioctl(self._device, _BACKING_CLOSE, bytearray(struct.pack("<I", number)), True)
        except OSError as error:
            _LOG.debug("backing %s stays registered: %s", number, error)
