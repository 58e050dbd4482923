"""The states of an open file: the place of its bytes, and its changes that the store does not show yet. No I/O.

The content has three states, and a table gives the state that each use needs:

::

    clean ----write at the end---> sequential ----flush---> clean
      |                                |
      +------- any other write --------+--> spooled ---flush (stays spooled)

                 written at the end   written elsewhere, cut   emptied       read
    clean        sequential           spooled                  sequential    clean
    sequential   sequential           spooled                  sequential    clean, or spooled
    spooled      spooled              spooled                  sequential    spooled

*Clean*: a version of the store, read through the cache. *Sequential*: appended bytes go
straight to the objects. *Spooled*: written bytes are in a local temporary file, over
the version below. A flush writes the changes as a segment of its own and splices it
in, or writes the whole file if that is better, because HDFS and object stores only write front to back.

Content, or attributes alone, may wait to be published:

::

    shown ---attributes---> attributes ---content---> content
      |                         |                        |
      |<------- flushed --------+----------<-------------+
      +--------content---------------------------------->+

A file whose path shows a version of another mount is *replaced*: it can be read, but not changed any more.
"""

import errno
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from fusefs.format.attributes import Attributes

__all__ = [
    "ContentState",
    "Flush",
    "Unpublished",
    "to_be_flushed",
    "to_be_read",
    "to_be_resized",
    "to_be_written",
]


class Flush(Enum):
    """The kind of content that a flush has to publish."""

    NOTHING = auto()
    ATTRIBUTES = auto()
    CONTENT = auto()


@dataclass(slots=True)
class Unpublished:
    """Unpublished changes of one open file."""

    path: str | None
    """Path at which the file is published; None once it is unlinked or replaced."""
    change_ns: int
    """Time of the last change of content."""
    dirty: bool
    """Whether content or attributes are unpublished."""
    published: bool
    """Whether the store shows some version of this file at ``path``."""
    attributes: Attributes = field(default_factory=Attributes)
    only_attributes: bool = False
    """Whether only attributes are unpublished."""
    replaced: bool = False
    """Whether its path shows a version of another mount."""

    @property
    def mtime_ns(self) -> int:
        """Time of the last change of content, or the time that was set since."""
        set_to = self.attributes.mtime_ns
        return set_to if set_to is not None else self.change_ns

    @property
    def is_shown(self) -> bool:
        """Whether the store shows the whole file at its path."""
        return not self.dirty and self.path is not None

    def check_changes(self) -> None:
        """Check that the file may change.

        Raises:
            OSError: ``ESTALE``: another mount replaced it.
        """
        if self.replaced:
            raise OSError(errno.ESTALE, "another mount replaced the file; open it again")

    def content_changed(self, now_ns: int) -> None:
        """Note a change of content, which sets its own time."""
        self.only_attributes = False
        self.change_ns = now_ns
        # A time that was set belongs to the content before this change: ``tar`` sets it after its last write.
        if self.attributes.mtime_ns is not None:
            self.attributes = replace(self.attributes, mtime_ns=None)
        self.dirty = True

    def attributes_changed(self, attributes: Attributes) -> None:
        """Note attributes that go out with the next flush."""
        self.attributes = replace(self.attributes, **attributes.given)
        # If content is pending, the attributes go out with it, in one manifest.
        self.only_attributes = self.only_attributes or not self.dirty
        self.dirty = True

    def flush(self) -> Flush:
        """Return what a flush has to publish. An unlinked file is not published.

        Raises:
            OSError: ``ESTALE``: another mount replaced the file that was changed here.
        """
        if not self.dirty:
            return Flush.NOTHING
        if self.path is not None and self.only_attributes:
            return Flush.ATTRIBUTES
        self.check_changes()
        return Flush.CONTENT if self.path is not None else Flush.NOTHING

    def flushed(self) -> None:
        """Note that the result of ``flush`` was published, or that attributes found their version gone."""
        self.only_attributes = self.dirty = False
        self.published = True

    def opened(self, mtime_ns: int) -> None:
        """Note that a version of the store replaced the content, so nothing is pending."""
        self.attributes = Attributes()
        self.change_ns = mtime_ns

    def unlinked(self) -> None:
        """Note that the file lost its path, so it is not published."""
        self.path = None

    def replaced_elsewhere(self) -> None:
        """Leave the path to another version; this one can be read as long as its objects exist."""
        self.path, self.replaced = None, True


class ContentState(Enum):
    """The kind of content that holds the bytes of an open file."""

    CLEAN = auto()
    SEQUENTIAL = auto()
    SPOOLED = auto()


def to_be_written(state: ContentState, *, at_end: bool) -> ContentState:
    """Return the state that takes a write."""
    if state is not ContentState.SPOOLED and at_end:
        return ContentState.SEQUENTIAL
    return ContentState.SPOOLED


def to_be_resized(size_bytes: int) -> ContentState:
    """Return the state that can truncate, or extend with zeroes, from any state."""
    # An emptied file needs none of its bytes, so a file that is written anew needs no spool.
    return ContentState.SPOOLED if size_bytes else ContentState.SEQUENTIAL


def to_be_read(state: ContentState, *, is_shown: bool) -> ContentState:
    """Return the state that can be read.

    Args:
        state: The state before.
        is_shown: Whether the store shows every byte at the file's path: then appended bytes are read from the
            published version. Otherwise they must be read back from where they were sent.
    """
    if state is ContentState.SEQUENTIAL:
        return ContentState.CLEAN if is_shown else ContentState.SPOOLED
    return state


def to_be_flushed(state: ContentState, *, last: bool) -> ContentState:
    """Return the state after a flush; with ``last`` false, writing will probably continue."""
    return ContentState.CLEAN if last and state is ContentState.SEQUENTIAL else state
