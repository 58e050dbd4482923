"""How figures of a start-up read."""

import pytest

from snapshot.startup import attempts_of
from snapshot.startup_difference import difference_of
from snapshot.startup_tables import (
    format_moved,
    format_ratio,
    format_seconds,
    notes_of,
    verdict_of,
)
from tests.support.startup_builders import a_pair, a_start


def the_attempt(events, **options):
    (found,) = attempts_of(events, **options)
    return found


@pytest.mark.parametrize(
    ("seconds", "signed", "text"),
    [
        (None, False, "-"),
        (0.0, False, "0.00 s"),
        (9.99, False, "9.99 s"),
        (9.996, False, "10.0 s"),
        (1234.56, False, "1234.6 s"),
        (3.0, True, "+3.00 s"),
        (-12.0, True, "-12.0 s"),
        (-0.001, True, "+0.00 s"),
    ],
)
def test_seconds_read_alike_in_every_table(seconds, signed, text):
    assert format_seconds(seconds, signed=signed) == text


def test_ratios_and_bytes_that_are_not_there_are_dashes():
    assert (format_ratio(None), format_ratio(1.5)) == ("-", "1.50")
    assert format_moved({}) == "-"
    assert format_moved({"peer": 1 << 20, "store": 512}) == "peer 1 MiB, store 512 B"
    assert format_moved({"peer": 2048, "store": -2048}, signed=True) == "peer +2 KiB, store -2 KiB"


def test_a_start_without_fault_needs_no_note():
    assert list(notes_of(the_attempt(a_start()))) == []


def test_a_note_names_a_few_nodes_and_counts_the_rest():
    events = a_start() + [event for i in range(9) for event in a_pair("checks", f"n{i}", 200, None)]

    note = next(notes_of(the_attempt(events)))
    assert note.startswith("checks has no end on n0, n1, n2, n3, n4 and 4 more;")


def test_a_note_on_failures_names_the_errors_once():
    events = a_start()
    for node, error in (("n1", "OSError"), ("n2", "OSError"), ("n3", "ValueError")):
        events += a_pair("checks", node, 200, 201, facts={"error": error})

    assert list(notes_of(the_attempt(events))) == [
        "checks failed on n1, n2, n3: OSError, ValueError"
    ]


def test_begins_within_a_second_are_not_worth_a_note():
    late = a_start(["n1"]) + a_pair("image", "n2", 60.9, 80)

    assert list(notes_of(the_attempt(late))) == []
    later = a_start(["n1"]) + a_pair("image", "n2", 61.1, 80)
    assert list(notes_of(the_attempt(later))) == [
        "n2 begins 1.10 s after n1, each by its own clock"
    ]


def test_a_move_of_clocks_is_told_with_the_node_that_was_moved_most():
    late = a_start(["n1", "n2"]) + a_pair("image", "n3", 50, 80)

    notes = list(notes_of(the_attempt(late, align="start")))

    assert notes[-1] == "clocks of 3 nodes were aligned; most: n3, +10.0 s"


def test_a_backward_clock_is_told():
    events = a_start(["n1"]) + a_pair("checks", "n1", 100, 90, run="x")

    (note,) = notes_of(the_attempt(events))
    assert note.startswith("1 runs end before they begin (a clock was set back)")


def test_a_verdict_names_seconds_ratio_stage_and_share():
    before, after = the_attempt(a_start()), the_attempt(a_start(environment_s=148))

    assert verdict_of(difference_of(before, after)) == (
        "48.0 s more, 1.20 of before. environment explains 100% of it: 100.0 s to 148.0 s on the "
        "critical path."
    )


def test_a_verdict_against_a_start_of_no_length_has_no_ratio():
    nothing = the_attempt(a_pair("image", "a", 0, None))

    assert verdict_of(difference_of(nothing, the_attempt(a_start()))).startswith("240.0 s more. ")
