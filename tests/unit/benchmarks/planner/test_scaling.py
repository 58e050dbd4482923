"""The benchmark of loaders that follow a mix: which job is run, and what is made of what was seen."""

import pytest

from benchmarks.planner.scaling import Job, Seen, slowly, table_of

NAMES = ("a", "b", "c", "d")


def a_job(**changes):
    asked = {"slow": 2, "reads": 1.4, "scheduled": True, "scaled": True, "shift": 800}
    return Job(**(asked | {"after_s": 130.0} | changes))


def test_slow_sources_have_their_share_together_and_wait_for_as_long_as_reads_are_asked_for():
    job = a_job()

    assert job.weights(NAMES, 0.9) == pytest.approx({"a": 0.05, "b": 0.05, "c": 0.45, "d": 0.45})
    assert job.milliseconds * 113.4 / 1e3 == pytest.approx(1.4, rel=0.01)


@pytest.mark.parametrize("scheduled", [True, False])
def test_a_stage_shifts_the_mix_where_it_is_scheduled(scheduled):
    mix = a_job(scheduled=scheduled, scaled=not scheduled).mix(NAMES)

    assert [stage.from_step for stage in mix.mix.stages] == [0, 800][: 1 + scheduled]
    assert mix.runtime.scaling.mode == ("off" if scheduled else "auto")
    assert [len(mix.sources[name].transforms) for name in NAMES] == [0, 0, 1, 1]


def test_a_slow_document_is_the_same_after_its_time(monkeypatch):
    slept = []
    monkeypatch.setattr("benchmarks.planner.scaling.time.sleep", slept.append)
    documents = [[1, 2], [3]]

    assert slowly(documents, milliseconds=50.0) is documents
    assert slept == [0.1]


def test_waits_are_told_of_before_the_shift_and_of_two_times_after_it():
    waits = [(-40.0, 9.0), (-1.0, 0.0), (1.0, 0.1), (2.0, 0.3), (100.0, 0.1), (140.0, 9.0)]
    seen = Seen(waits=waits, added_s=[-30.2, 12.0], busy_s=61.4, memory_bytes=3 << 29)

    ((slow, *_, before, minute, last, steps, added, busy, memory),) = table_of(
        [(a_job(), seen)], 130.0
    ).rows

    assert (slow, before, minute, last) == (2, "0.0%", "66.7%", "50.0%")
    assert (steps, added, busy, memory) == ("4", "-30, +12", "61", "1.50")
