"""Begins and ends become runs: by their own word, or by time where they say nothing."""

import pytest

from snapshot.startup.runs import Run, runs_of, spans_of
from tests.support.snapshot.startup_builders import EPOCH_NS, NS, a_pair


def seconds(joined):
    """Return begins and ends of the runs in seconds from the epoch of the builders."""
    return [
        (
            (run.begin_ns - EPOCH_NS) / NS,
            None if run.end_ns is None else (run.end_ns - EPOCH_NS) / NS,
        )
        for run in joined.runs
    ]


def joined(events):
    """Return what ``runs_of`` gives for events of one stage on one node, its runs alone."""
    found = runs_of(events)
    (runs,) = found.runs.values()
    return found._replace(runs=runs)


def test_a_begin_and_an_end_make_a_run_with_what_the_end_tells():
    (run,) = joined(a_pair("image", "a", 1, 4, bytes={"peer": 7}, facts={"image": "x"})).runs

    assert (run.end_ns - run.begin_ns) / NS == 3
    assert (dict(run.bytes), dict(run.facts)) == ({"peer": 7}, {"image": "x"})


def test_nothing_is_nothing():
    assert runs_of([]) == ({}, 0, 0)


def test_stages_and_nodes_are_not_mixed():
    events = a_pair("image", "a", 0, 1) + a_pair("image", "b", 0, 1) + a_pair("queue", "a", 0, 1)

    assert set(runs_of(events).runs) == {
        ("a", "image"),
        ("b", "image"),
        ("a", "queue"),
    }


def test_runs_that_name_themselves_keep_their_own_ends():
    events = a_pair("image", "a", 0, 9, run="long") + a_pair("image", "a", 1, 2, run="short")

    assert seconds(joined(events)) == [(0, 9), (1, 2)]


def test_runs_without_a_name_are_paired_first_to_first():
    assert seconds(joined(a_pair("image", "a", 0, 9) + a_pair("image", "a", 1, 2))) == [
        (0, 2),
        (1, 9),
    ]


def test_lines_without_a_name_may_come_in_any_order():
    begin, end = a_pair("image", "a", 0, 5)

    assert seconds(joined([end, begin])) == [(0, 5)]
    assert joined([end, begin]).strays == 0


def test_a_stage_that_takes_no_time_has_an_end():
    begin, end = a_pair("image", "a", 3, 3)

    assert seconds(joined([end, begin])) == [(3, 3)]


def test_of_a_named_run_the_order_of_the_lines_counts_not_their_times():
    found = joined(a_pair("image", "a", 5, 2, run="x"))

    assert seconds(found) == [(5, 5)]
    assert (found.backward, found.strays) == (1, 0)


@pytest.mark.parametrize("run", ["", "x"])
def test_ends_too_many_are_strays(run):
    begin, end = a_pair("image", "a", 0, 5, run=run)

    found = joined([begin, end, end, end])

    assert (len(found.runs), found.strays) == (1, 2)


@pytest.mark.parametrize("run", ["", "x"])
def test_begins_too_many_have_no_end(run):
    begin, end = a_pair("image", "a", 0, 5, run=run)

    assert seconds(joined([begin, begin, end])) == [(0, 5), (0, None)]


def some_runs(*pairs):
    return [Run(begin_ns=begin, end_ns=end) for begin, end in pairs]


@pytest.mark.parametrize(
    ("runs", "last_ns", "spans"),
    [
        ([], None, []),
        ([(0, 5)], None, [(0, 5)]),
        ([(3, 5), (0, 2)], None, [(0, 2), (3, 5)]),
        ([(0, 4), (2, 6)], None, [(0, 6)]),
        ([(0, 9), (2, 6)], None, [(0, 9)]),
        ([(0, 2), (2, 4)], None, [(0, 4)]),
        ([(1, 1)], None, [(1, 1)]),
        ([(0, None)], None, []),
        ([(0, None), (7, 8)], 9, [(0, 9)]),
        ([(-5, -3), (-4, -1)], None, [(-5, -1)]),
    ],
)
def test_runs_cover_spans_that_lie_apart(runs, last_ns, spans):
    assert spans_of(some_runs(*runs), last_ns) == spans
