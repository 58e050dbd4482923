"""Findings of several looks at a running plane."""

import pytest

from omniload.commands.runs.diagnosis import OLD_S, diagnose, moment_of
from omniload.machine.progress import PLANNED_ALL
from omniload.machine.scaling.measured import Reading
from omniload.machine.status import UNREAD, PlaneStatus, RoleLine

START_S = 1_000_000.0


def a_role(name, state="idle", waits_for=(), task_s=1.0, in_trouble=False, **figures):
    return RoleLine(
        name=name,
        pid=7,
        state=state,
        age_s=0.5,
        task_s=task_s,
        waits_for=waits_for,
        figures=figures,
        rates={},
        memory_bytes=None,
        log=f"/run/logs/{name}.log",
        in_trouble=in_trouble,
    )


def a_look(second, *roles):
    return PlaneStatus(written_at=START_S + second, host="h", pid=1, roles=roles)


def a_wait(second, waited_s, *, cause, **figures):
    """A moment in which rank 0 waits, through its constructor and the planner, for ``cause``."""
    return a_look(
        second,
        a_role("constructor-0", "has built every step that was planned", ("planner",)),
        a_role(cause, "reads records 0 to 64 of source web", task_s=9.0, **figures),
        a_role("loader-9", "reads records 1 to 2 of source code", task_s=0.1),
        a_role("planner", "waits for sources", ("loader-9", cause)),
        a_role(
            "rank dp=0", "waits for step 4", ("constructor-0",), wait_seconds_total=10 + waited_s
        ),
        a_role("rank dp=1", "computes", wait_seconds_total=3.0),
    )


def diagnosed(*looks, now=None, logs=None):
    return diagnose(looks, looks[-1].written_at if now is None else START_S + now, logs or {})


def test_a_wait_is_followed_to_the_role_that_waits_for_no_other():
    found = diagnosed(*(a_wait(n, 0.8 * n, cause="loader-1") for n in range(6)))

    (finding,) = found.findings
    assert (found.looks, found.seconds) == (6, 5.0)
    assert found.waited_share == pytest.approx(0.4)  # one of two ranks waited 4 of 5 s
    assert finding.role == "loader-1"
    assert "rank dp=0 -> constructor-0 -> planner -> loader-1, which reads records" in finding.seen
    assert finding.seen.startswith("ranks waited 40.0% of the time; 100% of it led to rank dp=0")
    assert "runtime.loaders" in finding.do


def test_of_a_slow_loader_it_is_said_which_source_is_read_all_the_time_and_by_how_many():
    web = Reading(readers=3, share=0.97, core=0.2).figures("web")
    code = Reading(readers=2, share=0.4, core=1.0).figures("code")

    found = diagnosed(*(a_wait(n, 0.8 * n, cause="loader-1", **web, **code) for n in range(3)))

    (finding,) = found.findings
    assert "; web is read by 3, 97% of the time, who wait for its store" in finding.what
    assert "code" not in finding.what
    assert "loader.readers" in finding.do


@pytest.mark.parametrize(("begun_s", "share"), [(2.5, 0.5), (-60.0, 1.0)])
def test_a_wait_that_has_not_ended_counts_as_far_as_it_was_looked_at(begun_s, share):
    def look(second):
        for_s = max(0.0, second - begun_s)
        waits_for = ("loader-1",) if for_s else ()
        return a_look(
            second,
            a_role("loader-1", "reads records 0 to 64 of source web", task_s=for_s),
            a_role("rank dp=0", "waits", waits_for, task_s=for_s, wait_seconds_total=10.0),
        )

    found = diagnosed(look(0), look(5))

    assert found.waited_share == pytest.approx(share)
    assert found.findings[0].role == "loader-1"


def test_a_wait_from_long_before_the_first_look_counts_for_no_more_than_what_was_looked_at():
    begun = a_look(
        0,
        a_role("planner", "plans"),
        a_role("rank dp=0", "waits", ("planner",), task_s=600.0, wait_seconds_total=10.0),
    )

    # It ended right after that look.
    found = diagnosed(begun, *(a_wait(n, 600 + 0.8 * n, cause="loader-1") for n in range(1, 6)))

    assert found.findings[0].role == "loader-1"


