"""The Roster machine: a lost member is ended first, then replaced; and the roster gives up in time."""

from dataclasses import replace

import pytest

from omniload.machine.progress import Progress, Task
from omniload.machine.roster.members import (
    Abandoned,
    EndMember,
    EndPlane,
    HandOver,
    Member,
    MemberEnded,
    MemberReady,
    MembersSeen,
    PlaceFound,
    RoleAdded,
    RoleRetired,
    StartMember,
    StepsReleased,
)
from omniload.machine.roster.roster import Roster

ROLE = "loader-0"
FIRST, SECOND, THIRD = (Member(ROLE, number) for number in range(3))


def a_roster(shadows=0, *ready):
    roster = Roster(roles={ROLE: shadows})
    roster.begin()
    for member in ready:
        roster.handle(MemberReady(member))
    return roster


def looks(
    roster, *, seconds, beat=None, stopped=(), from_s=100.0, every_s=0.25, call_at=lambda _: None
):
    """Look at the first member several times; ``beat`` gives its last heartbeat, ``call_at`` the start of its call."""
    found = []
    for i in range(int(seconds / every_s) + 1):
        now_s = from_s + i * every_s
        beat_s = now_s if beat is None else beat
        call = call_at(now_s)
        calls = () if call is None else (call,)
        progress = Progress(name=FIRST.name, pid=7, beat_s=beat_s, tasks=(), calls=calls)
        found += roster.handle(
            MembersSeen(now_s=now_s, beats={FIRST.name: progress}, stopped=frozenset(stopped))
        )
    return found


def test_members_are_named_after_their_role_and_their_life():
    assert [member.name for member in (FIRST, SECOND)] == ["loader-0", "loader-0+1"]


def test_as_many_shadows_are_started_as_are_wanted():
    assert Roster(roles={ROLE: 2}).begin() == (StartMember(SECOND), StartMember(THIRD))
    assert Roster(roles={ROLE: 0}).begin() == ()


def test_a_shadow_takes_over_after_the_lost_one_was_ended():
    roster = a_roster(1, SECOND)

    assert roster.handle(MemberEnded(FIRST, "killed")) == (
        EndMember(FIRST, "killed"),
        HandOver(SECOND),
    )
    assert roster.holder_of(ROLE) == SECOND


@pytest.mark.parametrize("every_s", [0.25, 30.0])
def test_another_is_started_behind_a_shadow_that_took_over_once_that_has_settled(every_s):
    roster = a_roster(1, SECOND)
    looks(roster, seconds=0)
    roster.handle(MemberEnded(FIRST, "killed"))

    assert looks(roster, seconds=0.75, from_s=100.0, every_s=0.25) == []
    assert looks(roster, seconds=every_s, from_s=101.0, every_s=every_s) == [StartMember(THIRD)]
    assert looks(roster, seconds=60.0, from_s=140.0) == []


def test_who_is_lost_before_it_has_settled_and_with_nobody_behind_it_is_replaced_at_once():
    roster = a_roster(1, SECOND)
    roster.handle(MemberEnded(FIRST, "killed"))

    assert roster.handle(MemberEnded(SECOND, "killed")) == (
        EndMember(SECOND, "killed"),
        StartMember(THIRD),
        StartMember(Member(ROLE, 3)),
    )


def test_without_a_shadow_the_role_is_handed_over_once_another_member_is_ready():
    roster = a_roster()

    assert roster.handle(MemberEnded(FIRST, "killed")) == (
        EndMember(FIRST, "killed"),
        StartMember(SECOND),
    )
    assert roster.holder_of(ROLE) is None
    assert roster.handle(MemberReady(SECOND)) == (HandOver(SECOND),)


def test_a_shadow_that_is_still_starting_takes_over_as_soon_as_it_is_ready():
    roster = a_roster(1)

    assert roster.handle(MemberEnded(FIRST, "killed")) == (
        EndMember(FIRST, "killed"),
        StartMember(THIRD),
    )
    assert roster.handle(MemberReady(SECOND)) == (HandOver(SECOND),)
    assert roster.handle(MemberReady(THIRD)) == ()


def test_it_is_whole_once_every_role_is_held_and_every_shadow_stands_by():
    assert a_roster().is_whole()
    roster = a_roster(1)
    assert not roster.is_whole()
    roster.handle(MemberReady(SECOND))
    assert roster.is_whole()
    roster.handle(MemberEnded(FIRST, "killed"))
    assert not roster.is_whole()


def test_a_lost_shadow_is_replaced_and_nobody_is_told_of_it():
    roster = a_roster(1, SECOND)

    assert roster.handle(MemberEnded(SECOND, "killed")) == (
        EndMember(SECOND, "killed"),
        StartMember(THIRD),
    )
    assert roster.holder_of(ROLE) == FIRST


