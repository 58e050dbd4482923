"""What the kernel's page cache holds, as far as can be told: it took it, and has not asked for it again."""

from collections import OrderedDict
from collections.abc import Hashable, Iterable

__all__ = ["PageCacheBelief"]


class PageCacheBelief:
    """Blocks that need not lie in our memory, since the kernel took them: no I/O. Not safe in threads.

    The kernel does not say what it drops. But when it asks for a block that it took, it has
    dropped that one, and likely others before it: then nothing is believed of those any more,
    and they are known for blocks that the kernel does not keep.

    Args:
        most: Blocks remembered of either kind; the oldest are forgotten first.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken: OrderedDict[Hashable, None] = OrderedDict()
        self._lost: OrderedDict[Hashable, None] = OrderedDict()

    def took(self, keys: Iterable[Hashable]) -> None:
        """Note that the kernel took blocks whole."""
        self._taken |= dict.fromkeys(keys)
        self._trim(self._taken)

    def asked(self, key: Hashable) -> None:
        """Note that the kernel asks for a block."""
        if key in self._taken:
            self._lost |= self._taken
            self._taken.clear()
            self._trim(self._lost)

    def has(self, key: Hashable) -> bool:
        """Tell whether the kernel has a block, as far as is known."""
        return key in self._taken

    def lost(self, key: Hashable) -> bool:
        """Tell whether the kernel took a block once and, as far as is known, did not keep it."""
        return key in self._lost

    def _trim(self, keys: OrderedDict[Hashable, None]) -> None:
        while len(keys) > self._most:
            keys.popitem(last=False)