def test_a_long_wait_counts_for_more_than_moments_in_which_a_step_changes_hands():
    def moment(second):
        return a_look(
            second,
            a_role("planner", "waits", ("rank dp=0",)),
            a_role("rank dp=0", "waits", ("planner",), task_s=0.001, wait_seconds_total=second),
        )

    found = diagnosed(*(moment(n) for n in range(5)), a_wait(9, 9.0, cause="loader-1"))

    assert found.findings[0].role == "loader-1"


@pytest.mark.parametrize(
    ("cause", "figures", "said", "remedy"),
    [
        ("loader-1", {"repeated_reads": 2}, "does not answer", "can be reached"),
        ("constructor-1", {}, "builds batches too slowly", "runtime.constructors"),
        ("rank dp=7", {}, "slowest rank", "balance.strategy"),
    ],
)
def test_each_kind_of_role_has_its_remedy(cause, figures, said, remedy):
    found = diagnosed(*(a_wait(n, n, cause=cause, **figures) for n in range(3)))

    assert said in found.findings[0].what
    assert remedy in found.findings[0].do


def test_roles_that_wait_for_each_other_end_the_way():
    look = a_look(
        0,
        a_role("planner", "waits", ("rank dp=0",)),
        a_role("rank dp=0", "waits for step 1", ("planner",), wait_seconds_total=1.0),
    )

    (finding,) = diagnosed(look).findings

    assert finding.role == "planner"
    assert "runtime.prefetch_steps" in finding.do


def test_ranks_that_wait_no_longer_than_they_may_are_nobodys_trouble():
    assert diagnosed(*(a_wait(n, 0.03 * n, cause="loader-1") for n in range(3))).findings == ()


def test_waits_that_no_look_meets_are_told_as_such():
    looks = [a_look(n, a_role("rank dp=0", "computes", wait_seconds_total=n / 2)) for n in range(4)]

    (finding,) = diagnosed(*looks).findings

    assert "too short to show" in finding.what
    assert "50.0%" in finding.seen


def test_a_status_that_nobody_writes_is_of_a_plane_that_has_ended():
    (finding,) = diagnosed(a_look(0, a_role("planner")), now=60).findings

    assert "the last status is 60 s old" in finding.seen


def test_trouble_is_told_with_the_last_line_of_its_role():
    look = a_look(0, a_role("loader-0", "reads a.jsonl", task_s=40, in_trouble=True))

    (finding,) = diagnosed(look, logs={"loader-0": "read again in 5 s"}).findings

    assert finding.seen == (
        "reads a.jsonl for 40 s, heard of 0 s ago; its last line: read again in 5 s"
    )
    assert finding.do == "read /run/logs/loader-0.log"


def test_a_process_that_is_stopped_is_told_with_the_command_that_has_it_go_on():
    look = a_look(0, a_role("rank dp=1", "stopped", task_s=40, in_trouble=True))

    (finding,) = diagnosed(look).findings

    assert finding.what.startswith("rank dp=1 gives no sign of life: it is stopped, or ")
    assert "ps -o stat= -p 7 prints T, kill -CONT 7 resumes it" in finding.do


def test_a_rank_that_is_gone_is_told_with_what_the_others_can_do():
    look = a_look(0, a_role("rank dp=1", "ended", task_s=40, in_trouble=True))

    (finding,) = diagnosed(look).findings

    assert finding.what == "rank dp=1 has ended, or has closed its loader."
    assert finding.do.startswith("resize to the ranks that are left, or")


