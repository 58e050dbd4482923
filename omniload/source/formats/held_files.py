"""Files whose units are at hand decoded: nothing of them is read any more, and yet each is to be what it was."""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from omniload.base.concurrency.calls_under_way import under_way
from omniload.base.errors import UnavailableError
from omniload.source.files import ShardFile
from omniload.source.formats.format import UnitTable

__all__ = ["HeldFiles"]

_EVERY_S = 5.0
"""Seconds after which a file is looked at again."""
_REST = 100
"""Of the time of one look, how much passes before the next: file systems that are slow are asked less."""


class HeldFiles:
    """The local files of a source, each looked at now and then while its units are drawn from. For one thread.

    What is at hand outlasts an outage, and a folder that is away: whoever decodes the next unit tells of either. So a
    store, which takes a request to be asked, is not looked at here.

    Args:
        units: Units of the source.
        files: Its files, by number.
        now_s: A clock that never goes back.
    """

    def __init__(
        self,
        units: UnitTable,
        files: Sequence[ShardFile],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._units, self._files, self._now_s = units, files, now_s
        self._due_F = np.full(len(files), -np.inf)
        """When each is to be looked at again; those of stores never."""
        self._due_F[[file.remote is not None for file in files]] = np.inf
        self._last: tuple[tuple[int, ...], NDArray[np.int64]] = (), np.empty(0, np.int64)
        """Units that were asked for last, and their files."""

    def require_unchanged(self, units: tuple[int, ...]) -> None:
        """Refuse a file of some units that is no more what the source was opened with, if its time has come.

        Raises:
            IntegrityError: Its size or modification time differs.
        """
        if units != self._last[0]:
            numbers = sorted(set(chain.from_iterable(map(self._units.files_of, units))))
            self._last = units, np.asarray(numbers, np.int64)
        begin_s, files = self._now_s(), self._last[1]
        due = files[self._due_F[files] <= begin_s]
        if not len(due):
            return
        for number in due.tolist():
            file = self._files[number]
            with under_way(f"looks at {file.path}"), suppress(UnavailableError):
                if all(os.path.exists(each.path) for each in (file, *file.beside)):  # noqa: PTH110 -- for each file
                    file.require_unchanged()
        end_s = self._now_s()
        self._due_F[due] = end_s + max(_EVERY_S, _REST * (end_s - begin_s))
