"""Reads that failed: what they were to bring is missed by the step that needs it, and by none before."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from omniload.base.errors import OmniloadError

if TYPE_CHECKING:  # messages, which queues hold, name what is here
    from omniload.machine.queue import SampleQueue

__all__ = ["ReadFailed", "Unread"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadFailed:
    """A read of a source failed: no step that is planned already needs it."""

    source: int
    start: int
    """First raw position that was asked for."""
    without: tuple[int, ...] = ()
    """Shards that were to be left out."""
    error: OmniloadError


@dataclass(slots=True, kw_only=True)
class Unread:
    """Keeps what is wrong with sources that cannot be read on: nothing more of them is asked for."""

    errors: dict[int, OmniloadError] = field(default_factory=dict)
    """By the number of the source."""

    def __contains__(self, source: int) -> bool:
        return source in self.errors

    def note(self, failed: ReadFailed, queue: "SampleQueue") -> bool:
        """Note a failure, and return whether it is of what is asked for now; ``queue`` is that of its source.

        A read that was asked for again meanwhile, as an edit leaves a shard out, says nothing of that.
        """
        is_of_now = queue.is_asked and failed.start == queue.table.stop
        if not is_of_now or failed.without != queue.without_from(failed.start):
            return False
        queue.asked_to = queue.table.stop
        self.errors[failed.source] = failed.error
        return True

    def forget(self) -> None:
        """Have all sources read on: an edit may leave out what could not be read."""
        self.errors.clear()
