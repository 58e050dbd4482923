"""Which inode the name of an open file leads to, when its path shows another version: a table.

The kernel keeps one page cache and one size for each inode, shared by all its handles. So an inode
that is being read shows one version for as long, and what this mount makes of it::

    the path shows       changed here   read by somebody   written only    passed through
    the same version     HERE           HERE               HERE            HERE
    another version      HERE           ELSEWHERE          ANEW            ELSEWHERE
    nothing              HERE           ELSEWHERE          ELSEWHERE       ELSEWHERE

An inode that nobody has open is in no row: it takes up whatever its path shows, and the next
open has the kernel drop its pages.

A look asks the store, which takes a while; what it found may be of no use by then::

    Seen --before--> HERE | ELSEWHERE, or the store is asked
    Seen again, and what its path shows --after--> a place of the table, or None: look again
"""

from dataclasses import dataclass
from enum import Enum, auto

from fusefs.tree.freshness import Shown
from fusefs.tree.open_versions import OpenVersion
from fusefs.vfs.file.open_file import OpenFile

__all__ = ["Leads", "Seen", "after", "before", "leads"]


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


@dataclass(frozen=True, slots=True)
class Seen:
    """What a look has to know of an inode, at one moment."""

    body: OpenFile | None
    """None where it is not open."""
    path: str | None = None
    """None once it has none."""
    version: OpenVersion | None = None
    """The version that it shows; None while it is changed here."""
    num_moves: int = 0
    """How often it was renamed."""
    is_changed: bool = False
    """Whether it has content, or attributes, that is not published."""
    is_replaced: bool = False
    """Whether its name leads elsewhere already."""
    is_leaving: bool = False
    """Whether its path is being renamed, removed or replaced from here."""
    num_readers: int = 0
    passes_through: bool = False


def before(seen: Seen) -> Leads | None:
    """Decide where a name leads without asking the store; None where its path has to be looked at.

    No look finds anything of use while this mount changes the file, or what has its name.
    """
    if seen.is_replaced:
        return Leads.ELSEWHERE
    if seen.version is None or seen.path is None or seen.is_leaving:
        return Leads.HERE
    return None


def after(asked: Seen, now: Seen, shown: Shown) -> Leads | None:
    """Decide where a name leads by what its path shows; None where that was asked of another state of things.

    Args:
        asked: The inode when the store was asked.
        now: The inode when it had answered.
        shown: The answer.
    """
    if (now.body, now.path, now.num_moves) != (asked.body, asked.path, asked.num_moves):
        return None
    if not now.is_changed and (now.version is not asked.version or now.is_leaving):
        return None
    return leads(
        shown,
        is_changed=now.is_changed,
        num_readers=now.num_readers,
        passes_through=now.passes_through,
    )