@pytest.mark.parametrize(
    ("roles", "said"),
    [
        (
            (a_role("rank dp=0", taken_steps_total=9), a_role("rank dp=1", taken_steps_total=6)),
            "rank dp=1 is 3 steps behind another rank.",
        ),
        ((a_role("loader-0", retries_total=3),), "A store did not answer loader-0 at first."),
        (
            (a_role("planner", **{f"{UNREAD}web": 1.0}, planned_step=40),),
            "web cannot be read further, and the run ends before the first step that needs more of it.",
        ),
        ((a_role("planner", lives=2, restarts=0),), "planner was lost and replaced."),
        ((a_role("planner", lives=1, restarts=3),), "The launcher has started the job again."),
        (
            (a_role("loader-0", **Reading(readers=1, share=0.4, core=1, lost=6).figures("web")),),
            "loader-0 reads web alone: 6 readers were lost in a row.",
        ),
        (
            (a_role("planner"), a_role("rank dp=0", taken_steps_total=500)),
            "No state was ever asked for: a restart begins at the first step.",
        ),
        (
            (
                a_role("planner", state_asked_timestamp_seconds=START_S - 7200),
                a_role("rank dp=0", taken_steps_total=500),
            ),
            "The last state was asked for long ago.",
        ),
    ],
)
def test_what_will_cost_work_is_told_too(roles, said):
    assert [finding.what for finding in diagnosed(a_look(0, *roles)).findings] == [said]


@pytest.mark.parametrize(
    "roles",
    [
        (a_role("rank dp=0", taken_steps_total=9), a_role("rank dp=1", taken_steps_total=8)),
        (a_role("planner", lives=1, restarts=0),),
        (a_role("planner"), a_role("rank dp=0", taken_steps_total=5)),
    ],
)
def test_what_is_as_it_should_be_is_no_finding(roles):
    assert diagnosed(a_look(0, *roles)).findings == ()


def lock_step(second, first, other, *, age_s, rate=20.0):
    """Return a moment of two ranks that reported their steps, the other ``age_s`` seconds before the first."""
    ranks = [
        a_role(f"rank dp={n}", taken_steps_total=steps).model_copy(
            update={"age_s": age, "rates": {"taken_steps_total": rate}}
        )
        for n, (steps, age) in enumerate([(first, 0.1), (other, 0.1 + age_s)])
    ]
    return a_look(second, *ranks)


@pytest.mark.parametrize(
    ("looks", "behind"),
    [
        (
            [lock_step(0, 100, 86, age_s=0.7)],
            None,
        ),  # within the number that it may have taken since
        ([lock_step(0, 100, 80, age_s=0.5)], "10"),
        ([lock_step(0, 100, 90, age_s=0.0)], "10"),
        # Two ranks report alternately, and neither is behind in every look.
        ([lock_step(0, 100, 95, age_s=0.0), lock_step(1, 115, 120, age_s=0.0)], None),
        ([lock_step(0, 100, 95, age_s=0.0), lock_step(1, 120, 115, age_s=0.0)], "5"),
    ],
)
def test_a_rank_is_behind_only_by_more_than_it_may_have_taken_since_it_told(looks, behind):
    found = [finding.what for finding in diagnosed(*looks).findings]

    said = [f"rank dp=1 is {behind} steps behind another rank."]
    assert found == (said if behind else [])


def test_a_planner_that_has_planned_every_step_is_not_told_to_plan_further_ahead():
    def at_the_end(second):
        state = f"{PLANNED_ALL} 150, where the run ends"
        return a_look(
            second,
            a_role("constructor-0", "has built every step that was planned", ("planner",)),
            a_role("planner", state, task_s=9.0),
            a_role("rank dp=0", "waits", ("constructor-0",), wait_seconds_total=10.0 + second),
        )

    slow = [a_wait(n, 0.8 * n, cause="loader-1") for n in range(3)]

    assert diagnosed(*map(at_the_end, range(3))).findings == ()
    # Earlier waits are reported, with the planner's state at that time.
    (finding,) = diagnosed(*slow, at_the_end(3)).findings
    assert finding.role == "loader-1"


def test_a_status_that_a_full_disk_keeps_from_being_written_is_of_a_plane_that_may_go_on():
    look = a_look(0, a_role("planner"))

    finding = diagnose([look], START_S + 60, {}, full="the disk of run is full").findings[0]

    assert "the disk of the run is full" in finding.what
    assert finding.seen == "the last status is 60 s old; the disk of run is full"
    assert "free some space" in finding.do


