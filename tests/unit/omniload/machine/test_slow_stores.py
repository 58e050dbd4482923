"""A holder whose store has become slow hands over to a shadow whose store is not, and never to and fro for ever."""

from itertools import pairwise
from statistics import median

import pytest

from omniload.base.concurrency.calls_under_way import ENDED_CALLS, RECENT_CALL, USUAL_CALL
from omniload.machine.progress import Progress
from omniload.machine.roster.members import (
    EndMember,
    HandOver,
    Member,
    MemberReady,
    MembersSeen,
    StartMember,
    StepsReleased,
)
from omniload.machine.roster.roster import Roster

ROLE = "loader-0"
FIRST, SECOND, THIRD = (Member(ROLE, number) for number in range(3))
USUAL_S, SLOW_S = 0.05, 0.6
LOOK_S = 0.25


class Plane:
    """A roster, and members that call their stores one call after the other, each as long as it takes there."""

    def __init__(self, shadows=1):
        self.roster, self.now_s = Roster(roles={ROLE: shadows}), 0.0
        self.ended_s, self.next_s, self.found = {}, {}, []
        self.carry(self.roster.begin())

    def carry(self, commands):
        for command in commands:
            if isinstance(command, StartMember):
                self.carry(self.roster.handle(MemberReady(command.member)))
            else:
                self.found.append((self.now_s, command))

    @property
    def holder(self):
        return self.roster.holder_of(ROLE)

    def go_on(self, seconds, took_s, every_s=LOOK_S):
        """Advance for a while in which a call of a member takes ``took_s(member)``; ``None`` if it makes no call."""
        until_s = self.now_s + seconds
        self.roster.handle(StepsReleased(round(until_s)))
        while self.now_s < until_s:
            self.now_s += every_s
            for member in self.roster.members():
                calls = self.ended_s.setdefault(member.name, [])
                self.next_s.setdefault(member.name, self.now_s)
                while (took := took_s(member)) and self.next_s[member.name] + took <= self.now_s:
                    calls.append(took)
                    self.next_s[member.name] += took
            beats = {m.name: self.beat(m.name) for m in self.roster.members()}
            self.carry(self.roster.handle(MembersSeen(now_s=self.now_s, beats=beats)))

    def beat(self, name):
        calls = self.ended_s[name]
        figures = {ENDED_CALLS: len(calls)}
        if len(calls) >= 8:
            figures |= {USUAL_CALL: median(calls[-64:]), RECENT_CALL: median(calls[-8:])}
        return Progress(
            name=name, pid=7, beat_s=self.now_s, tasks=(), figures=figures, host=f"host of {name}"
        )

    @property
    def hand_overs(self):
        return [
            (at_s, command.member) for at_s, command in self.found if isinstance(command, HandOver)
        ]


def usual(member):
    return USUAL_S


def slow_for(*slow, took_s=SLOW_S):
    return lambda member: took_s if member in slow else USUAL_S


def test_a_shadow_takes_over_from_a_holder_whose_store_alone_has_become_ten_times_as_slow():
    plane = Plane()
    plane.go_on(30, usual)
    plane.go_on(30, slow_for(FIRST))

    (_, ended), (at_s, handed) = plane.found
    assert isinstance(ended, EndMember)
    assert ended.member == FIRST
    assert ended.why == (
        "a call to its store takes 0.6 s, where it took 0.05 s, and 0.05 s from loader-0+1 on "
        "host of loader-0+1"
    )
    assert handed == HandOver(SECOND)
    assert 40 < at_s < 46  # ten seconds of it, and some calls
    assert plane.roster.is_whole()


def test_of_two_shadows_the_one_takes_over_whose_store_answers_soonest():
    plane = Plane(shadows=2)
    plane.go_on(30, usual)
    plane.go_on(30, slow_for(FIRST, SECOND))

    assert [member for _, member in plane.hand_overs] == [THIRD]
    assert SECOND in plane.roster.shadows()


@pytest.mark.parametrize(
    "took_s",
    [
        slow_for(FIRST, SECOND),  # the store of all
        slow_for(FIRST, took_s=9 * USUAL_S),
        lambda member: SLOW_S if member == FIRST else 0.3,  # quicker, but not by much
        lambda member: SLOW_S if member == FIRST else None,  # it has not been measured since
    ],
)
def test_nobody_takes_over_whose_store_is_slow_too_or_was_not_asked_since(took_s):
    plane = Plane()
    plane.go_on(30, usual)
    plane.go_on(600, took_s)

    assert plane.found == []


def test_a_store_that_is_slow_from_the_first_call_on_is_as_slow_as_it_is():
    """The second to read a block may have it from a cache that the first has filled."""
    plane = Plane()
    plane.go_on(600, slow_for(FIRST))

    assert plane.found == []


@pytest.mark.parametrize("slow_s", [5.0, 9.0])
def test_a_store_that_is_slow_for_some_seconds_replaces_nobody(slow_s):
    plane = Plane()
    for _ in range(20):
        plane.go_on(30, usual)
        plane.go_on(slow_s, slow_for(FIRST))

    assert plane.found == []


def test_so_short_calls_hold_nobody_up():
    plane = Plane()
    plane.go_on(30, lambda member: 0.001)
    plane.go_on(60, lambda member: 0.1 if member == FIRST else 0.001)

    assert plane.found == []


def test_stores_that_are_slow_in_turn_swap_ever_more_rarely():
    """The store is slow for the holder after each half minute, and quick for the member that stands by."""
    plane, until_s = Plane(), 3 * 3600.0
    plane.go_on(30, usual, every_s=1.0)
    while plane.now_s < until_s:
        plane.go_on(30, usual, every_s=1.0)
        before = len(plane.hand_overs)
        while len(plane.hand_overs) == before and plane.now_s < until_s:
            plane.go_on(30, slow_for(plane.holder), every_s=1.0)

    times_s = [at_s for at_s, _ in plane.hand_overs]
    pauses_s = [b - a for a, b in pairwise(times_s)]
    assert len(times_s) == 6
    assert all(pause_s >= 300 * 2**n for n, pause_s in enumerate(pauses_s))
