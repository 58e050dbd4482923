"""Queues of the samples that loaders have reported and no step has drawn, and the choice of what to read next."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from omniload.base.errors import ConfigError
from omniload.machine.messages import ReadAhead, TakeOver
from omniload.mix.edits.history import History
from omniload.mix.samples import SampleTable
from omniload.mix.state import Cursor, MixState
from omniload.plan.membership import Membership

__all__ = [
    "SampleQueue",
    "commands_of_take_over",
    "draw_window",
    "end_of",
    "enter_step",
    "queues_of",
    "require_below_cap",
    "require_usable",
]

_FIRST_READ, _LIKELY_TOKENS = 16, 256
"""Records of the first read, before their length is known, and the tokens that each is assumed to have if there are
many sources. The read is small and stays within one epoch, because a single record may hold a million tokens."""
_LARGEST_READ = 1 << 16
_FEW_READ, _MOST_GROWTH = 256, 16
"""Limits of a read until a whole epoch was seen: so many records, or so many times the records seen. The first records
of a file that is sorted by length say little about the others."""
_SMALL_READ = 1024
"""A read may have this many records even if the source has fewer: several epochs per request cost fewer requests."""


@dataclass(slots=True, kw_only=True)
class SampleQueue:
    """Samples of one source that were reported and not drawn yet, in position order."""

    table: SampleTable
    """The samples; ``table.stop`` is the first raw position not yet reported."""
    tokens: int = 0
    """Tokens in ``table``."""
    asked_to: int = 0
    """End of the requested range; equal to ``table.stop`` if no request is under way."""
    reach: int = 0
    """End of the positions of carried pieces; a resumed run reads them again even where all samples were drawn."""
    checked_to: int = -1
    """Last position that the resumed state says anything about, and that is checked against it."""
    without: tuple[int, ...] = ()
    """Shards from which nothing is drawn."""
    since: int = 0
    """Position from which on these shards are left out; records before it may belong to any shard."""
    needed: tuple[int, ...] = ()
    """Positions that are read whatever their shard: those of carried pieces, and of a partly drawn record."""
    seen_positions: int = field(default=0, init=False)
    """Raw positions reported so far."""
    _seen_samples: int = field(default=0, init=False)
    _seen_tokens: int = field(default=0, init=False)
    _seen_bytes: int = field(default=0, init=False)
    shortest: int | None = field(default=None, init=False)
    """Tokens of the shortest sample reported so far; ``None`` before the first one."""

    @classmethod
    def at(cls, position: int) -> "SampleQueue":
        """Return an empty queue whose first report will start at raw ``position``."""
        return cls(table=SampleTable.empty(position), asked_to=position)

    def _read_from(self, start: int) -> tuple[float, tuple[int, ...]]:
        """Return the latest end of a read that begins at ``start``, and the shards that it leaves out.

        Before ``since``, needed records may belong to any shard, so the shards are read there. Ranges far from a needed
        record are read without the shards even there, because a whole left-out shard may lie in them.
        """
        if start >= self.since:
            return math.inf, self.without
        at = bisect_left(self.needed, start)
        if at == len(self.needed):
            return self.since, self.without
        if self.needed[at] > start + _SMALL_READ:
            return self.needed[at], self.without
        while at + 1 < len(self.needed) and self.needed[at + 1] <= self.needed[at] + _SMALL_READ:
            at += 1
        return min(self.needed[at] + 1, self.since), ()

    def without_from(self, start: int) -> tuple[int, ...]:
        """Return the shards that a read that begins at ``start`` leaves out."""
        return self._read_from(start)[1]

    def news_of(self, table: SampleTable, without: tuple[int, ...]) -> SampleTable | None:
        """Return the new part of a report; ``None`` for a repetition, and where it left out other shards."""
        end, left_out = self._read_from(table.start)
        if table.start != self.table.stop or without != left_out:
            return None
        return table.within(table.start, int(end)) if end < table.stop else table

    def leave_out(self, without: tuple[int, ...], cursor: Cursor) -> None:
        """Leave out exactly these shards from ``cursor`` on; a partly drawn record is still drawn to its end.

        Samples that are known from there on are read again.
        """
        if without == self.without:
            return
        position, sub, token = cursor
        is_begun = sub > 0 or token > 0
        self.without, self.since = without, position + is_begun
        self.needed = tuple(sorted({*self.needed, *([position] if is_begun else ())}))
        if self.table.stop > self.since:
            self.table = self.table.within(self.table.start, self.since)
            self.tokens = int(self.table.lengths_N.sum())
        self.asked_to = self.table.stop
        # The statistics were those of other records.
        self.seen_positions = self._seen_samples = self._seen_tokens = self._seen_bytes = 0
        self.shortest = None

    def report(self, table: SampleTable, cursor: Cursor, size_bytes: int = 0) -> None:
        """Add the new part of a report; samples before ``cursor`` were drawn earlier and are left out.

        Args:
            table: The new samples, from ``news_of``.
            cursor: How far the source is drawn.
            size_bytes: Memory that the reported samples take in the loader.
        """
        self.seen_positions += table.stop - table.start
        self._seen_samples += len(table)
        self._seen_tokens += int(table.lengths_N.sum())
        self._seen_bytes += size_bytes
        if len(table):
            found = int(table.lengths_N.min())
            self.shortest = found if self.shortest is None else min(self.shortest, found)
        position, sub, _ = cursor
        if table.start <= position:
            # Compare the sub as well: a record that gave several samples may have been drawn in part.
            fresh = (table.positions_N > position) | (
                (table.positions_N == position) & (table.subs_N >= sub)
            )
            table = table.of_samples(fresh).bad_from(position)
        self.table = self.table.followed_by(table)
        self.tokens += int(table.lengths_N.sum())
        # A slow read may be reported in part; then the rest is requested again.
        self.asked_to = table.stop

    def draw(self, count: int) -> None:
        """Remove the first ``count`` samples."""
        table = self.table
        self.tokens -= int(table.lengths_N[:count].sum())
        self.table = table.of_samples(slice(count, None))

    def bad_before(self, position: int) -> NDArray[np.int64]:
        """Return the positions of the bad records before ``position`` that no step has passed yet."""
        known_N = self.table.bad_N
        if not len(known_N) or known_N[0] >= position:
            return known_N[:0]
        return known_N[: known_N.searchsorted(position)]

    def pass_to(self, position: int) -> None:
        """Forget the bad records before ``position``."""
        self.table = self.table.bad_from(position)

    @property
    def is_asked(self) -> bool:
        """Whether a request is under way."""
        return self.asked_to > self.table.stop

    def ask(self, tokens: int, epoch: int, end: float, need: int | None = None) -> tuple[int, int]:
        """Request about ``tokens`` more tokens; return the raw positions to read.

        Args:
            tokens: Tokens wanted; the mean length of the records so far says how many records these are.
            epoch: Records of an epoch. A request has four epochs at most, and one before anything was seen.
            end: Position before which the range ends.
            need: Tokens that the next plan needs, given if little else should be read before it.
        """
        start, stop = self.next_range(tokens, need)
        stop = min(stop, start + (max(4 * epoch, _SMALL_READ) if self.seen_positions else epoch))
        if need is not None and self.seen_positions:  # perhaps a single record, so grow slowly
            stop = min(stop, start + max(_FIRST_READ, _MOST_GROWTH * self.seen_positions))
        if self.seen_positions < epoch:
            stop = min(stop, start + max(_FEW_READ, _MOST_GROWTH * self.seen_positions))
        # No step is planned before all carried pieces are read again, and their positions are known.
        stop = max(stop, self.reach)
        self.asked_to = int(min(stop, self._read_from(start)[0], end))
        return start, self.asked_to

    def skip_to(self, cursor: Cursor, floor: int) -> None:
        """Remove the samples before ``cursor``, and request nothing before ``floor`` any more.

        Samples before ``cursor`` that are reported later are left out. An answer under way that begins before ``floor``
        is ignored.
        """
        # Pieces that are carried over the skipped steps may belong to a shard that is left out, so read it again.
        if self.without:
            self.without, self.since, self.tokens = (), 0, 0
            self.table, self.asked_to = SampleTable.empty(floor), floor
            return
        position, sub, _ = cursor
        before = (self.table.positions_N < position) | (
            (self.table.positions_N == position) & (self.table.subs_N < sub)
        )
        self.draw(int(np.count_nonzero(before)))
        self.pass_to(position)
        if floor > self.table.stop:
            self.table = SampleTable.empty(floor)
            self.asked_to = floor

    def next_range(self, tokens: int, need: int | None = None) -> tuple[int, int]:
        """Return the raw positions to read for about ``tokens`` more tokens, by the mean length so far."""
        start = self.table.stop
        if self.seen_positions == 0:
            few = _FIRST_READ if need is None else max(1, need // _LIKELY_TOKENS)
            return start, start + min(few, _FIRST_READ)
        # Never 0, which it would be if no record had a token so far.
        per_position = max(self._seen_tokens / self.seen_positions, 1 / 16)
        return start, start + min(max(math.ceil(tokens / per_position), 1), _LARGEST_READ)

    @property
    def token_bytes(self) -> float:
        """Bytes of a loader's memory per token, including other columns; 0 before the first token was seen."""
        return self._seen_bytes / max(self._seen_tokens, 1)

    @property
    def sample_tokens(self) -> float:
        """Tokens of a sample in the mean; 0 before the first one was seen."""
        return self._seen_tokens / max(self._seen_samples, 1)


