"""Which inode the name of an open file leads to, when its path shows another version: a table.

The kernel keeps one page cache and one size for each inode, shared by all its handles. So an inode
that is being read shows one version for as long, and what this mount makes of it::

    the path shows       changed here   read by somebody   written only    passed through
    the same version     HERE           HERE               HERE            HERE
    another version      HERE           ELSEWHERE          ANEW            ELSEWHERE
    nothing              HERE           ELSEWHERE          ELSEWHERE       ELSEWHERE

An inode that nobody has open is in no row: it takes up whatever its path shows, and the next
open has the kernel drop its pages.
"""

from enum import Enum, auto

from fusefs.tree.freshness import Shown

__all__ = ["Leads", "leads"]


class Leads(Enum):
    """Where a name leads from now on."""

    HERE = auto()
    """To the inode it leads to, as that is."""
    ANEW = auto()
    """To the same inode, which takes up what the path shows."""
    ELSEWHERE = auto()
    """To another inode, or to none: this one keeps its version, for its open handles."""


def leads(shown: Shown, *, is_changed: bool, num_readers: int, passes_through: bool) -> Leads:
    """Decide where the name of an open file leads.

    Args:
        shown: What its path shows.
        is_changed: Whether it is being changed here: the last to close wins, as POSIX has it within one mount.
        num_readers: Open handles that may read.
        passes_through: Whether the kernel reads it from its local copy.
    """
    if is_changed or shown is Shown.SAME:
        return Leads.HERE
    if shown is Shown.ANOTHER and not num_readers and not passes_through:
        return Leads.ANEW
    return Leads.ELSEWHERE
