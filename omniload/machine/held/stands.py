"""How far a shadow has decoded what it would read if it took over."""

import math
from dataclasses import dataclass, field

__all__ = ["Stands"]

_PASSED_OVER = 1024
"""Records after which a shadow tries again to decode a source."""


@dataclass(slots=True)
class Stands:
    """Where of each source a shadow has decoded what it would read, and how far it is to decode as it is told more."""

    _told: dict[int, int] = field(default_factory=dict, init=False)
    """End of what the planner knew of each source the last time."""
    _floors: dict[int, range] = field(default_factory=dict, init=False)
    """First positions of reads at which nothing need be decoded."""
    _stops: dict[int, float] = field(default_factory=dict, init=False)
    """Ends of such reads."""

    def reach(self, source: int, floor: int, end: int) -> int | None:
        """Return the position before which a loader would read that takes over until the next time but one.

        Args:
            source: The source.
            floor: The first position that is needed.
            end: End of what is known to the planner.

        Returns:
            ``None`` where all of it is at hand: told once a second, while a block lasts for minutes, that is usual.
        """
        # Of one that was told nothing yet: as much again as is known ahead, which several windows were read for.
        reach = end + max(end - floor, 2 * (end - self._told.get(source, end)))
        self._told[source] = end
        if floor in self._floors.get(source, ()) and reach <= self._stops[source]:
            return None
        return reach

    def decoded(self, source: int, positions: range) -> None:
        """Note which positions are read from what is decoded."""
        self._floors[source], self._stops[source] = positions, positions.stop

    def pass_over(self, source: int, floor: int) -> None:
        """Try no more for a while to decode a source that could not be."""
        self._floors[source] = range(floor, floor + _PASSED_OVER)
        self._stops[source] = math.inf

    def forget(self, source: int) -> None:
        """Begin anew with a source that was let go of."""
        for known in (self._told, self._floors, self._stops):
            known.pop(source, None)