def queues_of(state: MixState) -> list[SampleQueue]:
    """Return empty queues of all sources for a run that continues from ``state``."""
    carried = state.carried
    queues = [SampleQueue.at(floor) for floor in state.floors()]
    for s, queue in enumerate(queues):
        positions_P = carried.positions_P[carried.sources_P == s]
        queue.reach = int(positions_P.max(initial=-1)) + 1
        queue.needed = tuple(np.unique(positions_P).tolist())
        queue.checked_to = max(queue.reach - 1, state.cursors_S[s][0])
    return queues


def draw_window(queues: Sequence[SampleQueue], window: Sequence[Membership]) -> None:
    """Remove the samples that a window draws."""
    finished_S = np.add.reduce([membership.finished_S for membership in window])
    for s in finished_S.nonzero()[0].tolist():
        queues[s].draw(int(finished_S[s]))


def _skip_ahead(queues: Sequence[SampleQueue], history: History, before: MixState) -> MixState:
    """Return the state at which a step begins after its edits, and move the queues there.

    Samples of skipped steps are not read, except from the first piece on that is carried over them.
    """
    _, entered = history.entered(before)
    # Widened by the sources that are added at this step: an added source alone is no skip.
    if before.widened(len(entered.cursors_S)).cursors_S != entered.cursors_S:
        for queue, begun, cursor in zip(
            queues, queues_of(entered), entered.cursors_S, strict=False
        ):
            queue.reach, queue.needed = max(queue.reach, begun.reach), begun.needed
            queue.skip_to(cursor, begun.table.stop)
    return entered


