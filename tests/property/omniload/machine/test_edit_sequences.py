"""Runs that are edited, killed and resumed elsewhere again and again lose no sample and repeat none.

A model that goes through the records by position (``tests.support.plane.edits.edit_sequences``) decides which samples
are due.
"""

from collections import Counter

import pytest

from tests.support.plane.edits.edit_sequences import run_sequence

SOAKED = [
    pytest.param(range(first, first + 100), marks=pytest.mark.soak, id=f"{first} to {first + 99}")
    for first in range(0, 1000, 100)
]


@pytest.mark.parametrize("seeds", [range(12), *SOAKED])
def test_of_a_run_that_is_edited_and_killed_nothing_is_lost_or_repeated(seeds):
    kinds: Counter[str] = Counter()
    lives = killed = 0
    for seed in seeds:
        try:
            run = run_sequence(seed)
        except Exception as error:
            error.add_note(f"sequence {seed}")
            raise
        kinds.update(edit.change.kind for edit in run.history.edits)
        lives, killed = lives + run.lives, killed + run.killed

    assert kinds.keys() == {"set", "set_amounts", "add", "retire", "undo", "skip", "skip_shard"}
    assert lives > 2 * len(seeds)
    assert killed > len(seeds)
