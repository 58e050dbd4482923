"""Measurements of a source from a short profile, kept with its index for later starts, and from running jobs.

They show how much work a source is, and thus decide where it is read, but never which samples it gives. A missing,
damaged or outdated measurement is made again, or not used.
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
"""Time from the beginning of a job to the first update, and between two updates."""
_LEAST_BUSY_S = 1.0
"""Least processor seconds for an estimate of the cost of a token; a source with fewer is measured for longer."""
_DIFFERS = 0.1
"""Least relative change of a cost that is stored; a smaller one would move no source to another loader."""


class KeptProfile(StrictModel):
    """The costs of a source."""

    version: Literal[1] = 1
    preprocess_s_per_token: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
    """Processor seconds of decoding and tokenising one token."""
    block_bytes: Annotated[int, Field(ge=0, le=1 << 50)]
    """Memory of the largest decoded block."""


def keep(folder: Path, source: str, profile: KeptProfile) -> None:
    """Store measurements; a folder that cannot be written causes a warning, but no error."""
    write_kept(_path(folder, source), orjson.dumps(profile.model_dump()))


def kept_profiles(folder: Path | None, sources: Iterable[str]) -> dict[str, KeptProfile]:
    """Return the stored measurements; sources without measurements, or with unreadable ones, are left out."""
    found: dict[str, KeptProfile] = {}
    for source in sources if folder is not None else ():
        assert folder is not None
        try:
            with open_file(_path(folder, source)) as file:
                found[source] = KeptProfile.model_validate(orjson.loads(file.read(_LARGEST_BYTES)))
        # Not reported, because it costs only a measurement, and does not change the samples.
        except (OSError, StateError, orjson.JSONDecodeError, ValidationError):
            continue
    return found


class RunningCosts:
    """Costs of reading in a running job, which replace stored costs if they differ. Thread-safe.

    Only sources that were profiled before are updated. A profile reads a few units on an idle machine. A job reads all
    units next to other work, including the text of later files, with or without a token cache. The memory of blocks
    depends on the files, and is not updated.
    """

    def __init__(self, folder: Path | None, now_s: float) -> None:
        """Update measurements in a folder, or nowhere; ``now_s`` is the time of a monotonic clock."""
        self._folder, self._due_s = folder, now_s + _FIRST_S
        self._lock = threading.Lock()
        self._spent: dict[str, tuple[float, int]] = {}

    def count(self, source: str, busy_s: float, tokens: int) -> None:
        """Add processor seconds, and the number of tokens that they produced."""
        with self._lock:
            before_s, before = self._spent.get(source, (0.0, 0))
            self._spent[source] = before_s + busy_s, before + tokens

    def is_due(self, now_s: float) -> bool:
        """Return whether an update is due: first after a minute, then every ten minutes; each time is reported once."""
        with self._lock:
            if now_s < self._due_s:
                return False
            self._due_s = now_s + _EVERY_S
        return True

    def keep(self) -> None:
        """Store costs since the previous update for sources whose cost has changed by more than a tenth."""
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
