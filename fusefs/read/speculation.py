"""How much may be fetched that nobody has asked for, where reads are scattered: as much as was asked for.

Four ranks that read the tensors of one file in any order read all of it in the end, and a
request costs nearly the same for a block as for the block and its neighbours. But who reads
a few tensors must not bring in the file. So guesses are on credit: every block that is read
earns one that may be guessed, and a guess that is read was no guess. Then never more than
twice what was read is brought in, and nothing is guessed any more where guesses stay unread.

A file of which nothing was read yet has earned nothing. What it guesses then is lent by a purse that
all files share. Each guess that comes true, lent or earned, fills it again; what a file still owes
when it is closed is gone. So other files show whether files are read whole here, and who reads a
little of many has soon emptied the purse. Of all files together never more is guessed and not read
than the purse held at first and twice what was read.
"""

import threading

__all__ = ["Guesses", "Purse"]

_GUESSED, _READ = 1, 2


class Purse:
    """Bytes that may be guessed before they are earned. Safe in threads.

    Args:
        most_bytes: What there is to begin with, and what it never exceeds.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = self._left_bytes = most_bytes
        self._lock = threading.Lock()

    def lend(self, size_bytes: int) -> bool:
        """Lend all of ``size_bytes`` or nothing; tell which."""
        with self._lock:
            lends = size_bytes <= self._left_bytes
            self._left_bytes -= size_bytes if lends else 0
            return lends

    def fill(self, size_bytes: int) -> None:
        """Take what came true of guesses."""
        with self._lock:
            self._left_bytes = min(self._most_bytes, self._left_bytes + size_bytes)


class Guesses:
    """Which blocks of a file were read, and which were only guessed: no I/O. Not safe in threads.

    Args:
        block_bytes: What a read brings in anyway.
        wide_bytes: What it brings in where so much may be guessed; a multiple of ``block_bytes``.
        size_bytes: Bytes of the file. What is said of bytes behind them is passed over.
        most_bytes: Most bytes guessed and not read yet, whatever was earned: they lie in memory.
        purse: Lends what was not earned yet.
    """

    def __init__(
        self,
        block_bytes: int,
        wide_bytes: int,
        size_bytes: int,
        *,
        most_bytes: int,
        purse: Purse | None = None,
    ) -> None:
        self.wide_bytes = wide_bytes
        self._block_bytes = block_bytes
        self._size_bytes = size_bytes
        self._most_guessed = most_bytes // block_bytes
        self._purse = purse
        self._states = bytearray(-(-size_bytes // block_bytes))
        self._num_read = self._num_guessed = self._num_lent = 0

    @property
    def read_bytes(self) -> int:
        """Bytes of all blocks of which something was read."""
        return self._num_read * self._block_bytes

    @property
    def guessed_bytes(self) -> int:
        """Bytes of all blocks that were guessed and not read yet."""
        return self._num_guessed * self._block_bytes

    def read(self, start: int, stop: int) -> None:
        """Note that bytes ``start`` to ``stop`` were read."""
        for block in self._blocks(start, stop):
            state, self._states[block] = self._states[block], _READ
            self._num_read += state != _READ
            if state == _GUESSED:
                self._came_true()

    def widened(self, start: int, stop: int) -> tuple[int, int]:
        """Return what to fetch for whole blocks: their neighbours of the wide block too, if they may be guessed.

        Only neighbours without a gap, since behind one a request of its own would begin.
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
        guessed = [*range(first, own.start), *range(own.stop, last)]
        if not self._may_guess(len(guessed)):
            return start, stop
        for block in guessed:
            known[block] = _GUESSED
        self._num_guessed += len(guessed)
        return min(start, first * self._block_bytes), max(stop, last * self._block_bytes)

    def _may_guess(self, num_blocks: int) -> bool:
        unread = self._num_guessed + num_blocks
        if unread > self._most_guessed:
            return False
        short = unread - self._num_read - self._num_lent
        if short > 0:
            if self._purse is None or not self._purse.lend(short * self._block_bytes):
                return False
            self._num_lent += short
        return True

    def _came_true(self) -> None:
        self._num_guessed -= 1
        self._num_lent = max(0, self._num_lent - 1)
        if self._purse is not None:
            self._purse.fill(self._block_bytes)

    def _blocks(self, start: int, stop: int) -> range:
        last = min(len(self._states), -(-stop // self._block_bytes))
        return range(start // self._block_bytes, last)