def enter_step(
    queues: Sequence[SampleQueue], history: History, before: MixState
) -> tuple[MixState, list[int]]:
    """Return the state at which a step begins, after everything that edits skip, and the sources to read again.

    Shards that edits leave out from this step on disappear from the queues and from later reads. Shards that are no
    longer left out return.
    """
    if not history.skips_shards:
        return _skip_ahead(queues, history, before), []
    known_S = [queue.table.stop for queue in queues]
    state = _skip_ahead(queues, history, before)
    left_out, names = history.left_out_at(state.step), history.latest.names
    for name, queue, cursor in zip(names, queues, state.cursors_S, strict=False):
        queue.leave_out(left_out.get(name, ()), cursor)
    read_again = [s for s, queue in enumerate(queues) if queue.table.stop < known_S[s]]
    return state, read_again


def commands_of_take_over(
    queues: Sequence[SampleQueue], sources: Sequence[int], floors_S: Sequence[int], life: int
) -> tuple[TakeOver, list[ReadAhead]]:
    """Return the commands to a loader that takes sources over: hold what the lost loader held, and continue reading."""
    # A source may be among them whose edit is not applied yet.
    sources = [s for s in sources if s < len(queues)]
    ends = {s: queues[s].table.stop for s in sources}
    asked = [
        ReadAhead(
            source=s,
            start=ends[s],
            stop=queues[s].asked_to,
            life=life,
            without=queues[s].without_from(ends[s]),
        )
        for s in sources
        if queues[s].is_asked
    ]
    take_over = TakeOver(
        ranges={s: (floors_S[s], max(floors_S[s], end)) for s, end in ends.items()},
        without={s: (queues[s].since, queues[s].without) for s in sources if queues[s].without},
    )
    return take_over, asked


