"""What the planner knows of the samples ahead of a source's cursor."""

from dataclasses import dataclass, field

import numpy as np

from omniload.mix.samples import SampleTable
from omniload.mix.state import Cursor

__all__ = ["Demand", "SampleQueue"]

_FIRST_READ = 16
"""Records read before anything is known of their length: a record may hold a million tokens."""
_LARGEST_READ = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Tokens of each source that must be known before steps can be planned, and below which more are asked for."""

    step: int
    """The first of the steps."""
    steps: int
    """How many."""
    needs_S: list[int]
    """What they are likely to draw; at least 1 where they draw any."""
    targets_S: list[int]
    """What the coming steps are likely to draw."""
    short: set[int]
    """Sources of which less than the need is known."""


@dataclass(slots=True, kw_only=True)
class SampleQueue:
    """Reported and not yet drawn samples of one source, in position order."""

    table: SampleTable
    """The samples; ``table.stop`` is the first raw position not yet reported."""
    tokens: int = 0
    """Tokens in ``table``."""
    asked_to: int = 0
    """End of the range asked for; equal to ``table.stop`` when nothing is under way."""
    _seen_positions: int = field(default=0, init=False)
    _seen_tokens: int = field(default=0, init=False)
    shortest: int | None = field(default=None, init=False)
    """Tokens of the shortest sample reported so far; ``None`` while there was none."""

    @classmethod
    def at(cls, position: int) -> "SampleQueue":
        """Return an empty queue whose first report will start at raw ``position``."""
        return cls(table=SampleTable.empty(position), asked_to=position)

    def report(self, table: SampleTable, cursor: Cursor) -> bool:
        """Take in a report; samples before ``cursor`` were drawn in an earlier life.

        Returns:
            False when the report is a repetition and was ignored.
        """
        if table.start != self.table.stop:
            return False
        self._seen_positions += table.stop - table.start
        self._seen_tokens += int(table.lengths_N.sum())
        if len(table):
            found = int(table.lengths_N.min())
            self.shortest = found if self.shortest is None else min(self.shortest, found)
        position, sub, _ = cursor
        if table.start <= position:
            fresh = (table.positions_N > position) | (
                (table.positions_N == position) & (table.subs_N >= sub)
            )
            table = SampleTable(
                start=table.start,
                stop=table.stop,
                positions_N=table.positions_N[fresh],
                subs_N=table.subs_N[fresh],
                lengths_N=table.lengths_N[fresh],
            )
        self.table = self.table.followed_by(table)
        self.tokens += int(table.lengths_N.sum())
        self.asked_to = table.stop  # less than was asked for: the rest is asked for again
        return True

    def draw(self, count: int) -> None:
        """Remove the first ``count`` samples."""
        table = self.table
        self.tokens -= int(table.lengths_N[:count].sum())
        self.table = SampleTable(
            start=table.start,
            stop=table.stop,
            positions_N=table.positions_N[count:],
            subs_N=table.subs_N[count:],
            lengths_N=table.lengths_N[count:],
        )

    def next_range(self, tokens: int) -> tuple[int, int]:
        """Return the raw positions to read for about ``tokens`` more tokens, as far as is known."""
        start = self.table.stop
        if self._seen_positions == 0:
            return start, start + _FIRST_READ
        per_position = max(self._seen_tokens / self._seen_positions, 1 / 16)
        return start, start + int(np.clip(np.ceil(tokens / per_position), 1, _LARGEST_READ))

    @property
    def seen_positions(self) -> int:
        """Raw positions reported so far."""
        return self._seen_positions
