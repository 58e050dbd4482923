"""Compute times as a trainer reported them: ``times/rank-R.jsonl`` in the run's folder, of bounded size.

A line for each call::

    {"step": 12, "tokens": 16384, "squares": 21474836, "seconds": 0.031, "at": 1795947312.04}

``at`` is when it was told, in seconds since 1970: a run that went back has times of the same steps from before.

They are figures, not state: what a fit of them came to is an edit of the run, and nothing else is resumed from them. A
line that cannot be read is passed over with a warning.

Shape suffixes:
    M  measurements
"""

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import orjson
from numpy.typing import NDArray

from omniload.base.errors import ConfigError, system_refusals
from omniload.base.log import get_logger
from omniload.base.state import whole_number
from omniload.mix.journal.bounded import BoundedLog, logs_of_ranks, opened_logs

__all__ = ["NO_TIMES", "MeasuredTimes", "TimeLog", "require_seconds", "times_since"]

_LOG = get_logger(__name__)
_LEAST_S = 1e-9
"""Of one measurement: no row is computed with in a nanosecond."""
_LARGEST_S = 1e6
"""Of one measurement: eleven days."""
_LIMIT = 1 << 62
_RANKS = 64
"""Ranks whose times are read at most, evenly among all."""
_LATEST_BYTES = 64 << 10
"""Of each rank: about 600 measurements."""
_ALL_BYTES = 512 << 10
"""Of all of them: what is read and fitted in a tenth of a second."""
_STEP = re.compile(rb'\{"step":([0-9]{1,18}),')


# Equal only to itself: arrays have no truth.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeasuredTimes:
    """What ranks took for rows that they trained on."""

    ranks_M: NDArray[np.int64]
    """Which rank took it; a number for each file."""
    tokens_M: NDArray[np.float64]
    """Tokens of the documents of the rows, without padding."""
    squares_M: NDArray[np.float64]
    """Sum of the squared lengths of these documents."""
    seconds_M: NDArray[np.float64]
    """Time that their forward and backward pass took; at least a nanosecond."""

    def __len__(self) -> int:
        return len(self.seconds_M)


class TimeLog:
    """Takes the times that one rank reports. A disk that is full costs the figures, never the run."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._log = BoundedLog(run_dir / "times" / f"rank-{rank}.jsonl", "compute times")

    def add(self, step: int, tokens: int, squares: int, seconds: float) -> None:
        """Note the time of some rows of a step, as ``MeasuredTimes`` has them; of rows that hold nothing, none."""
        if not tokens:
            return
        line = {"step": step, "tokens": tokens, "squares": squares, "seconds": seconds}
        line["at"] = round(time.time(), 3)
        self._log.append(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))


def require_seconds(seconds: object) -> float:
    """Return a time that a loop reports, once it is seen to be one; a tensor of one value is.

    Raises:
        ConfigError: It is no number, or below a nanosecond.
    """
    try:
        found = float(seconds)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        found = 0.0
    if not _LEAST_S <= found <= _LARGEST_S:
        raise ConfigError(
            f"seconds are {seconds!r:.40}; give the time that the rows took, above 0 (from {_LEAST_S:g} s) and up to "
            f"{_LARGEST_S:,.0f} s"
        )
    return found


@system_refusals("the compute times of a run")
def times_since(run_dir: Path, first: int, began_s: float = 0.0) -> MeasuredTimes:
    """Return the latest times of steps from ``first`` on: 512 KiB of all, 64 KiB of each rank, of 64 ranks at most.

    Args:
        run_dir: Folder of the run.
        first: The first step that is asked for.
        began_s: When the start began that they are of, as ``RunLife`` has it; times from before are of other work.
    """
    folder = run_dir / "times"
    names = logs_of_ranks(folder)
    chosen = names[:: max(1, -(-len(names) // _RANKS))]
    rank_of = {name: rank for rank, name in enumerate(chosen)}
    found: list[tuple[int, int, int, float]] = []
    room = dict.fromkeys(chosen, min(_LATEST_BYTES, _ALL_BYTES // max(1, len(chosen))))
    for path, file in opened_logs(folder, chosen):
        # The newer file of a rank comes first: what it leaves of the room is the older one's.
        name = path.name.removesuffix(".1")
        latest, room[name] = _latest(file, room[name])
        for line in latest.splitlines(keepends=True):
            step = _STEP.match(line)
            if step is None or int(step[1]) < first or not line.endswith(b"\n"):
                continue
            try:
                measured, at_s = _time_in(line)
            except (KeyError, TypeError, ValueError) as error:
                _LOG.warning("%s: a damaged line is passed over: %r", path, error)
                continue
            # A run that went back, or began anew, has times of these steps that are of another start.
            if at_s >= began_s:
                found.append((rank_of[name], *measured))
    return _measured(found)


def _measured(found: Sequence[tuple[int, int, int, float]]) -> MeasuredTimes:
    columns = np.array(found, np.float64).reshape(-1, 4).T
    return MeasuredTimes(
        ranks_M=columns[0].astype(np.int64),
        tokens_M=columns[1],
        squares_M=columns[2],
        seconds_M=columns[3],
    )


NO_TIMES = _measured(())
"""Of a run whose ranks report none."""


def _latest(file: BinaryIO, room: int) -> tuple[bytes, int]:
    """Return the last whole lines of a file that fit into so many bytes, and how many are left."""
    size = file.seek(0, os.SEEK_END)
    start = max(0, size - room)
    # From the byte before: where it is a newline, the first line is whole.
    file.seek(max(0, start - 1))
    latest = file.read(size - max(0, start - 1))
    if start:
        latest = latest[latest.find(b"\n") + 1 :]
    return latest, room - min(size, room)


def _time_in(line: bytes) -> tuple[tuple[int, int, float], float]:
    """Return what a line says, and when it was told; 0 of a release that did not note it."""
    held = orjson.loads(line)
    tokens, squares = (whole_number(held[name], below=_LIMIT) for name in ("tokens", "squares"))
    seconds = float(held["seconds"])
    if not (tokens and _LEAST_S <= seconds <= _LARGEST_S and tokens <= squares):
        raise ValueError(f"{seconds} s for {tokens} tokens, {squares} squared")
    return (tokens, squares, seconds), float(held.get("at", 0))
