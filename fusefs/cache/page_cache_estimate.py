"""What the kernel's page cache holds, estimated: it took it, and has not asked for it again."""

from collections import OrderedDict
from collections.abc import Collection, Hashable

__all__ = ["PageCacheEstimate"]

_FIRST_CAUTION = 16
_MOST_CAUTION = 1024


class PageCacheEstimate:
    """Blocks that need not lie in our memory, since the kernel took them: no I/O. Not safe in threads.

    The kernel does not say what it drops. But when it asks for a block that it took, it has
    dropped that one, and likely others before it: then those count as dropped,
    and they are known for blocks that the kernel does not keep.

    Nor is the kernel trusted with the next blocks then: at first with a few, after each further
    loss with twice as many, until it has kept that many. So a reader whose memory has no room
    for a page cache makes us fetch few blocks twice, and not each of them.

    Args:
        most: Blocks remembered of either kind; the oldest are forgotten first.
        first_caution: Blocks that the kernel is not trusted with after it first lost one.
    """

    def __init__(self, most: int, first_caution: int = _FIRST_CAUTION) -> None:
        self.num_invalidations = 0
        """How often the estimate was given up."""
        self._most = most
        self._taken: OrderedDict[Hashable, None] = OrderedDict()
        self._lost: OrderedDict[Hashable, None] = OrderedDict()
        self._first_caution = self._caution = first_caution
        self._num_withheld = self._num_kept = 0
        """Blocks still to be kept here, and blocks taken since the kernel last lost one."""

    def will_keep(self, keys: Collection[Hashable]) -> bool:
        """Return whether the kernel is trusted with blocks that were just fetched together.

        Asked once for each fetch: it counts those that are withheld.
        """
        if self._num_withheld:
            self._num_withheld = max(0, self._num_withheld - len(keys))
            return False
        return not any(key in self._lost for key in keys)

    def took(self, keys: Collection[Hashable]) -> None:
        """Note that the kernel took blocks whole."""
        self._taken |= dict.fromkeys(keys)
        self._trim(self._taken)
        self._num_kept += len(keys)
        if self._num_kept >= self._caution:
            self._caution = self._first_caution

    def asked(self, key: Hashable) -> None:
        """Note that the kernel asks for a block."""
        if key not in self._taken:
            return
        self._lost |= self._taken
        self._taken.clear()
        self._trim(self._lost)
        self.num_invalidations += 1
        self._num_withheld, self._num_kept = self._caution, 0
        self._caution = min(2 * self._caution, _MOST_CAUTION)

    def has(self, key: Hashable) -> bool:
        """Return whether the kernel has a block, as far as is known."""
        return key in self._taken

    def lost(self, key: Hashable) -> bool:
        """Return whether the kernel took a block once and, as far as is known, did not keep it."""
        return key in self._lost

    def _trim(self, keys: OrderedDict[Hashable, None]) -> None:
        while len(keys) > self._most:
            keys.popitem(last=False)
