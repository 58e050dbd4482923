"""What a short profile measured of a source, kept beside its index for later starts, and what running jobs measure.

It says how much work a source is, and so where it is read; never which samples it gives. One
that is gone, damaged or of another time is measured again or done without.
"""

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import orjson
from pydantic import Field, ValidationError

from omniload.base.config import StrictModel
from omniload.base.errors import StateError
from omniload.base.reading import open_file
from omniload.source.index import write_kept

__all__ = ["KeptProfile", "RunningCosts", "keep", "kept_profiles"]

_LARGEST_BYTES = 4_096
_FIRST_S, _EVERY_S = 60.0, 600.0
"""From the beginning of a job, and from one look at what is kept to the next."""
_LEAST_BUSY_S = 1.0
"""Processor seconds that say what a token costs; of a source that takes fewer, more are waited for."""
_DIFFERS = 0.1
"""Part by which a cost differs that is kept anew: less would move no source to another loader."""


class KeptProfile(StrictModel):
    """The costs of a source."""

    version: Literal[1] = 1
    preprocess_s_per_token: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
    """Processor seconds of decoding and tokenising."""
    block_bytes: Annotated[int, Field(ge=0, le=1 << 50)]
    """Memory of the largest decoded block."""


def keep(folder: Path, source: str, profile: KeptProfile) -> None:
    """Keep what was measured; a folder that cannot be written is told, and not needed."""
    write_kept(_path(folder, source), orjson.dumps(profile.model_dump()))


def kept_profiles(folder: Path | None, sources: Iterable[str]) -> dict[str, KeptProfile]:
    """Return what is kept of the sources; those of which nothing is, or nothing that can be read, are left out."""
    found: dict[str, KeptProfile] = {}
    for source in sources if folder is not None and folder.is_dir() else ():
        assert folder is not None
        try:
            with open_file(_path(folder, source)) as file:
                found[source] = KeptProfile.model_validate(orjson.loads(file.read(_LARGEST_BYTES)))
        # Not told: it costs a measurement, and changes nothing that is drawn.
        except (OSError, StateError, orjson.JSONDecodeError, ValidationError):
            continue
    return found


class RunningCosts:
    """What reading costs in a job, kept for later starts where it differs. Safe to call from several threads.

    Of a source that was profiled once: a profile reads a few units on a machine at rest, and a job all of them beside
    other work, with the text of later files, and with a token cache or without. What its blocks take of memory
    follows from its files, and stays.
    """

    def __init__(self, folder: Path | None, now_s: float) -> None:
        """Refresh what is kept in a folder, or nothing; ``now_s`` is of a clock that never goes back."""
        self._folder, self._due_s = folder, now_s + _FIRST_S
        self._lock = threading.Lock()
        self._spent: dict[str, tuple[float, int]] = {}

    def count(self, source: str, busy_s: float, tokens: int) -> None:
        """Add processor seconds, and the tokens that they gave."""
        with self._lock:
            before_s, before = self._spent.get(source, (0.0, 0))
            self._spent[source] = before_s + busy_s, before + tokens

    def is_due(self, now_s: float) -> bool:
        """Tell, once each time, that what is known by now is to be kept: after a minute, and then once in ten."""
        with self._lock:
            if now_s < self._due_s:
                return False
            self._due_s = now_s + _EVERY_S
        return True

    def keep(self) -> None:
        """Keep the costs since the last time of those sources whose cost is another than is kept by a tenth."""
        with self._lock:
            known = {
                source: busy_s / tokens
                for source, (busy_s, tokens) in self._spent.items()
                if busy_s >= _LEAST_BUSY_S and tokens
            }
            for source in known:
                del self._spent[source]
        for source, kept in kept_profiles(self._folder, known).items():
            cost, before = min(1.0, known[source]), kept.preprocess_s_per_token
            if abs(cost - before) > _DIFFERS * before:
                assert self._folder is not None, "nothing is kept without one"
                keep(
                    self._folder,
                    source,
                    kept.model_copy(update={"preprocess_s_per_token": cost}),
                )


def _path(folder: Path, source: str) -> Path:
    return folder / f"{source}.profile.json"
