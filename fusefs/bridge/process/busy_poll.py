"""How often a loop looks for the next request before it sleeps.

A program that opens, writes and closes one file after the other asks again 5 to 15 microseconds after
each answer. To sleep meanwhile and be woken takes longer than that, most of all in a virtual machine, where an
idle core is left to the host: of `tar x` on a mount it was a fifth of the time (docs/design/0011). So
the loop looks a few times first, and leaves it be for a while where nothing came: other programs may
have the cores, or nobody asks.
"""

import os

__all__ = ["BusyPoll"]

LOOKS = 30
"""Before a sleep: some 15 microseconds."""
_MOST_IN_VAIN = 8
"""Sleeps that came all the same, after which it rests."""
_REST = 100
"""Sleeps without looks before; one that has looks, and comes all the same, ends the trial."""


class BusyPoll:
    """Decides for each wait of a loop.

    Args:
        num_cores: That this process may use; on a single one nobody can ask while the loop looks.
    """

    def __init__(self, num_cores: int | None = None) -> None:
        num_cores = len(os.sched_getaffinity(0)) if num_cores is None else num_cores
        self._looks = LOOKS if num_cores > 1 else 0
        self._in_vain = 0
        self._rest = 0

    def looks(self) -> int:
        """Return how often to look before the next sleep."""
        if not self._rest:
            return self._looks
        self._rest -= 1
        return 0

    def found(self) -> None:
        """Note that a look found something."""
        self._in_vain = 0

    def slept(self) -> None:
        """Note that all looks found nothing."""
        self._in_vain += 1
        if self._in_vain >= _MOST_IN_VAIN:
            self._in_vain, self._rest = _MOST_IN_VAIN - 1, _REST
