"""Records that cannot be read or decoded: they end the run before the first step that needs them, and no earlier.

Shape suffixes:
    S  sources        N  bad records of a source
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from omniload.base.errors import IntegrityError, OmniloadError
from omniload.mix.edits.history import History
from omniload.mix.state import MixState

if TYPE_CHECKING:  # messages, which queues hold, name what is here
    from omniload.machine.queue import SampleQueue

__all__ = ["BadRecords", "ReadFailed", "Unread"]


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


@dataclass(slots=True, kw_only=True)
class BadRecords:
    """Counts undecodable records as steps pass them, and decides when ``on_error`` ends the run.

    Only the order of the mix matters. So a run ends before the same step after any kills, moves and resumes, however
    far loaders had read ahead. Each epoch is counted anew, because it holds the same records. If two sources have too
    many in one step, either may be named.
    """

    queues: "Sequence[SampleQueue]"
    """Known samples of each source; the list grows as sources are added."""
    over: dict[int, IntegrityError] = field(default_factory=dict)
    """Error of each source with more known bad records than allowed. It ends the run before a step that needs more of
    the source than is known, because such a step passes all of these records."""
    excess: OmniloadError | None = None
    """Why there is no further step; also set where a step is refused for another reason."""
    _sources: set[int] = field(default_factory=set)
    """Sources that may have bad records, usually few; only these are looked at."""
    _revision: int = -1
    """Revision of the mix at the last look."""

    def update(
        self, changed: Iterable[int], history: History, state: MixState, records_S: Sequence[int]
    ) -> None:
        """Determine anew which of the changed sources are ``over``.

        Steps do not change the answer, because the state counts the records that they pass. Edits may change it for any
        source, as they leave out shards.
        """
        if state.mix_revision != self._revision:
            self._revision, changed = state.mix_revision, range(len(self.queues))
        for s in changed:
            known_N = self.queues[s].table.bad_N
            if len(known_N) or state.bad_of(s):
                self._sources.add(s)
            if s in self._sources:
                self.over.pop(s, None)
                if (excess := self._excess(history, s, state, known_N, records_S[s])) is not None:
                    self.over[s] = excess

    def pass_step(
        self, history: History, before: MixState, after: MixState, records_S: Sequence[int]
    ) -> tuple[dict[int, int], MixState]:
        """Pass the bad records of a step; return how many each source has, and the state after the step.

        If a source has more than ``on_error`` allows, ``excess`` is set and the step must not be published.
        """
        passed, counts = dict[int, int](), dict[int, int]()
        for s in sorted(self._sources):
            # A source that is read ahead of its edit has no cursor yet.
            if s >= len(after.cursors_S) or after.cursors_S[s] == before.cursors_S[s]:
                continue
            position, records = after.cursors_S[s][0], records_S[s]
            passed_N = self.queues[s].bad_before(position)
            if len(passed_N):
                passed[s] = len(passed_N)
            elif s not in self.over and before.cursors_S[s][0] // records == position // records:
                continue  # the usual case
            if s in self.over and self.excess is None:
                self.excess = self._excess(history, s, before, passed_N, records)
            epoch, known = position // records, before.bad_of(s)
            if before.cursors_S[s][0] // records == epoch:
                counts[s] = known + len(passed_N)
            else:
                counts[s] = len(passed_N) - int(passed_N.searchsorted(epoch * records))
        # With an excess the step is not published, and an edit may still change its content.
        for s in passed if self.excess is None else ():
            self.queues[s].pass_to(after.cursors_S[s][0])
        if after.bad_S != before.bad_S:  # these are the counts at the beginning of its window
            after = replace(after, bad_S=before.bad_S)
        return passed, after.with_bad(counts)

    def _excess(
        self,
        history: History,
        source: int,
        before: MixState,
        known_N: NDArray[np.int64],
        records: int,
    ) -> IntegrityError | None:
        """Return the error of a source with too many bad records, if it has.

        Args:
            history: The mix and its edits.
            source: Number of the source.
            before: A state.
            known_N: Raw positions of the bad records after it.
            records: Records of an epoch.
        """
        name = history.latest.names[source]
        declared = history.latest.sources.get(name)
        if declared is None:
            return None
        allowed = declared.on_error.most_of(records)
        of_epoch = _by_epoch(before, source, known_N, records)
        epoch = min((each for each, count in of_epoch.items() if count > allowed), default=None)
        if epoch is None:
            return None
        # The first excess in the order of the mix, so that it is the same however far loaders had read.
        own_N = known_N[known_N // records == epoch]
        at = allowed - (of_epoch[epoch] - len(own_N))
        table = self.queues[source].table
        # After an edit that lowers the limit, the record may be one that was logged long ago.
        place = table.place_of(int(own_N[at])) if at >= 0 else ""
        reason = table.reason or "told in the log as it was left out"
        return declared.on_error.excess(name, records, reason, place)


def _by_epoch(
    before: MixState, source: int, passed_N: NDArray[np.int64], records: int
) -> Counter[int]:
    """Count bad records by epoch: those after a state, plus earlier ones of the state's own epoch."""
    counts = Counter((passed_N // records).tolist())
    if known := before.bad_of(source):
        counts[before.cursors_S[source][0] // records] += known
    return counts
