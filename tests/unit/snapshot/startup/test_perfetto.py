"""The timeline of a start-up, as Perfetto reads it."""

import itertools

import pytest

from snapshot.startup.attempts import attempts_of
from snapshot.startup.perfetto import trace_of
from tests.support.snapshot.startup_builders import a_pair, a_start


def events_of(events):
    (attempt,) = attempts_of(events)
    return trace_of(attempt)["traceEvents"]


def spans(events, process):
    return [
        (e["name"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6)
        for e in events
        if e["ph"] == "X" and e["pid"] == process
    ]


def process_of(events, node):
    (found,) = [e["pid"] for e in events if e["ph"] == "M" and e["args"]["name"] == node]
    return found


def test_a_stage_stands_at_its_time_on_its_node_with_its_bytes():
    events = events_of(a_start(["n1", "n2"], slow="n2"))

    node = process_of(events, "n2")
    assert ("environment", 90, 240) in spans(events, node)
    (image,) = [e for e in events if e["pid"] == node and e["name"] == "image"]
    assert image["args"]["bytes"] == {"registry": 1 << 30}


def test_the_critical_path_has_no_hole_and_says_on_which_node():
    events = events_of(a_start(["n1", "n2"], slow="n2"))

    path = spans(events, process_of(events, "critical path"))
    assert (path[0][1], path[-1][2]) == (0, 290)
    assert all(a[2] == b[1] for a, b in itertools.pairwise(path))
    (part,) = [e for e in events if e["pid"] == 0 and e["name"] == "environment"]
    assert part["args"] == {"node": "n2"}


def test_runs_that_overlap_lie_in_lanes_of_their_own():
    lines = a_pair("image", "n1", 0, 9, run="a") + a_pair("image", "n1", 4, 12, run="b")
    lines += a_pair("checks", "n1", 9, 10) + a_pair("first_step", "n1", 12, 13)

    events = [e for e in events_of(lines) if e["ph"] == "X" and e["pid"] == 1]

    assert [(e["name"], e["tid"]) for e in events] == [
        ("image", 0),
        ("image", 1),
        ("checks", 0),
        ("first_step", 0),
    ]


@pytest.mark.parametrize("facts", [{}, {"error": "OSError"}])
def test_a_run_without_an_end_lasts_to_the_end_and_facts_are_arguments(facts):
    lines = a_pair("image", "n1", 0, None) + a_pair("first_step", "n1", 1, 5, facts=facts)

    events = events_of(lines)

    assert ("image", 0, 5) in spans(events, 1)
    found = {e["name"]: e["args"] for e in events if e["pid"] == 1 and e["ph"] == "X"}
    assert found["image"] == {"bytes": {}, "unfinished": "true"}
    assert found["first_step"] == {"bytes": {}, **facts}
