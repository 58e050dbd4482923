"""How much may be fetched that nobody has asked for, where reads are scattered: as much as was asked for.

Four ranks that read the tensors of one file in any order read all of it in the end, and a
request costs nearly the same for a block as for the block and its neighbours. But who reads
a few tensors must not bring in the file. So guesses are on credit: every block that is read
earns one that may be guessed, and a guess that is read was no guess. Then never more than
twice what was read is brought in, and nothing is guessed any more where guesses stay unread.
"""

__all__ = ["Guesses"]

_GUESSED, _READ = 1, 2


class Guesses:
    """Which blocks of a file were read, and which were only guessed: no I/O. Not safe in threads.

    Args:
        block_bytes: What a read brings in anyway.
        wide_bytes: What it brings in where so much may be guessed; a multiple of ``block_bytes``.
        size_bytes: Bytes of the file. What is said of bytes behind them is passed over.
        most_bytes: Most bytes guessed and not read yet, whatever was earned: they lie in memory.
    """

    def __init__(
        self, block_bytes: int, wide_bytes: int, size_bytes: int, *, most_bytes: int
    ) -> None:
        self.wide_bytes = wide_bytes
        self._block_bytes = block_bytes
        self._size_bytes = size_bytes
        self._most_guessed = most_bytes // block_bytes
        self._states = bytearray(-(-size_bytes // block_bytes))
        self._num_read = self._num_guessed = 0

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
            state = self._states[block]
            self._num_read += state != _READ
            self._num_guessed -= state == _GUESSED
            self._states[block] = _READ

    def widened(self, start: int, stop: int) -> tuple[int, int]:
        """Return what to fetch for whole blocks: their neighbours of the wide block too, if they may be guessed.

        Only neighbours without a gap, since behind one a request of its own would begin.
        """
        known, wide = (
            self._states,
            self._blocks(start - start % self.wide_bytes, stop + -stop % self.wide_bytes),
        )
        own = self._blocks(start, stop)
        first, last = own.start, own.stop
        while first > wide.start and not known[first - 1]:
            first -= 1
        while last < wide.stop and not known[last]:
            last += 1
        guessed = [*range(first, own.start), *range(own.stop, last)]
        if self._num_guessed + len(guessed) > min(self._num_read, self._most_guessed):
            return start, stop
        for block in guessed:
            known[block] = _GUESSED
        self._num_guessed += len(guessed)
        return min(start, first * self._block_bytes), max(stop, last * self._block_bytes)

    def _blocks(self, start: int, stop: int) -> range:
        last = min(len(self._states), -(-stop // self._block_bytes))
        return range(start // self._block_bytes, last)
