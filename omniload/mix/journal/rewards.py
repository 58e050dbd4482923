"""Rewards of sources as reported by a trainer: ``rewards/rank-R.jsonl`` in the run's folder, of bounded size.

One line for each report, with columns by source::

    {"step": 12, "at": 1.7e9, "names": ["code", "web"], "groups": [8, 8], "kept": [5, 0], "answers": [64, 64],
     "right": [20, 64]}

A report on a whole source has no groups, and additionally ``"reward": [409.6], "labels": [512]``: a mean times the
number of labels that it covers, and that number.

The rewards are figures, not state: nothing is resumed from them, and a line that cannot be read is skipped with a
warning.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import orjson

from omniload.base.clock import TimeOfDay
from omniload.base.errors import system_refusals
from omniload.base.state import whole_number
from omniload.mix.journal.bounded import BoundedLog, take_from

__all__ = ["RewardLog", "SourceRewards", "rewards_by_source", "rewards_by_turn"]

_COLUMNS = ("groups", "kept", "answers", "right")
_LIMIT = 1 << 48


@dataclass(slots=True)
class SourceRewards:
    """The reported rewards of a source."""

    groups: int = 0
    """Number of prompts with their answers."""
    kept: int = 0
    """Number of those prompts whose answers have different rewards."""
    answers: int = 0
    right: int = 0
    reward: float = 0.0
    """Sum of the reports on the source as a whole, each mean times its labels."""
    labels: int = 0
    """Number of labels that those means cover."""


class RewardLog:
    """Writes the rewards that one rank reports. A full disk costs the figures, never the run."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._log = BoundedLog(run_dir / "rewards" / f"rank-{rank}.jsonl", "rewards of sources")
        self._time = TimeOfDay()

    def add(self, step: int, found: Mapping[str, SourceRewards]) -> None:
        """Write the results of the groups of a step for each source."""
        columns = {name: [getattr(each, name) for each in found.values()] for name in _COLUMNS}
        line: dict[str, object] = {"step": step, "at": self._time.now_s(), "names": list(found)}
        line |= columns
        if any(each.labels for each in found.values()):
            line["reward"] = [each.reward for each in found.values()]
            line["labels"] = [each.labels for each in found.values()]
        self._log.append(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))


@system_refusals("the rewards of a run")
def rewards_by_source(
    run_dir: Path, first: int, stop: int | None = None
) -> tuple[dict[str, SourceRewards], int]:
    """Return the reported rewards of each source from step ``first`` on, and the step after the last reported one.

    Steps from ``stop`` on are left out, if it is given.

    A line that a resumed run reported again counts twice, which matters little in a share of hundreds of groups.
    """
    found: dict[str, SourceRewards] = {}
    return found, take_from(run_dir / "rewards", first, lambda line: _add_line(found, line), stop)


@system_refusals("the rewards of a run")
def rewards_by_turn(run_dir: Path, first: int, every: int) -> dict[int, dict[str, SourceRewards]]:
    """Return the reported rewards of each source in turns of ``every`` steps from ``first`` on, numbered from 0.

    Counted as in ``rewards_by_source``. Turns without reports are left out.
    """
    found: dict[int, dict[str, SourceRewards]] = {}

    def take(line: bytes) -> None:
        _add_line(found.setdefault((orjson.loads(line)["step"] - first) // every, {}), line)

    take_from(run_dir / "rewards", first, take)
    return {turn: told for turn, told in sorted(found.items()) if told}


def _add_line(found: dict[str, SourceRewards], line: bytes) -> None:
    for name, columns in _told_in(line).items():
        each = found.setdefault(name, SourceRewards())
        for column, value in zip((*_COLUMNS, "reward", "labels"), columns, strict=True):
            setattr(each, column, getattr(each, column) + value)


def _told_in(line: bytes) -> dict[str, tuple[float, ...]]:
    """Return the columns of each source in a line, all of them or the error of the first damaged one."""
    held = orjson.loads(line)
    none = [0] * len(held["names"])
    columns = [held[column] for column in _COLUMNS]
    columns += [held.get(column, none) for column in ("labels", "reward")]
    told: dict[str, tuple[float, ...]] = {}
    for name, *values, reward in zip(held["names"], *columns, strict=True):
        groups, kept, answers, right, labels = (whole_number(v, below=_LIMIT) for v in values)
        if kept > groups or right > answers:
            raise ValueError(
                f"{kept} of {groups} groups of {name!r:.40}, {right} of {answers} answers"
            )
        told[str(name)] = (groups, kept, answers, right, float(reward), labels)
    return told
