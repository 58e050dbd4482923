"""Attributes of paths, kept for a second, and the look-ups that have just found nothing.

Changes of another mount show within ``TTL_S``; changes of this mount are forgotten at once. Used
on the mount's loop only; asks no store.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from fusefs.stores.protocol import is_at_or_below
from fusefs.tree.catalog import FileInfo
from omniload.base.lru import Lru

__all__ = ["TTL_S", "AttributeCache"]

TTL_S = 1.0
"""Seconds that attributes are kept, here and in the kernel."""
_MISSED_S = 0.1
"""Time in which a file may be created after a look-up found nothing: the kernel creates it directly afterwards."""
_MOST_MISSED = 1000
_MOST_INFOS = 200_000


class AttributeCache:
    """The store's recent answers about paths.

    Args:
        clock: Seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._infos: Lru[str, tuple[float, FileInfo]] = Lru(_MOST_INFOS)
        self._missed: Lru[str, float] = Lru(_MOST_MISSED)
        """Paths that the kernel was just told do not exist."""
        self.num_changes = 0
        """Number of changes of paths, so that an answer asked for before a change is not remembered after it."""

    def known(self, path: str) -> FileInfo | None:
        """Return the store's answer about a path if it is younger than ``TTL_S``."""
        found = self._infos.peek(path)
        return found[1] if found is not None and found[0] > self._clock() else None

    def remember(self, path: str, info: FileInfo) -> None:
        """Keep the store's latest answer about a path."""
        self._infos.put(path, (self._clock() + TTL_S, info))

    def forget(self, path: str) -> None:
        """Note a change of one path."""
        self.num_changes += 1
        self._infos.pop(path)
        # Otherwise a creation would assume that nothing is there, and hide the new file.
        self._missed.pop(path)

    def forget_below(self, *paths: str) -> None:
        """Note a change of paths and of everything below them."""
        self.num_changes += 1
        # Clear all misses, because a renamed folder gives files to paths that were looked up in vain.
        self._missed.clear()
        for path in paths:
            self._infos.pop_where(partial(is_at_or_below, top=path))

    def forget_all(self) -> None:
        """Forget every path, so that the store is asked again."""
        self.num_changes += 1
        self._infos.clear()

    def drop_unlike(self, path: str, info: FileInfo | None) -> None:
        """Drop the cached entry of a path unless it is of this version. Not a change: only old entries are dropped."""
        found = self._infos.peek(path)
        if found is not None and (info is None or info.entry != found[1].entry):
            self._infos.pop(path)

    def names_changed(self, path: str) -> None:
        """Note that names in a directory changed, which changes its time here at once."""
        if (found := self._infos.peek(path)) is not None:
            until, info = found
            now_ns = time.time_ns()
            entry = replace(info.entry, mtime_ns=now_ns)
            self._infos.put(path, (until, replace(info, mtime_ns=now_ns, entry=entry)))

    def miss(self, path: str) -> None:
        """Note the answer that nothing is at a path; a creation there may follow."""
        self._missed.put(path, self._clock() + _MISSED_S)

    def was_just_missed(self, path: str) -> bool:
        """Return whether a look-up of a path just found nothing; each look-up counts once."""
        # Count it once: if two callers looked it up in vain, the second must find the file that the first has made.
        return (self._missed.pop(path) or 0.0) > self._clock()