def end_of(history: History, name: str, epoch: int) -> float:
    """Return the position at which a source of ``epoch`` records ends for good; nothing is drawn from there on."""
    cap, _ = _cap_of(history, name)
    last = math.inf if cap == math.inf else int(cap * epoch)
    if history.base.mix.amounts is not None:
        # The largest amount that ever held: a run that resumes at an earlier step may need more than later edits leave.
        ends = [
            amount.units(epoch) if amount.kind == "epochs" else math.inf
            for amount in history.amounts_of(name)
        ]
        return min(max(ends, default=math.inf), last)
    repeats = history.base.mix.stop in ("never", "all_exhausted")
    return min(math.inf if repeats else epoch, last)


def require_below_cap(
    history: History, name: str, queue: SampleQueue, epoch: int, step: int
) -> None:
    """Stop a run that would go through a source more often than its mix allows.

    Raises:
        ConfigError: A step asks for more of it than is left.
    """
    cap, whose = _cap_of(history, name)
    if cap < math.inf and queue.table.stop >= int(cap * epoch):
        raise ConfigError(
            f"sources.{name}: step {step} asks for more than {cap:g} times its {epoch} records, {whose}, and all of "
            "them are drawn; give it less weight from an earlier step on, add data, or raise max_repetition"
        )


def _cap_of(history: History, name: str) -> tuple[float, str]:
    """Return how often a source may be gone through, and what says so."""
    # A source that was opened to be added is not declared before it is in the mix.
    source, group = history.latest.sources.get(name), history.base.mix.repetition_caps.get(name)
    own = math.inf if source is None else source.max_repetition or math.inf
    if group is not None and (group.max_repetition or math.inf) < own:
        return group.max_repetition or math.inf, f"max_repetition of group {group.name}"
    return own, "its max_repetition"


def require_usable(history: History, number: int, queue: SampleQueue, epoch: int) -> None:
    """Stop a run that would read a source of ``epoch`` records round and round and never find a usable sample.

    Raises:
        ConfigError: None of its records gives one.
    """
    mix = history.latest
    if queue.seen_positions < epoch or (queue.shortest or math.inf) <= mix.pack.length:
        return  # the usual case, decided without looking up more
    name = mix.names[number]
    source, amount = mix.sources.get(name), (mix.mix.amounts or {}).get(name)
    ends = mix.mix.stop == "each_once" or (amount and amount.kind == "epochs")
    if ends and source is not None and source.may_end_empty:
        return  # it ends, as a split of few documents may without any
    # Judged by everything that was ever seen, because the queue may have just been drawn empty.
    own = None if source is None else source.overlong
    dropping = (own or mix.pack.overlong) == "drop"
    barren = queue.shortest is None or (dropping and queue.shortest > mix.pack.length)
    # The records of another run that are left out may be all of the first epoch.
    tried = 2 * epoch if source is not None and source.drawn_before else epoch
    if queue.seen_positions >= tried and barren:
        # Left out as on_error says, and within its limit: no other error tells of them.
        bad = queue.table.reason and f"; of those that could not be decoded: {queue.table.reason}"
        files = held = splits = ""
        if source is not None and source.share_drawn < 1:
            held, splits = f" is of the drawn share of {source.share_drawn:.2g} and", "its splits, "
        remedy = f"remove the source, or change {splits}overlong, its conditions, its transforms or its text key"
        if queue.without:
            files = " outside the files that edits leave out"
            remedy = (
                "draw those files again (omniload mix undo RUN), or stop drawing from the source (omniload mix "
                f"retire RUN {name}), with --at the step from which the run continues"
            )
        raise ConfigError(
            f"sources.{name}: none of its {epoch} records{files}{held} gives a sample that fits pack.length "
            f"{mix.pack.length}{bad}; {remedy}"
        )
