"""Handles: each open of a file, and each listing that is being read. Touched on the mount's loop only."""

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
    """Whether its close publishes: it may write, or its open made the file or cut it."""
    kept: bool
    """Whether what is read through it stays in the kernel's page cache."""


@dataclass(frozen=True, slots=True)
class Listing:
    """A directory as it was when it was opened."""

    lines: list[Listed]
    num_changes: int = 0
    """How many changes the mount had seen when it was asked for; none where another process opened it."""
    directory: Node | None = None
    """None for the store's own, and where another process opened it."""


class HandleTable:
    """Handles by number. A number is given once, whatever it is of."""

    def __init__(self) -> None:
        self.files: dict[int, Handle] = {}
        self.listings: dict[int, Listing] = {}
        self.newest = 1

    def new_number(self) -> int:
        """Return the number of a handle."""
        self.newest += 1
        return self.newest

    def open(self, node: Node, flags: int, *, is_new: bool = False) -> Opened:
        """Give a handle on a node that has a body; ``InodeTable.closed`` takes it back.

        Args:
            node: What is opened.
            flags: As of ``open``.
            is_new: Whether this open made the file, which shows nothing of it before a close.
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
        """Give a handle on a listing."""
        number = self.new_number()
        self.listings[number] = listing
        return Opened(number)
