"""The number of neighbours that may be fetched with a block, if reads are scattered.

Four ranks that read the tensors of one file in any order read all of it in the end, and a
request costs nearly the same for a block as for the block and its neighbours. But a reader of
a few tensors must not fetch the whole file. So speculation has a limit that reads raise: every block that is
read allows one speculative block, and a speculative block that is read counts as read. So at most
twice the blocks that were read are fetched, and a file whose speculative blocks stay unread gets no more of them.

A file without any read has no allowance of its own. It acquires one from a budget that
all files share. Each speculative block that is read refunds the budget; the debt that a file has
when it is closed is spent. So other files show whether files are read whole here, and readers that read
a little of many files soon exhaust the budget. All files together never fetch more unread blocks
than the initial budget plus twice the blocks that were read::

    read 1 block       allowance 1 ---> fetch 1 neighbour
    read nothing yet   budget --------> acquire(neighbours), all or none
    neighbour is read  ---------------> refund(block), up to the first value
"""

import threading

__all__ = ["SpeculationBudget", "SpeculativeReads"]

# One byte per block: 4 MiB for a file of 16 TiB in blocks of 4 MiB.
_SPECULATIVE, _READ = 1, 2


class SpeculationBudget:
    """Bytes that files may fetch before their reads allow it. Safe in threads.

    Args:
        most_bytes: Initial bytes, which are also the most that there can be.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = self._left_bytes = most_bytes
        self._lock = threading.Lock()

    def acquire(self, size_bytes: int) -> bool:
        """Take all of ``size_bytes`` or nothing; return whether they were taken."""
        with self._lock:
            fits = size_bytes <= self._left_bytes
            self._left_bytes -= size_bytes if fits else 0
            return fits

    def refund(self, size_bytes: int) -> None:
        """Add bytes of speculative blocks that were read."""
        with self._lock:
            self._left_bytes = min(self._most_bytes, self._left_bytes + size_bytes)


class SpeculativeReads:
    """The blocks of a file that were read, and those fetched with them: no I/O. Not safe in threads.

    Args:
        block_bytes: Bytes that a read fetches without speculation.
        wide_bytes: Bytes that a read fetches if speculation allows it; a multiple of ``block_bytes``.
        size_bytes: Bytes of the file. Ranges past its end are ignored.
        most_bytes: Most bytes fetched but not read yet, whatever reads allow, because they take memory.
        budget: Budget of all files, for blocks that reads do not allow yet.
    """

    def __init__(
        self,
        block_bytes: int,
        wide_bytes: int,
        size_bytes: int,
        *,
        most_bytes: int,
        budget: SpeculationBudget | None = None,
    ) -> None:
        self.wide_bytes = wide_bytes
        self._block_bytes = block_bytes
        self._most_speculative = most_bytes // block_bytes
        self._budget = budget
        self._states = bytearray(-(-size_bytes // block_bytes))
        self._num_read = self._num_speculative = self._num_advanced = 0

    @property
    def read_bytes(self) -> int:
        """Bytes of all blocks that were read at least in part."""
        return self._num_read * self._block_bytes

    @property
    def speculative_bytes(self) -> int:
        """Bytes of all speculative blocks that were not read yet."""
        return self._num_speculative * self._block_bytes

    def read(self, start: int, stop: int) -> None:
        """Note that bytes ``start`` to ``stop`` were read."""
        for block in self._blocks(start, stop):
            state, self._states[block] = self._states[block], _READ
            self._num_read += state != _READ
            if state == _SPECULATIVE:
                self._confirm()

    def widened(self, start: int, stop: int) -> tuple[int, int]:
        """Return the range of whole blocks to fetch, with neighbours of the wide block if there is an allowance.

        Only neighbours without a gap are included, because each gap would cost another request.
        """
        known, wide_bytes = self._states, self.wide_bytes
        wide = self._blocks(start - start % wide_bytes, stop + -stop % wide_bytes)
        own = self._blocks(start, stop)
        if not own:
            return start, stop
        first, last = own.start, own.stop
        while first > wide.start and not known[first - 1]:
            first -= 1
        while last < wide.stop and not known[last]:
            last += 1
        neighbours = [*range(first, own.start), *range(own.stop, last)]
        if not self._may_speculate(len(neighbours)):
            return start, stop
        for block in neighbours:
            known[block] = _SPECULATIVE
        self._num_speculative += len(neighbours)
        return min(start, first * self._block_bytes), max(stop, last * self._block_bytes)

    def _may_speculate(self, num_blocks: int) -> bool:
        unread = self._num_speculative + num_blocks
        # Check this before the allowance: however much was read, unread blocks take memory.
        if unread > self._most_speculative:
            return False
        short = unread - self._num_read - self._num_advanced
        if short > 0:
            # All or nothing, because a block costs the same request with some of its neighbours.
            if self._budget is None or not self._budget.acquire(short * self._block_bytes):
                return False
            self._num_advanced += short
        return True

    def _confirm(self) -> None:
        self._num_speculative -= 1
        # Repay first, because the debt of a file at its end is lost for all others.
        self._num_advanced = max(0, self._num_advanced - 1)
        if self._budget is not None:
            self._budget.refund(self._block_bytes)

    def _blocks(self, start: int, stop: int) -> range:
        last = min(len(self._states), -(-stop // self._block_bytes))
        return range(start // self._block_bytes, last)
