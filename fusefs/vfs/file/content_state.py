"""The three states of an open file's content, and which one each use of it needs: a table.

::

    clean ----write at the end---> sequential ----flush---> clean
      |                                |
      +------- any other write --------+--> spooled ---flush (stays spooled)

                 written at the end   written elsewhere, cut   emptied       read
    clean        sequential           spooled                  sequential    clean
    sequential   sequential           spooled                  sequential    clean, or spooled
    spooled      spooled              spooled                  sequential    spooled

*Clean*: a version of the store, read through the cache. *Sequential*: bytes appended go
straight to the objects. *Spooled*: what was written lies in a local temporary file, over
the version underneath; a flush writes what changed as a segment of its own and splices it
in, or the whole file where that is better: HDFS and object stores only write front to back.
"""

from enum import Enum, auto

__all__ = ["ContentState", "to_be_flushed", "to_be_read", "to_be_resized", "to_be_written"]


class ContentState(Enum):
    """Where the bytes of an open file are."""

    CLEAN = auto()
    SEQUENTIAL = auto()
    SPOOLED = auto()


def to_be_written(state: ContentState, *, at_end: bool) -> ContentState:
    """Return the state that takes a write."""
    if state is not ContentState.SPOOLED and at_end:
        return ContentState.SEQUENTIAL
    return ContentState.SPOOLED


def to_be_resized(size_bytes: int) -> ContentState:
    """Return the state that takes a cut, or an extension with zeroes, from any state."""
    return ContentState.SPOOLED if size_bytes else ContentState.SEQUENTIAL


def to_be_read(state: ContentState, *, is_shown: bool) -> ContentState:
    """Return the state that can be read.

    Args:
        state: The state before.
        is_shown: Whether the store shows every byte at the file's path: then what was appended is open as
            it was published. Else it must come back from where it is on its way to.
    """
    if state is ContentState.SEQUENTIAL:
        return ContentState.CLEAN if is_shown else ContentState.SPOOLED
    return state


def to_be_flushed(state: ContentState, *, last: bool) -> ContentState:
    """Return the state after a flush; with ``last`` false, writing likely goes on."""
    return ContentState.CLEAN if last and state is ContentState.SEQUENTIAL else state
