"""The resume benchmark over a few small files, without processes of its own."""

import pytest
from click.testing import CliRunner

from benchmarks.faults import resume as bench
from benchmarks.loaders.mixed_sources import MixedSources

CORPUS = MixedSources(sources=2, shards=2, documents=400, group_rows=50)


@pytest.fixture
def layout(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "_LENGTH", 64)
    monkeypatch.setattr(bench, "_ROWS", 8)
    made = bench.Layout(tmp_path, CORPUS)
    made.write()
    return made


def test_marks_stand_at_the_first_step_after_each_position(layout):
    marks = bench.unbroken(layout, (0, 5, 30), num_batches=3)

    assert marks[0].samples == 0
    assert 5 <= marks[1].samples < 30 <= marks[2].samples
    assert all(len(mark.digests) == 3 for mark in marks)


def test_positions_within_one_step_share_a_mark(layout):
    marks = bench.unbroken(layout, (0, 1, 2), num_batches=1)

    assert len(marks) == 2


def test_a_resume_goes_on_with_the_batches_of_the_unbroken_run(layout):
    _, mark = bench.unbroken(layout, (0, 20), num_batches=4)

    waited_s, digests = bench.resumed(layout, "local", mark.state, 4)

    assert waited_s > 0
    assert digests == mark.digests


def test_a_resume_from_another_place_gives_other_batches(layout):
    first, later = bench.unbroken(layout, (0, 20), num_batches=2)

    assert bench.resumed(layout, "local", first.state, 2)[1] != later.digests


def test_skipping_is_timed_in_samples_a_second(layout):
    assert bench.skip_rate(layout, limit_s=0.0) > 0


@pytest.mark.parametrize(("skip_s", "shown"), [(3.25, "3.2"), (1_234.0, "about 1,234")])
def test_what_was_extrapolated_is_said_to_be(skip_s, shown):
    found = bench.Resumed(
        samples=10, runtime="local", waits_s=(0.5, 0.25, 1.0), same=True, skip_s=skip_s
    )

    assert found.row() == ("10", "local", "0.50", "1.00", "yes", shown)


def test_a_batch_that_differs_shows_in_table_and_reading(layout):
    found = bench.Resumed(samples=10, runtime="local", waits_s=(0.5,), same=False, skip_s=1.0)

    assert found.row()[4] == "NO"
    assert "are NOT those" in bench.reading_of([found], layout, {"batches": 2, "mean": 30})


def test_the_report_holds_a_row_for_every_position(monkeypatch, tmp_path):
    monkeypatch.setattr("benchmarks.report.REPORTS", tmp_path)
    monkeypatch.setattr(bench, "_LENGTH", 64)
    monkeypatch.setattr(bench, "_ROWS", 8)
    monkeypatch.setattr(bench, "skip_rate", lambda *_: 100.0)
    monkeypatch.setattr(bench, "in_new_process", lambda layout, kind, mark, _: (0.5, mark.digests))
    monkeypatch.setattr(
        bench, "MixedSources", lambda **_: MixedSources(sources=2, documents=60, group_rows=20)
    )
    arguments = ["--repeats", "1", "--most", "1000", "--batches", "2", "--no-ray"]

    CliRunner().invoke(bench.main, arguments, catch_exceptions=False)

    (path,) = (tmp_path / "faults").iterdir()
    text = path.read_text()
    assert "| 0 | local | 0.50 | 0.50 | yes | 0.0 |" in text
    assert "a time that was not measured" in text
    assert "4 files of 12 row groups" in text
