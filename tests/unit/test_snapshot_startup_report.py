"""What the page says, whatever the start was like."""

import re

import pytest

from snapshot.startup import attempts_of
from snapshot.startup_difference import difference_of
from snapshot.startup_report import Report, page_of, write_report
from tests.support.startup_builders import a_pair, a_start


def a_report(events, *, chosen=-1, torn=0, before=None):
    attempts = attempts_of(events)
    difference = None if before is None else difference_of(attempts_of(before)[0], attempts[chosen])
    return Report(attempts=attempts, chosen=attempts[chosen], torn=torn, difference=difference)


def text_of(page):
    """Return the words of a page, without marks and with single spaces."""
    body = re.sub(r"<style>.*?</style>|<title>.*?</title>", "", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", body))


def test_the_head_holds_both_levels_the_longest_stage_and_the_straggler():
    text = text_of(page_of(a_report(a_start(slow="n2"))))

    assert "pretrain First step reached attempt 0 3 nodes" in text
    assert "Job level 290.0 s" in text
    assert "Node level 230.0 s" in text
    assert "Longest stage 150.0 s environment, on the critical path" in text
    assert "Worst straggler 50.0 s over the median, environment: n2" in text


def test_the_wait_in_a_meeting_makes_no_straggler():
    events = a_start()
    early = a_pair("process_group", "n4", 100, 192)

    assert "Worst straggler 0.00 s" in text_of(page_of(a_report(events + early)))


def test_a_start_with_nothing_but_a_begin_has_a_page():
    text = text_of(page_of(a_report(a_pair("image", "a", 0, None))))

    assert "First step not reached attempt 0 1 node " in text
    assert "1 without an end" in text
    assert "image has no end on a" in text


def test_a_start_whose_every_end_is_a_stray_has_a_page():
    text = text_of(page_of(a_report(a_pair("image", "a", 0, 5)[1:])))

    assert "Longest stage - no stage" in text
    assert "1 ends have no begin" in text


def test_a_job_and_nodes_without_names_are_called_so():
    assert "Job without a name" in text_of(page_of(a_report(a_start(job=""))))


def test_the_attempts_are_listed_where_there_are_several():
    one, two = a_start(), a_start() + a_start(attempt=1, environment_s=10)

    assert "Attempts" not in text_of(page_of(a_report(one)))
    text = text_of(page_of(a_report(two)))
    assert "Attempts Attempt Nodes Job level Node level Total First step 0 3 240.0 s" in text
    assert "attempt 1 3 nodes" in text


def test_the_difference_names_what_explains_it_and_facts_that_changed():
    old = a_start() + a_pair("checks", "n1", 90, 91, facts={"image": "sha256:1"})
    new = a_start(environment_s=20) + a_pair("checks", "n1", 90, 91, facts={"image": "sha256:2"})

    text = text_of(page_of(a_report(new, before=old)))

    assert "Against attempt 0 of pretrain" in text
    assert "80.0 s less, 0.67 of before. environment explains" in text
    assert "image: sha256:1 → sha256:2" in text


def test_lines_cut_short_and_nodes_not_drawn_are_told(monkeypatch):
    monkeypatch.setattr("snapshot.startup_timeline._MOST_BARS", 8)

    text = text_of(page_of(a_report(a_start(), torn=2)))

    assert "2 lines were cut short" in text
    assert "nodes are not drawn; those that took longest are" in text


def test_a_failed_stage_is_marked_in_the_table_and_in_the_timeline():
    page = page_of(a_report(a_pair("image", "a", 0, 9, facts={"error": "OSError"})))

    assert "1 failed" in text_of(page)
    assert 'class="over" fill="url(#failed)"' in page
    assert "failed: OSError</title>" in page


def test_other_stages_have_stripes_and_known_ones_have_none():
    assert 'class="over" fill="url(#striped)"' in page_of(a_report(a_pair("mine", "a", 0, 9)))
    assert 'class="over"' not in page_of(a_report(a_start()))


def test_a_page_takes_the_place_of_an_older_one(tmp_path):
    path = tmp_path / "page.html"
    path.write_text("old")

    write_report(path, a_report(a_start()))

    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.parametrize("seconds", [0, 1e-9, 1e9])
def test_starts_of_any_length_have_a_page(seconds):
    assert "</html>" in page_of(a_report(a_pair("first_step", "a", 0, seconds)))
