"""Rewards of sources as a trainer reported them: ``rewards/rank-R.jsonl`` in the run's folder, of bounded size.

A line for each report, columns by source::

    {"step": 12, "names": ["code", "web"], "groups": [8, 8], "kept": [5, 0], "answers": [64, 64], "right": [20, 64]}

A word on a source as a whole has no groups, and ``"reward": [409.6], "labels": [512]`` beside them: a mean times the
labels that it goes over.

They are figures, not state: nothing is resumed from them, and a line that cannot be read is passed over with a
warning.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import orjson

from omniload.base.errors import system_refusals
from omniload.base.state import whole_number
from omniload.mix.journal.bounded import BoundedLog, take_from

__all__ = ["RewardLog", "SourceRewards", "rewards_by_source", "rewards_by_turn"]

_COLUMNS = ("groups", "kept", "answers", "right")
_LIMIT = 1 << 48


@dataclass(slots=True)
class SourceRewards:
    """What was reported of a source."""

    groups: int = 0
    """Prompts with their answers."""
    kept: int = 0
    """Those of them whose rewards differ."""
    answers: int = 0
    right: int = 0
    reward: float = 0.0
    """Sum of what the loop said of the source as a whole, each mean times its labels."""
    labels: int = 0
    """Labels that those means go over."""


class RewardLog:
    """Takes the rewards that one rank reports. A disk that is full costs the figures, never the run."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._log = BoundedLog(run_dir / "rewards" / f"rank-{rank}.jsonl", "rewards of sources")

    def add(self, step: int, found: Mapping[str, SourceRewards]) -> None:
        """Note what the groups of a step showed of each source."""
        columns = {name: [getattr(each, name) for each in found.values()] for name in _COLUMNS}
        line: dict[str, object] = {"step": step, "names": list(found), **columns}
        if any(each.labels for each in found.values()):
            line["reward"] = [each.reward for each in found.values()]
            line["labels"] = [each.labels for each in found.values()]
        self._log.append(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))


@system_refusals("the rewards of a run")
def rewards_by_source(
    run_dir: Path, first: int, stop: int | None = None
) -> tuple[dict[str, SourceRewards], int]:
    """Return what was reported of each source in the steps from ``first`` on, and the first step of which nothing was.

    Before the step ``stop``, where one is given.

    A line that a resumed run reported again counts again: it is a share of some hundred groups.
    """
    found: dict[str, SourceRewards] = {}
    return found, take_from(run_dir / "rewards", first, lambda line: _add_line(found, line), stop)


@system_refusals("the rewards of a run")
def rewards_by_turn(run_dir: Path, first: int, every: int) -> dict[int, dict[str, SourceRewards]]:
    """Return what was reported of each source, by ``every`` steps from ``first`` on, numbered from 0; none without any.

    As for ``rewards_by_source``.
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
    """Return the columns of each source in a line: all of them, or the error of the first that is damaged."""
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
