"""Compute times reported by a trainer: ``times/rank-R.jsonl`` in the run's folder, of bounded size.

One line for each call::

    {"step": 12, "tokens": 16384, "squares": 21474836, "seconds": 0.031, "at": 1795947312.04}

``at`` is the time of the report, in seconds since 1970, because a run that went back has earlier times of the same
steps.

The times are figures, not state: the result of a fit is an edit of the run, and nothing else is resumed from them. A
line that cannot be read is skipped with a warning.

Shape suffixes:
    M  measurements
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson
from numpy.typing import NDArray

from omniload.base.clock import TimeOfDay
from omniload.base.errors import ConfigError, system_refusals
from omniload.base.log import get_logger
from omniload.base.state import whole_number
from omniload.mix.journal.bounded import BoundedLog, last_lines, logs_of_ranks, opened_logs

__all__ = ["NO_TIMES", "MeasuredTimes", "TimeLog", "require_seconds", "times_since"]

_LOG = get_logger(__name__)
_LEAST_S = 1e-9
"""Least time of one measurement: no row is computed in a nanosecond."""
_LARGEST_S = 1e6
"""Largest time of one measurement: eleven days."""
_LIMIT = 1 << 62
_RANKS = 64
"""Largest number of ranks whose times are read, spread evenly among all ranks."""
_LATEST_BYTES = 64 << 10
"""Bytes read of each rank: about 600 measurements."""
_ALL_BYTES = 512 << 10
"""Bytes read of all ranks: an amount that is read and fitted in a tenth of a second."""
_STEP = re.compile(rb'\{"step":([0-9]{1,18}),')


# No comparison by value, because arrays have no truth value.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeasuredTimes:
    """Compute times that ranks measured for rows."""

    ranks_M: NDArray[np.int64]
    """Number of the rank that measured it; one number for each file."""
    tokens_M: NDArray[np.float64]
    """Tokens of the documents of the rows, without padding."""
    squares_M: NDArray[np.float64]
    """Sum of the squared lengths of these documents."""
    seconds_M: NDArray[np.float64]
    """Time of their forward and backward pass; at least a nanosecond."""

    def __len__(self) -> int:
        return len(self.seconds_M)


class TimeLog:
    """Writes the times that one rank reports. A full disk costs the figures, never the run."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._log = BoundedLog(run_dir / "times" / f"rank-{rank}.jsonl", "compute times")
        self._time = TimeOfDay()

    def add(self, step: int, tokens: int, squares: int, seconds: float) -> None:
        """Write the time of some rows of a step, as in ``MeasuredTimes``; nothing is written for empty rows."""
        if not tokens:
            return
        line = {"step": step, "tokens": tokens, "squares": squares, "seconds": seconds}
        line["at"] = round(self._time.now_s(), 3)
        self._log.append(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))


def require_seconds(seconds: object) -> float:
    """Return a time that a loop reports, after a check; a tensor of one value is accepted.

    Raises:
        ConfigError: It is not a number, or it is outside the limits.
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
    """Return the latest times of steps from ``first`` on: up to 512 KiB in all, 64 KiB of each rank, and 64 ranks.

    Args:
        run_dir: Folder of the run.
        first: First step to read.
        began_s: Time at which the current start began, as in ``RunLife``; earlier times belong to other work.
    """
    folder = run_dir / "times"
    names = logs_of_ranks(folder)
    chosen = names[:: max(1, -(-len(names) // _RANKS))]
    rank_of = {name: rank for rank, name in enumerate(chosen)}
    found: list[tuple[int, int, int, float]] = []
    room = dict.fromkeys(chosen, min(_LATEST_BYTES, _ALL_BYTES // max(1, len(chosen))))
    for path, file in opened_logs(folder, chosen):
        # The newer file of a rank comes first, and the older file gets the rest of the room.
        name = path.name.removesuffix(".1")
        lines, room[name] = last_lines(file, room[name])
        for line in lines:
            step = _STEP.match(line)
            if step is None or int(step[1]) < first:
                continue
            try:
                measured, at_s = _time_in(line)
            except (KeyError, TypeError, ValueError) as error:
                _LOG.warning("%s: a damaged line is passed over: %r", path, error)
                continue
            # If a run went back or began anew, its files have times of these steps from another start.
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
"""Times of a run whose ranks report none."""


def _time_in(line: bytes) -> tuple[tuple[int, int, float], float]:
    """Return the times in a line, and the time of the report; 0 if the release did not note it."""
    held = orjson.loads(line)
    tokens, squares = (whole_number(held[name], below=_LIMIT) for name in ("tokens", "squares"))
    seconds = float(held["seconds"])
    if not (tokens and _LEAST_S <= seconds <= _LARGEST_S and tokens <= squares):
        raise ValueError(f"{seconds} s for {tokens} tokens, {squares} squared")
    return (tokens, squares, seconds), float(held.get("at", 0))
