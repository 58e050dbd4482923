"""A write-through cache of tokens for the units of all sources of a process, so that text is tokenised once.

Only speed depends on the cache. If the entry of a unit is missing, incomplete, of another user or slow to come, the
text of the unit is decoded and tokenised as without a cache, with the same samples and digests.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from omniload.base.clock import Clock
from omniload.base.errors import IntegrityError, OmniloadError
from omniload.base.log import get_logger
from omniload.base.writing import FULL, free_in
from omniload.source.token_cache.entry import EncodedUnit, Seal, packed, unpacked
from omniload.source.token_cache.places import Place

__all__ = ["TokenCache"]

_AWAY_S = 60.0
"""Pause after a failure of the place, so that a source waits for the time limit once, not for each unit."""
_LOG = get_logger(__name__)
_Answer = TypeVar("_Answer")


class TokenCache:
    """The entries of a place. Thread-safe."""

    def __init__(self, place: Place, seal: Seal, tokenizer_digest: str, clock: Clock) -> None:
        self.location = place.location
        """Location in messages."""
        self.tokenizer_digest = tokenizer_digest
        """Digest of the tokenizer's file."""
        self.seal = seal
        """Seal that entries are verified with."""
        self._place, self._clock = place, clock
        self._lock = threading.Lock()
        self._away_until_s = self._full_until_s = 0.0
        self._told: set[str] = set()

    def get(self, path: str, records: int) -> EncodedUnit | None:
        """Return the entry of a unit with ``records`` records; ``None`` if there is no valid one."""
        data = self._ask_place(lambda: self._place.read(path), path)
        if data is None:
            return None
        try:
            return unpacked(path, data, self.seal, records)
        except IntegrityError as error:
            self._tell("torn", f"{self.location}/{path}: {error}; made anew")
            return None

    def put(self, path: str, unit: EncodedUnit) -> bool:
        """Store a unit; return whether it is stored."""
        # A full place can still be read.
        if self._clock.now_s() < self._full_until_s:
            return False
        return bool(
            self._ask_place(lambda: self._place.write(path, packed(path, unit, self.seal)), path)
        )

    def names(self, folder: str) -> set[str]:
        """Return the names of the entries of a folder.

        Raises:
            OmniloadError: The store does not answer.
            OSError: The folder cannot be listed.
        """
        return self._place.names(folder)

    def _ask_place(self, call: Callable[[], _Answer], path: str) -> _Answer | None:
        """Call the place, unless it failed a while ago; a failure is reported once."""
        if self._clock.now_s() < self._away_until_s:
            return None
        try:
            return call()
        # The entry is invalid, but the place works, and will be asked for the next one.
        except IntegrityError as error:
            self._tell("foreign", f"{self.location}/{path}: {error}; made anew")
        except (OmniloadError, OSError) as error:
            if isinstance(error, OSError) and error.errno in FULL:
                self._full_until_s = self._clock.now_s() + _AWAY_S
                free = free_in(Path(self.location))
                said = f"{self.location}: {error.strerror}, {free}; tokens that are not in it are made again"
                self._tell(
                    "full", f"{said}, and the cache is tried again every {_AWAY_S:g} s: free space"
                )
                return None
            with self._lock:
                self._away_until_s = self._clock.now_s() + _AWAY_S
            self._tell(
                "away",
                f"{self.location}: {error}; the run continues without it and tries it again every {_AWAY_S:g} s",
            )
        return None

    def _tell(self, kind: str, message: str) -> None:
        with self._lock:
            # Thousands of units may fail alike, so only the first failure is reported.
            first = kind not in self._told
            self._told.add(kind)
        if first:
            _LOG.warning("the token cache at %s", message)
