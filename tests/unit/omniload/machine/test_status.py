"""A look at each role of a plane: its task, its age, and the growth of its figures."""

from dataclasses import replace

import pytest

from omniload.machine.progress import Progress, Task
from omniload.machine.status import SKIPPED, SkippedRecords, status_of


def a_role(name="loader-0", *, pid=7, beat_s=100.0, tasks=(), calls=(), **figures):
    return Progress(name=name, pid=pid, beat_s=beat_s, tasks=tasks, calls=calls, figures=figures)


def test_a_call_to_a_store_says_more_than_the_task_around_it():
    task = Task(doing="reads source web", since_s=90.0, waits_for=("planner",))
    call = Task(doing="reads /data/3", since_s=97.0)

    (status,) = status_of({"loader-0": a_role(tasks=(task,), calls=(call,))}, {}, 101.0)

    assert (status.state, status.task_s, status.age_s) == ("reads /data/3", 4.0, 1.0)
    assert status.waits_for == ("planner",)


def test_a_role_that_is_not_heard_of_is_stopped_and_one_without_a_task_idle():
    found = status_of({"b": a_role("b", beat_s=90.0), "a": a_role("a")}, {}, 100.0)

    assert [(status.name, status.state) for status in found] == [("a", "idle"), ("b", "stopped")]


def test_a_rank_whose_process_is_gone_has_ended_and_is_not_stopped():
    gone = replace(a_role("rank dp=1", beat_s=90.0), has_ended=True)

    assert status_of({"rank dp=1": gone}, {}, 100.0)[0].state == "ended"


def test_what_only_grows_has_a_rate_between_two_heartbeats():
    before = {"loader-0": a_role(beat_s=98.0, read_bytes_total=100.0, held_bytes=5.0)}
    now = {"loader-0": a_role(beat_s=100.0, read_bytes_total=700.0, held_bytes=9.0)}

    (status,) = status_of(now, before, 100.0)

    assert status.rates == {"read_bytes_total": 300.0}
    assert status.figures == {"read_bytes_total": 700.0, "held_bytes": 9.0}


@pytest.mark.parametrize("changed", [{"pid": 8}, {"beat_s": 100.0}])
def test_another_process_or_the_same_heartbeat_has_no_rate(changed):
    before = a_role(**{"beat_s": 98.0, "read_bytes_total": 100.0} | changed)

    (status,) = status_of({"loader-0": a_role(read_bytes_total=700.0)}, {"loader-0": before}, 100.0)

    assert status.rates == {}


def test_figures_travel_with_the_heartbeat_and_older_ones_have_none():
    role = a_role(read_bytes_total=3.0)
    stored = role.to_json()

    assert Progress.from_json(stored) == role
    del stored["figures"]
    assert Progress.from_json(stored).figures == {}


def test_records_that_were_skipped_are_told_of_at_the_first_look_and_when_they_have_doubled():
    machine = SkippedRecords()

    told = [
        machine.see({"planner": a_role("planner", **{SKIPPED + "web": web, SKIPPED + "code": 1})})
        for web in (0, 5, 7, 8)
    ]

    assert [[line.split(":")[0] for line in lines] for lines in told] == [
        ["source code"],
        ["source web"],
        [],
        ["source web"],
    ]
    assert "5 times so far; reported again at 8" in told[1][0]


def troubled(*roles):
    found = status_of({role.name: role for role in roles}, {}, 100.0)
    return [status.name for status in found if status.in_trouble]


def a_wait(name, *waits_for, for_s):
    return a_role(name, tasks=(Task(doing="waits", since_s=100.0 - for_s, waits_for=waits_for),))


@pytest.mark.parametrize(("for_s", "expected"), [(9.0, []), (11.0, ["loader-0"])])
def test_the_role_that_holds_up_a_rank_is_in_trouble_and_those_on_the_way_are_not(for_s, expected):
    rank = a_wait("rank dp=0", "constructor-0", for_s=for_s)
    way = a_wait("constructor-0", "planner", for_s=50), a_wait("planner", "loader-0", for_s=50)

    assert troubled(rank, *way, a_role()) == expected


def test_a_trainer_that_takes_its_time_troubles_nobody():
    rank = a_role("rank dp=0", tasks=(Task(doing="has step 3", since_s=10.0),))

    assert troubled(rank, a_wait("constructor-0", "planner", for_s=90), a_role("planner")) == []


def test_who_is_stopped_or_reads_again_or_waits_for_a_store_is_in_trouble():
    slow = a_role("loader-2", calls=(Task(doing="reads /data/3", since_s=80.0),))

    assert troubled(a_role(beat_s=90.0)) == ["loader-0"]
    assert troubled(a_role(repeated_reads=1.0)) == ["loader-0"]
    assert troubled(a_role(repeated_reads=0.0, retries_total=3.0)) == []
    assert troubled(slow) == ["loader-2"]
