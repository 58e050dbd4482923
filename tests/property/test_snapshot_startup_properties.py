"""Whatever the events say, the parts add up, and the order of lines of different nodes is nothing."""

import itertools
from dataclasses import replace
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshot.startup import attempts_of
from snapshot.startup_difference import difference_of
from snapshot.startup_events import TIERS, StageEvent
from snapshot.startup_reading import parse_events
from snapshot.startup_runs import Run, runs_of, spans_of

NODES = ("n1", "n2", "n10", "x")
STAGES = ("queue", "image", "environment", "process_group", "first_step", "(between stages)")
EVENTS = st.lists(
    st.builds(
        StageEvent,
        job=st.just("j"),
        node=st.sampled_from(NODES),
        attempt=st.integers(0, 1),
        stage=st.sampled_from(STAGES),
        event=st.sampled_from(["begin", "end"]),
        time_ns=st.integers(0, 50),
        bytes=st.dictionaries(st.sampled_from(TIERS), st.integers(0, 2**63 - 1)),
        run=st.sampled_from(["", "a", "b"]),
        facts=st.dictionaries(st.sampled_from(["image", "error"]), st.text(max_size=5)),
    ),
    min_size=1,
    max_size=24,
)
ALIGN = st.sampled_from(["", "start"])


@given(EVENTS, ALIGN)
def test_the_parts_of_the_path_are_the_whole(events, align):
    for attempt in attempts_of(events, align=align):
        parts = [stage.path_s for stage in attempt.stages]

        assert min(parts, default=0) >= 0
        assert attempt.between_s >= 0
        assert sum(parts) + attempt.between_s == pytest.approx(attempt.seconds)


@given(EVENTS)
def test_each_moment_belongs_to_the_stage_that_runs_and_ends_first(events):
    for attempt in attempts_of(events):
        last = max(e.time_ns for e in events if e.attempt == attempt.number)
        covered = {
            stage.name: {
                moment
                for node in stage.nodes
                for run in node.runs
                for moment in range(run.begin_ns, last if run.end_ns is None else run.end_ns)
            }
            for stage in attempt.stages
        }

        def left(name, moment, covered=covered):
            return next(n for n in itertools.count() if moment + n not in covered[name])

        for part in attempt.path:
            for moment in range(part.begin_ns, part.end_ns):
                running = {name: left(name, moment) for name in covered if moment in covered[name]}
                assert (part.stage is None) == (not running)
                if running:
                    assert running[part.stage] == min(running.values())


@given(EVENTS, ALIGN)
def test_figures_of_a_stage_are_those_of_its_nodes(events, align):
    for attempt in attempts_of(events, align=align):
        for stage in attempt.stages:
            took = {node.node: node.seconds for node in stage.nodes if node.seconds is not None}

            assert len(took) + len(stage.unfinished) == len(stage.nodes)
            assert (stage.slowest is None) == (not took)
            if took:
                assert stage.max_s == max(took.values()) == took[stage.slowest]
                assert stage.median_s == median(took.values())
            if stage.straggler_ratio is not None:
                assert stage.straggler_ratio >= 1
            assert stage.waited_node_s >= 0


@given(EVENTS)
def test_every_begin_becomes_a_run_and_every_end_ends_one_or_is_a_stray(events):
    joined = runs_of(events, {})

    begins = sum(event.event == "begin" for event in events)
    runs = [run for each in joined for run in each.runs]
    assert len(runs) == begins
    ended = sum(run.end_ns is not None for run in runs)
    assert ended + sum(each.strays for each in joined) == len(events) - begins
    assert all(run.end_ns is None or run.end_ns >= run.begin_ns for run in runs)


@given(EVENTS, ALIGN, st.randoms())
def test_the_order_in_which_files_are_read_is_nothing(events, align, random):
    nodes = list(NODES)
    random.shuffle(nodes)

    shuffled = [event for node in nodes for event in events if event.node == node]

    told = [
        (a.number, a.seconds, a.reached, a.node_s, a.bytes, {s.name: s.path_s for s in a.stages})
        for a in attempts_of(events, align=align)
    ]
    assert told == [
        (a.number, a.seconds, a.reached, a.node_s, a.bytes, {s.name: s.path_s for s in a.stages})
        for a in attempts_of(shuffled, align=align)
    ]


@given(EVENTS, st.dictionaries(st.sampled_from(NODES), st.integers(0, 10**12)))
def test_seconds_of_a_node_do_not_depend_on_its_clock(events, skew):
    moved = [replace(e, time_ns=e.time_ns + skew.get(e.node, 0)) for e in events]

    def seconds(given):
        return {
            (a.number, s.name, n.node): n.seconds
            for a in attempts_of(given)
            for s in a.stages
            for n in s.nodes
        }

    assert seconds(moved) == pytest.approx(seconds(events))


@given(st.lists(st.tuples(st.integers(-20, 20), st.integers(0, 20)), max_size=12))
def test_time_in_which_anything_runs_is_the_number_of_moments_covered(spans):
    runs = [Run(begin_ns=begin, end_ns=begin + size) for begin, size in spans]

    covered = {moment for begin, size in spans for moment in range(begin, begin + size)}
    found = spans_of(runs)
    assert {moment for begin, end in found for moment in range(begin, end)} == covered
    assert all(before[1] < after[0] for before, after in itertools.pairwise(found))


@given(EVENTS, EVENTS)
def test_what_the_stages_add_is_the_difference_of_two_starts(first, second):
    before, after = attempts_of(first)[0], attempts_of(second)[-1]

    found = difference_of(before, after)

    assert sum(stage.path_s for stage in found.stages) == pytest.approx(found.seconds)


@given(EVENTS)
def test_lines_are_read_as_they_were_written(events):
    data = "".join(event.line() for event in events).encode()

    assert parse_events(data, "f") == (events, 0)


@given(EVENTS, st.data())
def test_a_killed_writer_costs_its_last_line_and_nothing_else(events, data):
    written = "".join(event.line() for event in events).encode()
    last = len(events[-1].line().encode())
    cut = data.draw(st.integers(2, last - 1), label="bytes lost")

    # Two bytes: without the newline alone the line is still whole.
    assert parse_events(written[:-cut], "f") == (events[:-1], 1 if cut < last else 0)


@given(EVENTS, EVENTS, st.data())
def test_what_is_appended_to_a_cut_line_is_read_whole(events, later, data):
    written = "".join(event.line() for event in events).encode()
    cut = data.draw(st.integers(2, len(events[-1].line().encode()) - 1), label="bytes lost")
    appended = "".join(event.line() for event in later).encode()

    assert parse_events(written[:-cut] + appended, "f") == ([*events[:-1], *later], 1)
