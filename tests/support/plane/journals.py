"""Journals of two sources, and the states that they pass through."""

import itertools

from omniload.mix.deficit import WEIGHT_ONE
from omniload.mix.journal.journal import Journal
from omniload.mix.journal.records import StepRecord
from omniload.mix.state import MixState
from tests.support.plane.builders import pieces_of

__all__ = ["NAMES", "PRINT", "WEIGHTS", "a_journal", "opened", "records_between", "states"]

NAMES = ("web", "code")
PRINT = {"seed": "7"}
WEIGHTS = (WEIGHT_ONE // 4, WEIGHT_ONE - WEIGHT_ONE // 4)


def states(count):
    """Return consecutive states; a step draws from one source or from both."""
    found = [MixState.start(2)]
    for step in range(count - 1):
        before = found[-1]
        (p, _, _), other = before.cursors_S
        found.append(
            before.after(
                cursors_S=[(p + 3, 1, 0), other if step % 2 else (other[0] + 1, 0, 32)],
                served_S=[30, 0 if step % 2 else 11],
                weights_S=WEIGHTS,
                carried=pieces_of([0, p + 2, 0, 0, 5 + step, 9 + step]),
            )
        )
    return found


def records_between(found):
    """Return the records that lead from state to state."""
    return [
        StepRecord.between(before, after, f"digest {before.step}")
        for before, after in itertools.pairwise(found)
    ]


def opened(path, state, fingerprint=PRINT, **changes):
    """Return the journal of a run that resumes from a state."""
    return Journal.leading_up(path, state.to_json(NAMES, fingerprint), state.digest(), **changes)


def a_journal(path, found, *, first=0, every=0, **changes):
    """Write a journal of all steps between states, with a base every ``every`` steps."""
    with opened(path, found[first], **changes) as journal:
        for record, after in zip(records_between(found[first:]), found[first + 1 :], strict=True):
            journal.append(record.to_json(NAMES))
            if every and after.step % every == 0:
                journal.append_base(after.to_json(NAMES, PRINT), after.digest())
    return path
