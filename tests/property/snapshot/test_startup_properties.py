"""For any events, the parts add up, and the order of lines of different nodes does not matter."""

import itertools
from collections import Counter
from dataclasses import replace
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshot.startup.attempts import attempts_of, difference_of
from snapshot.startup.events import TIERS, StageEvent
from snapshot.startup.reading import Run, parse_events, runs_of, spans_of

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


@given(EVENTS)
def test_the_parts_of_the_path_are_the_whole(events):
    for attempt in attempts_of(events):
        parts = [stage.path_s for stage in attempt.stages]

        assert min(parts, default=0) >= 0
        assert attempt.between_s >= 0
        assert sum(parts) + attempt.between_s == pytest.approx(attempt.seconds)


@given(EVENTS)
def test_each_moment_belongs_to_a_stage_that_runs_on_the_node_walked(events):
    for attempt in attempts_of(events):
        last = max(
            (run.end_ns or 0 for s in attempt.stages for n in s.nodes for run in n.runs),
            default=0,
        )
        last = max(last, attempt.end_ns)
        running = {
            (stage.name, node.node): [
                (run.begin_ns, last if run.end_ns is None else run.end_ns) for run in node.runs
            ]
            for stage in attempt.stages
            for node in stage.nodes
        }

        assert sum(part.end_ns - part.begin_ns for part in attempt.path) == (
            attempt.end_ns - attempt.begin_ns
        )
        for before, after in itertools.pairwise(attempt.path):
            assert before.end_ns == after.begin_ns
        for part in attempt.path:
            if part.stage is not None:
                spans = running[part.stage, part.node]
                for moment in range(part.begin_ns, part.end_ns):
                    assert any(begin <= moment < end for begin, end in spans)


STEPS = st.lists(st.integers(0, 40), min_size=5, max_size=5)


@given(st.lists(STEPS, min_size=1, max_size=5), st.booleans())
def test_no_stage_is_charged_more_than_the_longest_that_a_node_spent_in_it(nodes, gap):
    """Nodes wait for each other in two meetings; the oracle waits as they do."""
    names = ["image", "environment", "process_group", "checkpoint_load", "first_step"]
    events, now, wanted = [], 0, Counter()

    def tell(stage, number, begin, end):
        known = {"job": "j", "node": f"n{number}", "attempt": 0, "stage": stage}
        events.append(StageEvent(event="begin", time_ns=begin, **known))
        events.append(StageEvent(event="end", time_ns=end, **known))

    for phase in (names[:3], names[3:]):
        came = []
        for number, steps in enumerate(nodes):
            at = now
            for name in phase[:-1]:
                tell(name, number, at, at + steps[names.index(name)])
                at += steps[names.index(name)] + gap
            came.append(at)
        met = max(came)
        slowest = nodes[came.index(met)]
        wanted += Counter({name: slowest[names.index(name)] for name in phase[:-1]})
        wanted[None] += gap * len(phase[:-1])
        works = [steps[names.index(phase[-1])] for steps in nodes]
        last = phase[-1] == "first_step"
        for number, work in enumerate(works):
            tell(phase[-1], number, came[number], met + (work if last else min(works)))
        now = met + (max(works) if last else min(works))
        wanted[phase[-1]] += now - met

    (attempt,) = attempts_of(events)

    charged = {stage.name: round(stage.path_s * 1e9) for stage in attempt.stages}
    assert sum(charged.values()) + round(attempt.between_s * 1e9) == now
    for stage in attempt.stages:
        assert stage.path_s <= stage.max_s + 1e-12
    if len(nodes) == 1:
        assert charged == {name: wanted[name] for name in charged}
    # If several nodes arrive together, any of them may be followed: the sums of the phases are the same.
    before = ("image", "environment")
    assert sum(charged[name] for name in before) == sum(wanted[name] for name in before)
    for name in names[2:]:
        assert charged[name] == wanted[name]


@given(EVENTS)
def test_figures_of_a_stage_are_those_of_its_nodes(events):
    for attempt in attempts_of(events):
        for stage in attempt.stages:
            took = {node.node: node.seconds for node in stage.nodes if node.seconds is not None}

            assert len(took) + len(stage.unfinished) == len(stage.nodes)
            assert (stage.slowest is None) == (not took)
            if took:
                assert stage.max_s == max(took.values()) == took[stage.slowest]
                assert stage.median_s == median(took.values())


@given(EVENTS)
def test_every_begin_becomes_a_run_and_every_end_ends_one_or_is_a_stray(events):
    joined = runs_of(events)

    begins = sum(event.event == "begin" for event in events)
    runs = [run for each in joined.runs.values() for run in each]
    assert len(runs) == begins
    ended = sum(run.end_ns is not None for run in runs)
    assert ended + joined.strays == len(events) - begins
    assert all(run.end_ns is None or run.end_ns >= run.begin_ns for run in runs)


@given(EVENTS, st.randoms())
def test_the_order_in_which_files_are_read_is_nothing(events, random):
    nodes = list(NODES)
    random.shuffle(nodes)

    shuffled = [event for node in nodes for event in events if event.node == node]

    told = [
        (a.number, a.seconds, a.reached, a.bytes, {s.name: s.path_s for s in a.stages})
        for a in attempts_of(events)
    ]
    assert told == [
        (a.number, a.seconds, a.reached, a.bytes, {s.name: s.path_s for s in a.stages})
        for a in attempts_of(shuffled)
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

    # The cut is two bytes at least, because a line without only its newline is still whole.
    assert parse_events(written[:-cut], "f") == (events[:-1], 1 if cut < last else 0)


@given(EVENTS, EVENTS, st.data())
def test_what_is_appended_to_a_cut_line_is_read_whole(events, later, data):
    written = "".join(event.line() for event in events).encode()
    cut = data.draw(st.integers(2, len(events[-1].line().encode()) - 1), label="bytes lost")
    appended = "".join(event.line() for event in later).encode()

    assert parse_events(written[:-cut] + appended, "f") == ([*events[:-1], *later], 1)
