"""Checks of files whose units are decoded in memory: they are not read again, but they must not change either."""

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
"""Seconds between two checks of a file."""
_REST = 100
"""Pause after a check, as a multiple of its duration, so that slow file systems are asked less often."""


class HeldFiles:
    """The local files of a source. Each is checked now and then while its units are drawn from. Not thread-safe.

    Decoded units survive an outage or a missing folder; the next decoding reports either. A file on a store is not
    checked here, because the check would cost a request.

    Args:
        units: Units of the source.
        files: Files of the source, by number.
        now_s: A monotonic clock.
    """

    def __init__(
        self,
        units: UnitTable,
        files: Sequence[ShardFile],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._units, self._files, self._now_s = units, files, now_s
        self._due_F = np.full(len(files), -np.inf)
        """Time of the next check of each file, ``[F]``; infinite for files on stores."""
        self._due_F[[file.remote is not None for file in files]] = np.inf
        self._last: tuple[tuple[int, ...], NDArray[np.int64]] = (), np.empty(0, np.int64)
        """Units of the last call, and their files."""

    def require_unchanged(self, units: tuple[int, ...]) -> None:
        """Raise an error if a file of the units differs from the file that was opened.

        Checks a file only when it is due.

        Raises:
            IntegrityError: The size or modification time of a file differs.
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