def test_a_plane_that_was_closed_is_told_as_such_and_no_rank_of_its_last_moment_is_behind():
    def a_last_look(*, has_ended):
        ranks = (
            a_role("rank dp=0", taken_steps_total=400.0),
            a_role("rank dp=1", task_s=30.0, in_trouble=True, taken_steps_total=395.0),
        )
        return a_look(0, *ranks).model_copy(update={"has_ended": has_ended})

    (finding,) = diagnosed(a_last_look(has_ended=True), now=90.0).findings
    killed = diagnosed(a_last_look(has_ended=False), now=90.0).findings

    assert (finding.what, "closed it 90 s ago" in finding.seen) == ("The plane has ended.", True)
    assert killed[0].what.startswith(
        "The plane has ended, or the process that opened it is stopped"
    )
    assert "if ps -o stat= -p 1 prints T, kill -CONT 1 resumes it" in killed[0].do
    assert len(killed) > 1


def test_a_plane_that_failed_is_told_with_what_the_planner_said_last():
    look = a_look(0, a_role("planner"), a_role("rank dp=0")).model_copy(update={"has_ended": True})
    at = "2026-11-27 17:30:23,502"
    logs = {
        "rank dp=0": f"{at} ERROR waits for step 9: gone",
        "planner": f"{at} ERROR the data plane stops: a.jsonl: gone",
    }

    (failed,) = diagnosed(look, logs=logs).findings
    (alone,) = diagnosed(look, logs=logs | {"planner": f"{at} INFO planner begins"}).findings
    (well,) = diagnosed(look, logs={"planner": f"{at} INFO an ERROR is in its words"}).findings

    assert failed.seen.endswith(f"; planner: {at} ERROR the data plane stops: a.jsonl: gone")
    assert failed.do.endswith("fix what it failed with")
    assert "rank dp=0: " in alone.seen
    assert "planner" not in well.seen
    assert well.do.endswith("the trainer's output says why it ended")


def test_a_clock_that_is_set_while_it_is_looked_at_changes_no_time_between_looks():
    def looks(jump_s):
        times = [n + (jump_s if n > 2 else 0) for n in range(6)]
        waits = [a_wait(at, 0.8 * n, cause="loader-1") for n, at in enumerate(times)]
        return [look.model_copy(update={"up_s": 90.0 + n}) for n, look in enumerate(waits)]

    as_it_was = diagnosed(*looks(0))

    assert as_it_was.seconds == 5.0
    assert diagnosed(*looks(3_600)) == diagnosed(*looks(-3_600)) == as_it_was


@pytest.mark.parametrize("ahead_s", [-3_600.0, 0.0, 3_600.0])
def test_a_plane_whose_status_changes_is_up_whatever_the_clock_of_its_host(ahead_s):
    looks = [a_look(n, a_role("planner"), a_role("rank dp=0")) for n in range(3)]
    now_s = START_S + 2.0 - ahead_s

    assert moment_of(looks, now_s, silent_s=0.5) == looks[-1].written_at + 0.5
    assert moment_of(looks, now_s, silent_s=9.0) > looks[-1].written_at + OLD_S


@pytest.mark.parametrize(("now", "silent_s"), [(60.0, 0.5), (-3_600.0, 60.0)])
def test_a_status_that_nobody_writes_is_old_by_our_clock_or_by_how_long_it_is_seen(now, silent_s):
    look = a_look(0, a_role("planner"))

    assert moment_of([look], START_S + now, silent_s) == look.written_at + 60.0


ADDED = "loader-2 was added for 1 source of loader-0, as loader-0 keeps 0.91 cores busy; follows the load since"
LOAD = "follows the load of the source loaders"


@pytest.mark.parametrize(
    ("state", "changes", "said"),
    [
        (ADDED, 1, f"2 source loaders after 1 change, the last 9 s ago: {ADDED}"),
        (LOAD, 0, f"2 source loaders, as at first: scaler {LOAD}"),
    ],
)
def test_what_the_scaler_did_last_and_why_is_said(state, changes, said):
    scaler = a_role("scaler", state, task_s=9.0, loaders=2, loader_changes_total=changes)

    assert diagnosed(a_look(0, scaler)).loaders == said
    assert diagnosed(a_look(0, a_role("planner"))).loaders == ""
