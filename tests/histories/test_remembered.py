"""Remembered answers change nothing in a history."""

from contextlib import nullcontext

import numpy as np
import pytest

from omniload.mix.columns import LOSS_MASK, LOSS_SPANS
from tests.histories import checking, remembered
from tests.histories.checking import history_of
from tests.histories.remembered import Remembered, remembering
from tests.histories.worlds import world_of
from tests.support.plane import reference, simulation

EPOCH = [[9], [], [3, 14], [5], [], [30]]


def told(seed):
    outcome = history_of(world_of(seed), traced=True)
    return [(m.at, m.role, m.what) for m in outcome.trace], outcome.seen, outcome.broken


@pytest.mark.parametrize("seed", [3, 8])
def test_a_history_is_the_same_with_and_without(seed, monkeypatch):
    first, again = told(seed), told(seed)
    monkeypatch.setattr(checking, "remembering", nullcontext)

    assert first == again == told(seed)


@pytest.mark.parametrize("source", [0, 1])
@pytest.mark.parametrize("without", [(), (1,)])
def test_a_read_is_the_one_that_the_reference_makes(source, without):
    ranges = [
        (start, stop) for start in range(9) for stop in (start, start + 1, start + 7, 70 + start)
    ]
    made = [reference.read_range(source, EPOCH, *each, without) for each in ranges]

    with remembering():
        reads = [simulation.read_range(source, EPOCH, *each, without) for each in ranges]
        tables = [reference.table_of(EPOCH, *each, without) for each in ranges]

    for (table, columns), alone, (due, own) in zip(reads, tables, made, strict=True):
        for found in (table, alone):
            assert (found.start, found.stop) == (due.start, due.stop)
            for name in ("positions_N", "subs_N", "lengths_N"):
                assert np.array_equal(getattr(found, name), getattr(due, name))
        assert table.metadata.keys() == due.metadata.keys()
        for column, of_due in (
            (columns.tokens, own.tokens),
            (columns.others.get(LOSS_MASK), own.others.get(LOSS_MASK)),
            (table.metadata.get(LOSS_SPANS), due.metadata.get(LOSS_SPANS)),
        ):
            assert (column is None) == (of_due is None)
            if column is not None:
                assert column.offsets.tolist() == of_due.offsets.tolist()
                assert column.values_V.tolist() == of_due.values_V.tolist()


def test_an_answer_is_worked_out_once_while_it_is_kept(monkeypatch):
    asked = []
    doubled = Remembered(lambda value: asked.append(value) or 2 * value, lambda value: (value,))
    monkeypatch.setattr(remembered, "_MOST", 2)

    assert [doubled(1), doubled(1), doubled(2), doubled(1), doubled(3), doubled(1)] == [
        *(2, 2, 4, 2, 6, 2)
    ]
    assert asked == [1, 2, 3, 1]


def test_no_history_changes_what_another_one_is_told():
    with remembering():
        table, columns = simulation.read_range(1, EPOCH, 0, 4)

    for values in (table.lengths_N, columns.tokens.values_V, columns.others[LOSS_MASK].values_V):
        with pytest.raises(ValueError, match="read-only"):
            values[0] = 7


def test_functions_are_as_they_were_behind_it():
    before = simulation.read_range
    with remembering():
        assert simulation.read_range is not before

    assert simulation.read_range is before
