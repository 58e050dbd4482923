"""What became of the groups of answers of a run, by source, from its decisions alone."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from omniload.base.errors import StateError
from omniload.mix.journal.groups import GROUPS_NAME, GroupJournal

__all__ = ["GroupProgress", "SourceGroups", "group_progress"]

_VERDICTS = ("differing", "all_right", "all_wrong")
"""As a decision numbers them."""


@dataclass(slots=True, kw_only=True)
class SourceGroups:
    """Groups of one source; each that was drawn is in one of the three counts."""

    name: str
    drawn: int = 0
    differing: int = 0
    """Groups whose rewards differ: they are in a batch, wait for one, or were left over."""
    all_right: int = 0
    all_wrong: int = 0
    answers: int = 0
    right: int = 0
    """Those of the answers that were right."""


@dataclass(slots=True, kw_only=True)
class GroupProgress:
    """What a run that draws groups has come to."""

    batches: int = 0
    """Batches that were decided, whether or not a trainer was done with them."""
    rounds: int = 0
    """Steps that were drawn for them."""
    groups: int = 0
    """Groups in those batches."""
    next_batch: int = 0
    sources: dict[str, SourceGroups] = field(default_factory=dict)
    """By name."""


def group_progress(run_dir: Path, names: Sequence[str]) -> GroupProgress | None:
    """Sum up the decisions of a run; ``None`` where it drew no groups.

    Args:
        run_dir: Folder of the run.
        names: Sources of the run, by their numbers.

    Raises:
        StateError: A line is missing, of another version, or of a source that the run has not.
        IntegrityError: A line is damaged.
        OmniloadError: The file cannot be read.
    """
    if not (run_dir / GROUPS_NAME).exists():
        return None
    found = GroupProgress()
    for decision in GroupJournal(run_dir).every():
        found.batches += 1
        found.rounds += len(decision.rounds)
        found.groups += decision.groups
        found.next_batch = decision.batch + 1
        for each in decision.rounds:
            sources_N = each.keys_N3[:, 0]
            for number in np.unique(sources_N).tolist():
                of_source = _of_source(found, number, names, run_dir)
                counts = np.bincount(each.verdicts_N[sources_N == number], minlength=3).tolist()
                of_source.drawn += sum(counts)
                for verdict, count in zip(_VERDICTS, counts, strict=True):
                    setattr(of_source, verdict, getattr(of_source, verdict) + count)
        for number, answers in decision.answers.items():
            of_source = _of_source(found, number, names, run_dir)
            of_source.answers += answers.answers
            of_source.right += answers.right
    return found


def _of_source(
    found: GroupProgress, number: int, names: Sequence[str], run_dir: Path
) -> SourceGroups:
    if not 0 <= number < len(names):
        raise StateError(
            f"{run_dir / GROUPS_NAME}: has groups of source {number}, and the run has {len(names)} sources; it is of "
            "another run: move it away"
        )
    return found.sources.setdefault(names[number], SourceGroups(name=names[number]))
