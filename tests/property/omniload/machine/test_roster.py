"""Whatever happens to the members of a plane, in any order: each lost one is replaced, and never acts afterwards."""

from hypothesis import given
from hypothesis import strategies as st

from omniload.machine.progress import Progress
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
from tests.support.examples import few

ROLES = ("loader-0", "loader-1")
DEEDS = (
    "ready",
    "ready",
    "look",
    "place",
    "place",
    "moves",
    "ends",
    "hangs",
    "stops",
    "meanwhile",
    "step",
    "step",
)
deeds = st.tuples(st.sampled_from(DEEDS), st.integers(0, 9))
lives = st.lists(deeds, min_size=10, max_size=60)
changes = st.sampled_from([None, "add", "retire", "add and retire"])


class Plane:
    """A roster, and the processes that it has started and not ended."""

    def __init__(self, shadows):
        self.roster = Roster(roles=dict.fromkeys(ROLES, shadows), silent_s=3.0)
        self.wanted = dict.fromkeys(ROLES, 1 + shadows)
        self.living = [Member(role) for role in ROLES]
        self.holders = {member.role: member for member in self.living}
        self.started = set(self.living)
        self.now_s, self.step, self.is_over = 0.0, 0, False
        self.carry(self.roster.begin())

    def handle(self, event):
        self.carry(self.roster.handle(event))

    def carry(self, commands):
        for command in commands:
            match command:
                case StartMember(member=member):
                    assert member not in self.started
                    self.started.add(member)
                    self.living.append(member)
                case EndMember(member=member):
                    self.living.remove(member)  # once, and only members that it has started
                    if self.holders.get(member.role) == member:
                        del self.holders[member.role]
                case HandOver(member=member):
                    assert member in self.living
                    assert member.role not in self.holders  # the previous holder was ended first
                    self.holders[member.role] = member
                case Abandoned(role=role):
                    del self.wanted[role]
                case EndPlane():
                    self.is_over = True
        if not self.is_over:
            assert sorted(self.roster.members(), key=str) == sorted(self.living, key=str)

    def befall(self, what, number):
        if what == "step":
            self.step += 1
            self.handle(StepsReleased(self.step))
        elif what == "look" or not self.living:
            self.look(seconds=0.5)
        else:
            member = self.living[number % len(self.living)]
            match what:
                case "ready":
                    self.handle(MemberReady(member))
                case "ends":
                    self.handle(MemberEnded(member, "killed"))
                case "place" | "moves":
                    self.handle(PlaceFound(member, may_hold=what == "moves"))
                case "meanwhile":  # while places are tried for all members of its role
                    for each in [m for m in self.living if m.role == member.role]:
                        self.handle(PlaceFound(each))
                    self.handle(MemberEnded(member, "killed"))
                case "hangs":
                    self.look(seconds=4.0, hangs=member)
                case "stops":
                    self.look(seconds=1.0, stops=member)

    def look(self, *, seconds, hangs=None, stops=None):
        began_s = self.now_s
        while self.now_s < began_s + seconds:
            self.now_s += 0.5
            beats = {
                m.name: Progress(
                    name=m.name, pid=7, beat_s=began_s if m == hangs else self.now_s, tasks=()
                )
                for m in self.living
            }
            stopped = frozenset() if stops is None else frozenset([stops.name])
            self.handle(MembersSeen(now_s=self.now_s, beats=beats, stopped=stopped))

    def come_to_rest(self):
        """Let every starting member reach stand-by, until no further member is started."""
        before = None
        while before != self.living:
            before = list(self.living)
            self.look(seconds=2.0)
            for member in before:
                self.handle(MemberReady(member))


@few(60, soak=1500)
@given(shadows=st.integers(0, 2), first=lives, change=changes, then=lives)
def test_at_rest_every_role_is_held_and_has_its_shadows_and_no_process_is_left_over(
    shadows, first, change, then
):
    plane = Plane(shadows)
    plane.come_to_rest()
    for deed in first:
        plane.befall(*deed)
    if change in ("add", "add and retire") and not plane.is_over:
        plane.wanted["loader-2"] = 1 + shadows
        plane.handle(RoleAdded("loader-2", shadows))
    if change in ("retire", "add and retire") and not plane.is_over:
        del plane.wanted["loader-0"]
        plane.handle(RoleRetired("loader-0"))
    for deed in then:
        plane.befall(*deed)

    if plane.is_over:
        assert plane.roster.handle(MemberReady(Member("loader-1", 99))) == ()
        return
    plane.come_to_rest()
    assert plane.roster.is_whole()
    there = [member.role for member in plane.living]
    assert {role: there.count(role) for role in plane.wanted} == plane.wanted
    assert set(there) == set(plane.wanted) == set(plane.holders)