def test_the_end_of_a_member_that_was_replaced_is_old_news():
    roster = a_roster(1, SECOND)
    roster.handle(MemberEnded(FIRST, "stopped"))

    assert roster.handle(MemberEnded(FIRST, "killed by the roster")) == ()
    assert roster.handle(MemberReady(FIRST)) == ()


READS = Task(doing="reads /data/0.parquet", since_s=7.0)


@pytest.mark.parametrize(
    ("call_at", "seconds", "is_lost"),
    [
        (lambda _: READS, 59, False),
        (lambda _: READS, 61, True),
        # One call after the other, each at the same place: the loader makes progress.
        (lambda now_s: replace(READS, since_s=now_s // 30), 600, False),
        (lambda _: None, 600, False),
        # On another host: the quicker an answer, the better is known when the call began there.
        (lambda now_s: replace(READS, since_s=7.0 - 0.3 * (now_s > 130)), 61, True),
        # Many short calls, of which each look finds another that has just begun.
        (lambda now_s: replace(READS, since_s=now_s), 600, False),
    ],
)
def test_a_member_in_one_call_to_its_store_for_too_long_is_replaced(call_at, seconds, is_lost):
    roster = Roster(roles={ROLE: 0}, stuck_s=60.0)

    found = looks(roster, seconds=seconds, call_at=call_at)

    lost = EndMember(FIRST, "process 7 reads /data/0.parquet for 60 s, in one call")
    assert found == ([lost, StartMember(SECOND)] if is_lost else [])


def test_how_long_a_member_may_be_silent_is_said():
    roster = Roster(roles={ROLE: 0}, silent_s=3.0)

    assert looks(roster, seconds=2.5, beat=1.0) == []
    assert looks(roster, seconds=1.0, from_s=102.75, beat=1.0)[1] == StartMember(SECOND)


def test_a_process_that_is_stopped_at_two_looks_is_replaced():
    assert looks(a_roster(), seconds=0.0, stopped=[FIRST.name]) == []
    assert looks(a_roster(), seconds=0.25, stopped=[FIRST.name]) == [
        EndMember(FIRST, "process 7 is stopped"),
        StartMember(SECOND),
    ]


def test_a_member_without_heartbeats_is_replaced_and_one_with_them_is_not():
    assert looks(a_roster(), seconds=60) == []
    assert looks(a_roster(), seconds=9, beat=1.0) == []
    ended, _ = looks(a_roster(), seconds=11, beat=1.0)
    assert ended == EndMember(FIRST, "process 7 gave no heartbeat for 10 s")


def test_a_member_that_never_begins_is_replaced_as_if_it_had_ended():
    roster = a_roster()
    roster.handle(MemberEnded(FIRST, "killed"))
    looked = (MembersSeen(now_s=100.0 + tenths / 10, beats={}) for tenths in range(9_003))

    found = [command for seen in looked for command in roster.handle(seen)]

    assert found == [EndMember(SECOND, "it has not begun in 900 s"), StartMember(THIRD)]


def unheard(roster, *, seconds, from_s=100.0, stopped=()):
    """Look without any heartbeat; return the commands."""
    looked = (
        MembersSeen(now_s=from_s + tenths / 10, beats={}, stopped=frozenset(stopped))
        for tenths in range(int(10 * seconds) + 1)
    )
    return [command for seen in looked for command in roster.handle(seen)]


def test_a_holder_whose_host_tells_no_heartbeats_is_left_alone():
    assert unheard(a_roster(), seconds=2_000) == []


def test_time_in_which_the_host_of_a_holder_was_not_heard_is_none_in_which_that_was_silent():
    roster = a_roster()
    assert looks(roster, seconds=5, beat=1.0) == []

    assert unheard(roster, seconds=60, from_s=105.0) == []

    assert looks(roster, seconds=4.5, from_s=165.0, beat=1.0) == []
    assert looks(roster, seconds=1, from_s=169.5, beat=1.0) == [
        EndMember(FIRST, "process 7 gave no heartbeat for 10 s"),
        StartMember(SECOND),
    ]


def test_a_process_that_is_stopped_is_replaced_though_no_heartbeat_of_it_is_told():
    roster = a_roster()
    assert unheard(roster, seconds=0, stopped=[FIRST.name]) == []
    # It resumes; its earlier silence does not count again.
    assert unheard(roster, seconds=0.3, from_s=100.1) == []

    assert unheard(roster, seconds=0, from_s=100.5, stopped=[FIRST.name]) == []
    assert unheard(roster, seconds=0, from_s=100.75, stopped=[FIRST.name]) == [
        EndMember(FIRST, "its process is stopped"),
        StartMember(SECOND),
    ]


def test_time_in_which_the_roster_itself_did_not_run_says_nothing_of_others():
    assert looks(a_roster(), seconds=3600, beat=1.0, every_s=30.0) == []
    assert looks(a_roster(), seconds=3600, stopped=[FIRST.name], every_s=30.0) == []


def test_a_process_that_goes_on_in_time_is_left_alone():
    roster = a_roster()
    looks(roster, seconds=0.0, stopped=[FIRST.name])
    looks(roster, seconds=0.0, from_s=100.25)

    assert looks(roster, seconds=0.0, from_s=100.5, stopped=[FIRST.name]) == []


def lose_holder(roster):
    """Lose the holder of a role without shadows; make the next member ready, if there is one."""
    commands = roster.handle(MemberEnded(roster.holder_of(ROLE), "killed"))
    for command in commands:
        if isinstance(command, StartMember):
            roster.handle(MemberReady(command.member))
    return commands[-1]


def test_it_gives_up_where_members_are_lost_and_no_step_is_taken():
    roster = a_roster()

    last = [lose_holder(roster) for _ in range(6)][-1]

    assert isinstance(last, EndPlane)
    assert "loader-0 was lost 6 times while no step was taken, the last time: killed" in last.why
    assert roster.handle(MemberReady(SECOND)) == ()


def test_who_is_lost_at_the_look_that_ends_the_plane_is_not_replaced():
    roster = Roster(roles={ROLE: 0, "loader-1": 0})
    for _ in range(5):
        lose_holder(roster)
    held = roster.holder_of(ROLE), roster.holder_of("loader-1")
    beats = {m.name: Progress(name=m.name, pid=7, beat_s=1.0, tasks=()) for m in held}

    stopped, found = frozenset(m.name for m in held), []
    for now_s in (1.0, 1.25):
        found += roster.handle(MembersSeen(now_s=now_s, beats=beats, stopped=stopped))

    assert [type(command) for command in found] == [EndMember, EndPlane]


@pytest.mark.parametrize(("steps", "gives_up"), [((1, 2, 3), False), ((1, 1, 1), True)])
def test_losses_count_anew_with_every_step_that_is_taken(steps, gives_up):
    roster = a_roster()

    found = []
    for step in steps:
        if not any(isinstance(command, EndPlane) for command in found):
            found += [lose_holder(roster) for _ in range(3)]
            roster.handle(StepsReleased(step))

    assert any(isinstance(command, EndPlane) for command in found) == gives_up


ADDED = Member("loader-9"), Member("loader-9", 1)


def test_a_role_that_is_added_is_held_by_the_first_member_that_is_ready():
    roster = a_roster()

    assert roster.handle(RoleAdded("loader-9", shadows=1)) == tuple(map(StartMember, ADDED[:2]))
    assert not roster.is_whole()
    assert roster.handle(MemberReady(ADDED[1])) == (HandOver(ADDED[1]),)
    assert roster.handle(MemberReady(ADDED[0])) == ()
    assert roster.is_whole()
    assert roster.handle(MemberEnded(ADDED[1], "killed")) == (
        EndMember(ADDED[1], "killed"),
        HandOver(ADDED[0]),
    )


def test_a_role_that_was_added_and_never_held_is_given_up_and_the_plane_goes_on():
    roster = a_roster()
    roster.handle(RoleAdded("loader-9"))

    assert roster.handle(MemberEnded(ADDED[0], "other data")) == (
        EndMember(ADDED[0], "other data"),
        Abandoned("loader-9", "other data"),
    )
    assert not roster.wants("loader-9")
    assert roster.holder_of(ROLE) == FIRST


def test_all_members_of_a_role_that_retires_are_ended_and_nobody_replaces_them():
    roster = a_roster(1, SECOND)

    ended = roster.handle(RoleRetired(ROLE))

    assert [command.member for command in ended] == [FIRST, SECOND]
    assert roster.handle(RoleRetired(ROLE)) == ()
    assert roster.handle(MemberEnded(FIRST, "its process has ended")) == ()
    assert roster.handle(MemberReady(THIRD)) == ()
    assert roster.holder_of(ROLE) is None


def test_where_a_better_place_is_found_another_one_is_ready_there_before_the_one_that_stands_by_is_ended():
    roster = a_roster(1, SECOND)

    assert roster.handle(PlaceFound(SECOND)) == (StartMember(THIRD),)
    assert roster.handle(PlaceFound(SECOND)) == ()
    assert roster.is_whole()
    assert roster.handle(MemberReady(THIRD)) == (
        EndMember(SECOND, "another one stands by in a better place"),
    )
    assert roster.members() == [FIRST, THIRD]


def test_a_better_place_is_of_use_to_a_member_that_stands_by_alone():
    roster = a_roster(1)

    assert [roster.handle(PlaceFound(each)) for each in (FIRST, SECOND, Member("gone"))] == [()] * 3


def test_a_place_that_turns_out_to_be_none_costs_nothing_however_often_it_is_tried():
    roster = a_roster(1, SECOND)

    for life in range(2, 12):
        assert roster.handle(PlaceFound(SECOND)) == (StartMember(Member(ROLE, life)),)
        assert roster.handle(MemberEnded(Member(ROLE, life), "no data there")) == (
            EndMember(Member(ROLE, life), "no data there"),
        )
    assert roster.handle(MemberEnded(FIRST, "killed"))[-1] == HandOver(SECOND)


@pytest.mark.parametrize("lost", [FIRST, SECOND])
def test_whoever_is_lost_while_another_place_is_tried_is_replaced_by_the_one_that_is_started_there(
    lost,
):
    roster = a_roster(1, SECOND)
    roster.handle(PlaceFound(SECOND))

    after = [] if lost == SECOND else [HandOver(SECOND)]
    assert list(roster.handle(MemberEnded(lost, "killed"))) == [EndMember(lost, "killed"), *after]
    assert roster.handle(MemberReady(THIRD)) == ()
    assert roster.members() == [SECOND if lost == FIRST else FIRST, THIRD]


def test_one_that_is_started_elsewhere_is_replaced_like_any_other_once_nobody_else_stands_by():
    roster = a_roster(1, SECOND)
    roster.handle(PlaceFound(SECOND))
    roster.handle(MemberEnded(SECOND, "killed"))

    assert roster.handle(MemberEnded(THIRD, "killed")) == (
        EndMember(THIRD, "killed"),
        StartMember(Member(ROLE, 3)),
    )


@pytest.mark.parametrize("lost", [FIRST, THIRD])
@pytest.mark.parametrize("is_there", [True, False])
def test_one_that_is_started_elsewhere_counts_for_another_that_is_lost_meanwhile(lost, is_there):
    roster = a_roster(2, SECOND, THIRD)
    tried = SECOND if lost == THIRD else THIRD
    (started,) = roster.handle(PlaceFound(tried))
    roster.handle(MemberEnded(lost, "killed"))
    looks(roster, seconds=2)  # the successor has settled

    if is_there:
        assert roster.handle(MemberReady(started.member)) == ()
    else:
        _, again = roster.handle(MemberEnded(started.member, "no data there"))
        assert roster.handle(MemberReady(again.member)) == ()
    assert roster.is_whole()
    assert len(roster.members()) == 3


def test_nobody_is_started_in_a_better_place_while_a_holder_settles():
    roster = a_roster(2, SECOND, THIRD)
    roster.handle(MemberEnded(FIRST, "killed"))

    assert roster.handle(PlaceFound(THIRD)) == ()


def test_a_holder_that_begins_with_nothing_goes_on_until_another_one_is_there_in_a_better_place():
    roster = a_roster()

    assert roster.handle(PlaceFound(FIRST)) == ()
    assert roster.handle(PlaceFound(FIRST, may_hold=True)) == (StartMember(SECOND),)
    assert roster.handle(PlaceFound(FIRST, may_hold=True)) == ()
    assert roster.handle(MemberReady(SECOND)) == (
        EndMember(FIRST, "it moves to a better place"),
        HandOver(SECOND),
    )
    assert roster.handle(MemberEnded(FIRST, "killed")) == ()
    assert roster.members() == [SECOND]


def test_a_holder_that_is_lost_while_it_moves_is_followed_by_the_one_that_is_started_there():
    roster = a_roster()
    roster.handle(PlaceFound(FIRST, may_hold=True))

    assert roster.handle(MemberEnded(FIRST, "killed")) == (EndMember(FIRST, "killed"),)
    assert roster.handle(MemberReady(SECOND)) == (HandOver(SECOND),)


def test_a_place_for_a_holder_that_turns_out_to_be_none_costs_nothing():
    roster = a_roster()

    for life in range(1, 12):
        tried = Member(ROLE, life)
        assert roster.handle(PlaceFound(FIRST, may_hold=True)) == (StartMember(tried),)
        assert roster.handle(MemberEnded(tried, "no node")) == (EndMember(tried, "no node"),)
    assert roster.holder_of(ROLE) == FIRST


def test_members_that_cannot_be_started_in_place_of_a_lost_holder_are_counted():
    roster = a_roster()
    roster.handle(MemberEnded(FIRST, "killed"))

    found = [roster.handle(MemberEnded(Member(ROLE, life), "no node")) for life in range(1, 6)]

    assert [type(commands[-1]) for commands in found] == [StartMember] * 4 + [EndPlane]
