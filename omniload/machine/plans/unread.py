"""Reads that failed: they end the run before the first step that needs their samples, and no earlier."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from omniload.base.errors import OmniloadError

if TYPE_CHECKING:  # messages, which queues hold, name what is here
    from omniload.machine.queue import SampleQueue

__all__ = ["ReadFailed", "Unread"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadFailed:
    """A read of a source failed; no planned step needs its samples."""

    source: int
    start: int
    """First raw position of the read."""
    without: tuple[int, ...] = ()
    """Shards that the read left out."""
    error: OmniloadError


@dataclass(slots=True, kw_only=True)
class Unread:
    """Errors of the sources whose next records cannot be read; no further reads of these are requested."""

    errors: dict[int, OmniloadError] = field(default_factory=dict)
    """By the number of the source."""

    def __contains__(self, source: int) -> bool:
        return source in self.errors

    def note(self, failed: ReadFailed, queue: "SampleQueue") -> bool:
        """Note a failure; return whether it concerns the read that is currently requested from ``queue``.

        After an edit that leaves a shard out, the source is read again; a failure of the earlier read means nothing.
        """
        is_of_now = queue.is_asked and failed.start == queue.table.stop
        if not is_of_now or failed.without != queue.without_from(failed.start):
            return False
        queue.asked_to = queue.table.stop
        self.errors[failed.source] = failed.error
        return True

    def forget(self) -> None:
        """Allow reads of all sources again, because an edit may leave out what could not be read."""
        self.errors.clear()
