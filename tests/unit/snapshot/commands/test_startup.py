"""``omniload image startup``: how figures of a start-up read, as tables and as a timeline."""

import io
import itertools
import json
import re
from dataclasses import replace

import pytest
from click.testing import CliRunner
from rich.console import Console

from omniload.base.errors import ConfigError
from snapshot.commands.startup import (
    format_moved,
    format_seconds,
    notes_of,
    print_attempt,
    print_difference,
    startup_command,
    trace_of,
    verdict_of,
)
from snapshot.startup.attempts import attempts_of, difference_of
from tests.support.snapshot.startup_builders import (
    NS,
    a_pair,
    a_start,
    write_events,
    write_nodes,
)


def the_attempt(events):
    (found,) = attempts_of(events)
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


def test_bytes_that_are_not_there_are_dashes():
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


def test_a_backward_clock_is_told():
    events = a_start(["n1"]) + a_pair("checks", "n1", 100, 90, run="x")

    (note,) = notes_of(the_attempt(events))
    assert note.startswith("1 runs end before they begin (a clock was set back)")


def test_clocks_that_contradict_each_other_at_a_meeting_are_told():
    late = [replace(e, time_ns=e.time_ns + 7 * NS) if e.node == "n3" else e for e in a_start()]

    (note,) = notes_of(the_attempt(late))
    assert note.startswith("clocks are at least 5.00 s apart: n1 left process_group before n3")


def test_a_verdict_names_seconds_ratio_stage_and_share():
    before, after = the_attempt(a_start()), the_attempt(a_start(environment_s=148))

    assert verdict_of(difference_of(before, after)) == (
        "48.0 s more, 1.20 of before. environment explains 100% of it: 100.0 s to 148.0 s on the "
        "critical path."
    )


def test_a_verdict_against_a_start_of_no_length_has_no_ratio():
    nothing = the_attempt(a_pair("image", "a", 0, None))

    assert verdict_of(difference_of(nothing, the_attempt(a_start()))).startswith("240.0 s more. ")


def printed(shown, encoding="utf-8", *, by=print_attempt):
    """Return the lines of a table as a terminal of some encoding gets them."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
    by(Console(file=file, width=160), shown)
    return file.buffer.getvalue().decode(encoding).splitlines()


def test_a_start_is_told_by_stage_and_as_a_whole():
    lines = printed(the_attempt(a_start()))

    words = [" ".join(line.split()) for line in lines]
    assert words[0] == "Stage Nodes Median Max Slowest Critical path Bytes by tier"
    assert words[1].startswith("queue 1 60.0 s 60.0 s login 60.0 s")
    assert words[9] == "between stages 0.00 s"
    assert words[10] == "total 3 240.0 s store 810 MiB, registry 3 GiB"
    assert len(words) == 11, "nothing needs a note"


def test_two_starts_are_compared_stage_by_stage():
    before = the_attempt(a_pair("image", "n1", 0, 30) + a_pair("first_step", "n1", 30, 31))
    after = the_attempt(
        a_pair("image", "n1", 0, 4, bytes={"registry": 1 << 20})
        + a_pair("first_step", "n1", 12, 16)
    )

    lines = printed(difference_of(before, after), by=print_difference)

    words = [" ".join(line.split()) for line in lines]
    assert words[0] == "Stage Before After Change Bytes by tier"
    assert "image 30.0 s 4.00 s -26.0 s registry +1 MiB" in words
    assert "total 31.0 s 16.0 s -15.0 s" in words


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


def told(*arguments):
    result = CliRunner().invoke(
        startup_command, [str(each) for each in arguments], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return result.stdout


def refusal(*arguments):
    with pytest.raises(ConfigError) as caught:
        told(*arguments)
    return str(caught.value)


@pytest.fixture
def start(tmp_path):
    return write_nodes(tmp_path / "start", a_start(slow="n2"))


def test_the_table_names_the_straggler(start):
    text = told(start)

    line = next(line for line in text.splitlines() if line.startswith("environment"))
    assert re.split(r"\s{2,}", line.strip()) == [
        "environment", "3", "100.0 s", "150.0 s", "n2", "150.0 s", "store 810 MiB",
    ]  # fmt: skip
    assert "note:" not in text


def test_what_is_missing_is_noted_under_the_table(tmp_path):
    events = a_pair("image", "a", 0, None) + a_pair("checks", "a", 0, 1, facts={"error": "OSError"})
    events += a_pair("process_group", "a", 1, 2) + a_pair("process_group", "b", 9, 10)
    path = write_events(tmp_path / "n.jsonl", [*events, a_pair("queue", "a", 3, 4)[1]])
    with path.open("a") as file:
        file.write('{"version":1,"jo')

    text = told(path)

    for note in (
        "image has no end on a; it is not in its figures",
        "checks failed on a: OSError",
        "the first step was not reached",
        "clocks are at least 7.00 s apart: a left process_group before b entered it; the critical",
        "1 ends have no begin",
        "1 lines were cut short",
    ):
        assert f"note: {note}" in text


def test_the_difference_of_two_attempts_of_a_job_names_the_stage_that_explains_it(tmp_path):
    cold = a_start(attempt=0)
    warm = a_start(attempt=1, environment_s=10)
    path = write_events(tmp_path / "all.jsonl", cold + warm)

    text = told(path, "--against", path, "--against-attempt", 0)

    assert text.startswith("attempt 1 of 0 (240.0 s), 1 (150.0 s)\n")
    assert "90.0 s less, 0.62 of before. environment explains 100% of it: 100.0 s to 10.0 s" in text
    assert "Both starts took the same time." in told(path, "--against", path)


def test_a_job_or_attempt_that_is_not_there_is_refused_with_those_that_are(tmp_path):
    path = write_events(tmp_path / "all", a_start() + a_start(job="other", attempt=4))

    assert "hold 2 jobs: 'other', 'pretrain'; choose one with --job" in refusal(path)
    assert "no job 'x' in the files; they hold 'other', 'pretrain'" in refusal(path, "--job", "x")
    assert "no attempt 3 in the files" in refusal(path, "--job", "other", "--attempt", "3")
    assert re.search(r"total +3 +240.0 s", told(path, "--job", "other", "--attempt", "4"))
    assert "was OMNILOAD_STARTUP_LOG set" in refusal(write_events(tmp_path / "none", []))


def test_names_from_a_log_are_never_markup(tmp_path):
    bad = "<script>alert(1)</script>[red]&\"'"
    path = write_events(
        tmp_path / "bad", a_pair(bad, bad, 0, 5, job=bad, facts={"error": bad, bad: bad})
    )
    assert bad in told(path)


def test_names_from_a_log_give_a_terminal_no_orders(tmp_path):
    bad = "\x1b[2Jn\u202e1\n"
    path = write_events(tmp_path / "bad", a_pair(bad, bad, 0, None, job=bad))

    text = told(path)

    assert "\x1b" not in text
    assert r"\x1b[2Jn\u202e1\n has no end on \x1b[2Jn\u202e1\n" in text


def test_the_timeline_is_written_for_perfetto(start, tmp_path):
    told(start, "--perfetto", tmp_path / "trace.json")

    document = json.loads((tmp_path / "trace.json").read_text())
    names = {e["args"]["name"] for e in document["traceEvents"] if e["ph"] == "M"}
    assert names == {"critical path", "login", "n1", "n2", "n3"}
    assert not [left for left in tmp_path.iterdir() if left.name.startswith(".")]


def test_a_timeline_that_cannot_be_written_is_named(start, tmp_path):
    assert "cannot be written" in refusal(start, "--perfetto", tmp_path / "no" / "trace.json")
