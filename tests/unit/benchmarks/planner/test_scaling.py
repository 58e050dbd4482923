"""The benchmark of loaders that follow a mix: which job is run, and what is made of what was seen."""

from types import SimpleNamespace

import pytest

from benchmarks.planner.scaling import Job, Seen, slowly, table_of
from omniload.actors.heartbeat_board import Activity, FolderBoard

NAMES = ("a", "b", "c", "d")


def a_job(**changes):
    asked = {"slow": 2, "reads": 1.4, "loaders": 1, "scheduled": True, "scaled": True}
    return Job(**(asked | {"shift": 800, "after_s": 130.0} | changes))


def test_slow_sources_have_their_share_together_and_wait_for_as_long_as_reads_are_asked_for():
    job = a_job()

    assert job.weights(NAMES, 0.9) == pytest.approx({"a": 0.05, "b": 0.05, "c": 0.45, "d": 0.45})
    assert job.milliseconds * 113.4 / 1e3 == pytest.approx(1.4, rel=0.01)


@pytest.mark.parametrize("scheduled", [True, False])
def test_a_stage_shifts_the_mix_where_it_is_scheduled(scheduled):
    mix = a_job(scheduled=scheduled, scaled=not scheduled, loaders=3).mix(NAMES)

    assert [stage.from_step for stage in mix.mix.stages] == [0, 800][: 1 + scheduled]
    assert mix.runtime.scaling.mode == ("off" if scheduled else "auto")
    assert mix.runtime.loaders == 3
    assert [len(mix.sources[name].transforms) for name in NAMES] == [0, 0, 1, 1]


def test_a_slow_document_is_the_same_after_its_time(monkeypatch):
    slept = []
    monkeypatch.setattr("benchmarks.planner.scaling.time.sleep", slept.append)
    documents = [[1, 2], [3]]

    assert slowly(documents, milliseconds=50.0) is documents
    assert slept == [0.1]


def test_steps_and_waits_are_told_of_before_the_shift_and_of_two_times_after_it():
    waits = [(60.0, 9.0), (99.0, 0.04), (101.0, 0.1), (102.0, 0.3), (200.0, 0.1), (240.0, 9.0)]
    seen = Seen(waits=waits, loaders=[(30.0, 1), (112.0, 3)], changes=2, busy_s=61.4)
    seen.memory_bytes = 3 << 29
    seen.since(100.0)

    ((loaders, by, *figures, over_time, changes, busy, memory),) = table_of([(a_job(), seen)]).rows

    assert (loaders, by) == ("1, scaled", "a stage")
    assert figures == ["0.0", "0.0", "0.0", "0.04", "0.30", "0.10"]
    assert [seen.pace(*span) for span in ((-30, 0), (0, 60), (90, 130))] == [1 / 30, 2 / 60, 1 / 40]
    assert (over_time, changes) == ("1 at -70 s, 3 at +12 s", "2")
    assert (busy, memory) == ("61", "1.50")


def test_loaders_are_counted_as_they_come_and_go_and_changes_as_the_scaler_tells_them(tmp_path):
    plane, seen = SimpleNamespace(address=SimpleNamespace(board=tmp_path)), Seen()
    looks = [("loader-0",), ("loader-0",), ("loader-0", "loader-4"), ("loader-4",)]
    scaler = Activity("scaler")

    for at_s, loaders in enumerate(looks):
        plane.holders = lambda loaders=loaders: dict.fromkeys((*loaders, "planner"), "member")
        seen.counted(plane, float(at_s))
        scaler.figures.note(loader_changes_total=at_s)
        FolderBoard(tmp_path).note(scaler.progress())

    assert seen.loaders == [(0.0, 1), (2.0, 2), (3.0, 1)]
    assert seen.changes == 2  # as of the last look
