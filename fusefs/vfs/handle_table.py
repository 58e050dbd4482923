"""Handles: each open of a file, and each listing that is being read. Used on the mount's loop only."""

import os
from dataclasses import dataclass

from fusefs.bridge.api.protocol import Entry, Opened, only_reads
from fusefs.vfs.file.open_file import OpenFile
from fusefs.vfs.inode_table import Node

__all__ = ["Handle", "HandleTable", "Listed", "Listing"]

Listed = tuple[str, Entry, Node | None]
"""One line of a listing."""


@dataclass(slots=True)
class Handle:
    """One open of a file."""

    node: Node
    body: OpenFile
    appends: bool
    reads: bool
    writes: bool
    """Whether its close publishes: it may write, or its open created or truncated the file."""
    kept: bool
    """Whether bytes read through it stay in the kernel's page cache."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The listing of a directory at the time of its open."""

    lines: list[Listed]
    num_changes: int = 0
    """Number of changes in the mount when the listing was requested; 0 if another process opened it."""
    directory: Node | None = None
    """Directory; None for the mount's own directory, or if another process opened it."""


class HandleTable:
    """Handles by number. Each number is given only once, to a file or a listing."""

    def __init__(self) -> None:
        self.files: dict[int, Handle] = {}
        self.listings: dict[int, Listing] = {}
        self.newest = 1

    def new_number(self) -> int:
        """Return a new number for a handle."""
        self.newest += 1
        return self.newest

    def open(self, node: Node, flags: int, *, is_new: bool = False) -> Opened:
        """Return a handle on a node that has a body; ``InodeTable.closed`` takes it back.

        Args:
            node: The node to open.
            flags: Same as for ``open``.
            is_new: Whether this open created the file, of which the store shows nothing before a close.
        """
        assert node.body is not None
        number = self.new_number()
        self.files[number] = Handle(
            node,
            node.body,
            appends=bool(flags & os.O_APPEND),
            reads=flags & os.O_ACCMODE != os.O_WRONLY,
            writes=is_new or not only_reads(flags),
            kept=not flags & os.O_DIRECT,
        )
        node.opened(reads=self.files[number].reads, writes=self.files[number].writes)
        return Opened(number)

    def list(self, listing: Listing) -> Opened:
        """Return a handle on a listing."""
        number = self.new_number()
        self.listings[number] = listing
        return Opened(number)
