"""The timeline is laid out for one node and for hundreds."""

import itertools

import pytest

from snapshot.startup import attempts_of
from snapshot.startup_timeline import looks_of, spread_of, timeline_of
from tests.support.startup_builders import a_pair, a_start


def the_attempt(events):
    (found,) = attempts_of(events)
    return found


def test_bars_stand_in_time_on_the_row_of_their_node():
    timeline = timeline_of(the_attempt(a_start(["n1"])))

    bars = {bar.stage: bar for bar in timeline.bars}
    assert bars["queue"].x == timeline.left
    assert bars["image"].x == pytest.approx(bars["queue"].x + bars["queue"].width)
    assert bars["environment"].width == pytest.approx(100 / 60 * bars["queue"].width)
    assert bars["queue"].y < bars["image"].y == bars["environment"].y
    assert [label.text for label in timeline.nodes] == ["login", "n1"]


def test_a_hover_tells_node_stage_seconds_and_bytes():
    timeline = timeline_of(the_attempt(a_start(["n1"])))

    assert "n1 · image · 30.00 s, from 60.00 to 90.00 · registry 1 GiB" in {
        bar.title for bar in timeline.bars
    }


@pytest.mark.parametrize("nodes", [1, 24, 512, 1440])
def test_rows_fit_a_page_and_do_not_lie_on_each_other(nodes):
    timeline = timeline_of(the_attempt(a_start([f"node-{i}" for i in range(nodes)])))

    rows = sorted({bar.y: bar.height for bar in timeline.bars}.items())
    assert len(rows) == nodes + 1
    assert all(y + height <= after + 1e-9 for (y, height), (after, _) in itertools.pairwise(rows))
    assert timeline.height <= (1500 if nodes <= 512 else 3000)
    places = [label.at for label in timeline.nodes]
    assert all(after - before >= 14 for before, after in itertools.pairwise(places))
    assert all(bar.x + bar.width <= timeline.width for bar in timeline.bars)


@pytest.mark.parametrize("seconds", [1e-6, 0.3, 7, 240, 86400, 3e9])
def test_ticks_are_few_and_round(seconds):
    texts = [t.text for t in timeline_of(the_attempt(a_pair("image", "a", 0, seconds))).ticks]

    assert 4 <= len(texts) <= 10
    assert len(set(texts)) == len(texts)


def test_a_start_of_no_length_is_drawn_all_the_same():
    timeline = timeline_of(the_attempt(a_pair("image", "a", 0, None)))

    (bar,) = timeline.bars
    assert (bar.state, bar.width > 0) == ("unfinished", True)


def test_a_stage_without_an_end_is_drawn_thin_over_those_that_came_after_it():
    events = a_pair("hung", "a", 0, None) + a_pair("image", "a", 1, 2)

    image, hung = timeline_of(the_attempt(events)).bars
    assert (image.stage, hung.stage) == ("image", "hung")
    assert hung.height < image.height / 2


def test_a_failed_stage_looks_so():
    (bar,) = timeline_of(the_attempt(a_pair("image", "a", 0, 9, facts={"error": "OSError"}))).bars

    assert bar.state == "failed"
    assert bar.title.endswith("failed: OSError")


def test_a_stage_within_another_is_drawn_over_it():
    events = a_pair("environment", "a", 2, 3) + a_pair("script", "a", 0, 9)

    assert [bar.stage for bar in timeline_of(the_attempt(events)).bars] == ["script", "environment"]


def test_a_stage_carried_out_in_pieces_has_a_bar_for_each_and_one_when_there_are_too_many():
    def bars(pieces):
        events = [e for i in range(pieces) for e in a_pair("data_plane", "a", 2 * i, 2 * i + 1)]
        return timeline_of(the_attempt(events)).bars

    assert len(bars(3)) == 3
    assert len(bars(33)) == 1


def test_of_too_many_nodes_those_that_took_longest_are_drawn(monkeypatch):
    monkeypatch.setattr("snapshot.startup_timeline._MOST_BARS", 16)

    timeline = timeline_of(the_attempt(a_start([f"n{i}" for i in range(9)], slow="n7")))

    assert timeline.hidden == 8
    assert "n7" in {label.text for label in timeline.nodes}


def test_known_stages_keep_their_colour_and_others_have_stripes():
    looks = looks_of(["checks", "image", "warm_up", "environment"])

    assert (looks["image"].colour, looks["environment"].colour) == (1, 2)
    assert [name for name, look in looks.items() if look.striped] == ["checks", "warm_up"]
    assert looks["checks"].colour != looks["warm_up"].colour


def test_long_names_are_cut_at_the_front_where_they_differ_least():
    (label,) = timeline_of(the_attempt(a_pair("image", "cluster-row-rack-node-17", 0, 1))).nodes

    assert label.text.startswith("…")
    assert label.text.endswith("-node-17")
    assert len(label.text) == 18


def test_the_spread_of_a_stage_is_measured_against_the_longest_of_all():
    attempt = the_attempt(a_start(slow="n2"))
    stages = {stage.name: stage for stage in attempt.stages}

    environment = spread_of(stages["environment"], attempt)
    assert environment.marks == (pytest.approx(100 / 150, abs=1e-3), 1.0)
    assert spread_of(stages["image"], attempt).median == pytest.approx(0.2)
    nothing = the_attempt(a_pair("image", "a", 0, None))
    assert spread_of(nothing.stages[0], nothing) is None
