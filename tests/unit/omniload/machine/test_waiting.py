"""When a wait is reported and ended, and how it is traced to the role that causes it."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload.base.concurrency.calls_under_way import USUAL_CALL
from omniload.machine.progress import Progress, Task, rank_name, reason_of
from omniload.machine.waiting import EndWait, HeartbeatsRead, Say, SlowCalls, Wait

NOW_S = 100.0
CALLED_S = 500.0


def a_task(doing, *waits_for, for_s=20.0):
    return Task(doing=doing, since_s=NOW_S - for_s, waits_for=waits_for)


def a_role(name, *tasks, silent_s=0.0, calls=(), pid=7):
    return Progress(name=name, pid=pid, beat_s=NOW_S - silent_s, tasks=tasks, calls=tuple(calls))


def roles_of(*roles):
    return {role.name: role for role in roles}


IDLE = a_role("constructor-0", a_task("has built every step that was planned", "planner"))
READS = a_role("planner", a_task("waits for samples of web", "loader-0", "loader-1"))


def test_a_stopped_role_that_was_asked_is_the_cause():
    found = roles_of(a_role("constructor-0", a_task("builds step 3"), silent_s=30, pid=42))

    assert reason_of("constructor-0", found, NOW_S) == (
        "constructor-0 (process 42, last heartbeat 30 s ago) is stopped, or its machine is too busy to run it"
    )


def test_a_role_whose_host_does_not_answer_is_not_said_to_be_stopped():
    silent = replace(a_role("planner", silent_s=14), is_cut_off=True, host="node-1")
    late = replace(a_role("planner", silent_s=1), is_cut_off=True)

    assert reason_of("planner", roles_of(silent), NOW_S) == (
        "planner (process 7, last heartbeat 14 s ago, on node-1) cannot be reached: "
        "its host, or the network to it, does not answer"
    )
    assert "cannot be reached" not in reason_of("planner", roles_of(late), NOW_S)


def test_a_heartbeat_that_is_newer_than_the_look_at_it_came_just_now():
    said = reason_of("loader-0", roles_of(a_role("loader-0", silent_s=-0.3)), NOW_S)

    assert said == "loader-0 (process 7, last heartbeat 0 s ago) does nothing"


def test_a_wait_is_followed_over_all_roles_to_the_stopped_one():
    found = roles_of(
        IDLE, READS, a_role("loader-0", a_task("reads web")), a_role("loader-1", silent_s=9)
    )

    said = reason_of("constructor-0", found, NOW_S).split("; ")

    assert [line.split(" ")[0] for line in said] == ["constructor-0", "planner", "loader-1"]
    assert "is stopped" in said[-1]


def test_a_call_to_a_store_is_named_with_its_age():
    call = Task(doing="reads /data/0.parquet: row group 3", since_s=NOW_S - 42)
    found = roles_of(
        IDLE, READS, a_role("loader-0"), a_role("loader-1", a_task("reads web"), calls=[call])
    )

    said = reason_of("constructor-0", found, NOW_S)

    assert said.endswith("reads web for 20 s, reads /data/0.parquet: row group 3 for 42 s")


def test_the_cause_is_told_with_the_file_of_its_lines():
    loader = replace(a_role("loader-1", silent_s=9), log="/run/logs/loader-1.log")
    found = roles_of(IDLE, replace(READS, log="/run/logs/planner.log"), a_role("loader-0"), loader)

    said = reason_of("constructor-0", found, NOW_S)

    assert said.endswith("too busy to run it (its lines: /run/logs/loader-1.log)")
    assert "planner.log" not in said


def test_a_rank_that_never_asked_is_named_before_one_that_is_late():
    late = a_role("rank dp=1", a_task("has step 3 and has not asked for the next"))
    planner = a_role("planner", a_task("is 4 steps ahead of 2 ranks", "rank dp=1", "rank dp=2"))

    never = reason_of("constructor-0", roles_of(IDLE, planner, late), NOW_S)
    both = reason_of("constructor-0", roles_of(IDLE, planner, late, a_role("rank dp=2")), NOW_S)

    assert "rank dp=2 has no handle" in never
    assert both.endswith("has step 3 and has not asked for the next for 20 s")


NAMES = ["planner", "constructor-0", "loader-0", "rank dp=0"]
TASKS = st.builds(
    Task,
    doing=st.text(max_size=5),
    since_s=st.floats(0, NOW_S),
    waits_for=st.lists(st.sampled_from(NAMES), max_size=3).map(tuple),
)
ROLES = st.builds(
    Progress,
    name=st.sampled_from(NAMES),
    pid=st.integers(1, 9),
    beat_s=st.floats(0, NOW_S),
    tasks=st.lists(TASKS, max_size=3).map(tuple),
    calls=st.lists(TASKS, max_size=1).map(tuple),
)


@given(st.lists(ROLES, max_size=6))
def test_whatever_roles_say_the_walk_ends_and_begins_with_whom_was_asked(roles):
    found = roles_of(*roles)

    for name in NAMES:
        assert reason_of(name, found, NOW_S).startswith(name)


@given(ROLES)
def test_a_heartbeat_crosses_a_process_boundary_as_text(role):
    assert Progress.from_json(json.loads(json.dumps(role.to_json()))) == role


def a_wait(**changes):
    facts = {"who": "rank dp=0", "what": "step 7", "first": "constructor-0", "limit_s": 1000.0}
    return Wait(**(facts | changes))


def said_at(wait, seconds, roles=None):
    """Return the commands at each of these seconds."""
    return [
        wait.handle(HeartbeatsRead(waited_s=s, now_s=NOW_S + s, roles=roles or roles_of(IDLE)))
        for s in seconds
    ]


def test_a_wait_is_told_from_ten_seconds_on_and_ever_less_often():
    wait = a_wait()

    spoke = [s for s, commands in enumerate(said_at(wait, range(1000))) if commands]

    assert spoke == [10, 20, 40, 80, 160, 320, 620, 920]


def test_a_line_says_who_waits_for_what_and_why():
    ((said,),) = said_at(a_wait(), [12.4])

    assert isinstance(said, Say)
    assert said.text.startswith("rank dp=0 has waited 12 s for step 7: constructor-0 (process 7")


def test_a_wait_ends_at_its_limit_and_is_not_told_before():
    wait = a_wait(limit_s=3.0)

    assert wait.due_in_s(1.0) == 2.0
    early, (end,) = said_at(wait, [2.9, 3.0])

    assert early == ()
    assert isinstance(end, EndWait)
    assert "rank dp=0 waited 3 s for step 7, its limit: constructor-0" in end.text
    assert "runtime.batch_timeout" in end.text


def behind_a_rank(**rank):
    """Return heartbeats in which the constructor waits for the planner, and that for a rank, silent or not."""
    planner = a_role("planner", a_task("is 8 steps ahead of 1 rank", "rank dp=1"), silent_s=-60)
    seen = a_role("rank dp=1", silent_s=rank.pop("silent_s", 60))
    idle = replace(IDLE, beat_s=NOW_S + 60)
    return roles_of(idle, planner, replace(seen, **rank))


def test_a_wait_for_a_rank_that_has_ended_ends_once_it_is_told_where_none_comes_in_its_place():
    early, (end,) = said_at(a_wait(ranks_stay=True), [9.9, 10.0], behind_a_rank(has_ended=True))

    assert early == ()
    assert isinstance(end, EndWait)
    assert "rank dp=0 waited 10 s for step 7, which does not come: constructor-0" in end.text
    assert "rank dp=1 (process 7, last heartbeat 70 s ago) has ended" in end.text


@pytest.mark.parametrize(
    ("ranks_stay", "rank"),
    [
        (False, {"has_ended": True}),  # it may be resized
        (True, {"has_ended": False}),  # stopped, it may resume
        (True, {"has_ended": True, "silent_s": -12}),  # another has taken it since
    ],
)
def test_a_wait_for_a_rank_that_may_ask_yet_goes_on(ranks_stay, rank):
    ((said,),) = said_at(a_wait(ranks_stay=ranks_stay), [12.0], behind_a_rank(**rank))

    assert isinstance(said, Say)


def test_a_wait_whose_length_the_data_decides_ends_when_nothing_goes_on():
    wait = a_wait(limit_s=15.0, while_still=True)
    moving = [roles_of(a_role("loader-0", a_task("opens", for_s=k))) for k in range(4)]
    ended = []

    for number, at_s in enumerate([10, 25, 40, 55, 70, 85]):
        now = moving[min(number, 3)]
        commands = wait.handle(HeartbeatsRead(waited_s=at_s, now_s=NOW_S, roles=now))
        ended += [at_s for command in commands if isinstance(command, EndWait)]

    assert ended == [70, 85]  # still since 55


def test_a_rank_is_named_by_its_place():
    assert rank_name(3, 0, 1) == "rank dp=3"
    assert rank_name(3, 1, 2) == "rank dp=3 cp=1"


def a_loader(*, for_s, usual_s, name="loader-1", doing="reads /data/3.parquet"):
    figures = {} if usual_s is None else {USUAL_CALL: usual_s}
    calls = (Task(doing=doing, since_s=CALLED_S - for_s),)
    return Progress(name=name, pid=7, beat_s=CALLED_S, tasks=(), calls=calls, figures=figures)


def seen(*loaders, by=None):
    return (by or SlowCalls()).see({loader.name: loader for loader in loaders})


@pytest.mark.parametrize(
    ("for_s", "usual_s", "is_slow"),
    [
        (4.9, 0.5, False),
        (5.0, 0.5, True),
        (1.9, 0.001, False),  # so short a wait delays no role
        (2.1, 0.001, True),
        (300.0, None, False),  # nothing to compare it with
    ],
)
def test_a_call_is_slow_at_ten_times_the_usual_and_two_seconds(for_s, usual_s, is_slow):
    assert bool(seen(a_loader(for_s=for_s, usual_s=usual_s))) == is_slow


def test_the_loader_and_its_call_are_named_once():
    machine = SlowCalls()
    first = a_loader(for_s=6, usual_s=0.5)

    (line,) = seen(first, by=machine)
    assert line.startswith("loader-1 reads /data/3.parquet for 6 s, where a call to its store ")
    assert line.endswith("usually takes 0.5 s: the store is slow, or does not answer")
    assert seen(first, by=machine) == ()
    assert len(seen(first, a_loader(for_s=9, usual_s=0.5, name="loader-2"), by=machine)) == 1


def test_another_slow_call_of_the_same_loader_is_told_again():
    machine = SlowCalls()
    seen(a_loader(for_s=6, usual_s=0.5), by=machine)
    seen(a_loader(for_s=0, usual_s=0.5), by=machine)

    assert len(seen(a_loader(for_s=7, usual_s=0.5), by=machine)) == 1
