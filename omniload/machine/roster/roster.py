"""The Roster machine: who holds each role of a plane, who stands by, and who replaces whom.

One member of a role holds it; shadows stand by. Whoever is lost is ended before another
speaks in its place, so no two members of a role ever answer at once.

::

    started ──Ready──▶ standing by ──HandOver──▶ holder ──Ended, or silent──▶ EndMember
                                                   ▲                             │
                                                   └── the next one standing by ─┘   and, once that one has
                                                                                     settled, StartMember behind it
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import assert_never

from omniload.machine.progress import Progress, Watched
from omniload.machine.roster.members import (
    Abandoned,
    EndMember,
    GiveUp,
    HandOver,
    Member,
    MemberEnded,
    MemberReady,
    MembersSeen,
    PlaceFound,
    RoleAdded,
    RoleRetired,
    RosterCommand,
    RosterEvent,
    StartMember,
    StepsReleased,
)
from omniload.machine.waiting import SlowStore

__all__ = ["Roster"]

_STOPPED_S = 0.1
"""A process that the kernel has called stopped for so long will not go on by itself."""
_SETTLES_S = 1.0
"""Whoever takes over has the processors for so long, before another one that is to stand by is started behind it."""
_LONGEST_LOOK_S = 1.0
"""A longer time between two looks is one in which the roster's own process did not run: it says nothing of others."""
_BEGINS_S = 900.0
"""Without a first heartbeat for so long one that is started is lost; a cluster may have to find it a node first."""
_LOST_IN_A_ROW = 5
"""Members of one role that may be lost while no step is released; the next one would be lost too."""


@dataclass(slots=True)
class _Role:
    shadows: int
    holder: Member | None
    standing_by: list[Member] = field(default_factory=list)
    starting: set[Member] = field(default_factory=set)
    instead_of: dict[Member, Member] = field(default_factory=dict)
    """Members that are being started to stand by in place of others."""
    next_number: int = 1
    lost: int = 0
    """Members lost since a step was released."""
    settles_s: float = 0.0
    """Left of the time in which the holder settles."""
    is_new: bool = False
    """Whether nobody has held it yet, so that the plane can do without."""
    store: SlowStore = field(default_factory=SlowStore)
    """Of the holder, and whether it is slow for it alone."""

    def members(self) -> list[Member]:
        held = [self.holder] if self.holder is not None else []
        return [*held, *self.standing_by, *sorted(self.starting, key=lambda m: m.number)]

    def start(self, name: str) -> StartMember:
        member = Member(name, self.next_number)
        self.next_number += 1
        self.starting.add(member)
        return StartMember(member)

    def hand_over(self, member: Member) -> HandOver:
        self.holder, self.settles_s = member, _SETTLES_S
        return HandOver(member)


@dataclass(slots=True, kw_only=True)
class Roster:
    """Replaces members that are lost, for as long as steps are released in between."""

    roles: Mapping[str, int]
    """Shadows that are wanted for each role. The first member of each holds it when the roster begins."""
    silent_s: float = 10.0
    """Without a heartbeat for so long a member hangs; a busy machine may keep one from it for some seconds."""
    stuck_s: float = 300.0
    """In one call to a store for so long a member is stuck."""
    _roles: dict[str, _Role] = field(init=False)
    _beats: dict[Member, Watched] = field(default_factory=dict, init=False)
    _looked_s: float | None = field(default=None, init=False)
    _released_to: int = field(default=0, init=False)
    _gave_up: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._roles = {
            name: _Role(shadows=shadows, holder=Member(name))
            for name, shadows in self.roles.items()
        }

    def begin(self) -> tuple[RosterCommand, ...]:
        """Start the shadows."""
        return tuple(command for role in self._roles for command in self._fill(role))

    def handle(self, event: RosterEvent) -> tuple[RosterCommand, ...]:  # noqa: PLR0911 -- one for each event
        """Apply one event and return what must now be done, in order."""
        if self._gave_up:
            return ()
        match event:
            case MemberReady(member=member):
                return self._ready(member)
            case MemberEnded(member=member, why=why):
                return self._lose(member, why)
            case MembersSeen():
                return self._see(event)
            case StepsReleased(step=step):
                return self._release(step)
            case RoleAdded(role=role, shadows=shadows):
                # Its first life is number 0, as that of every role that the plane was opened with.
                self._roles[role] = _Role(shadows=shadows, holder=None, next_number=0, is_new=True)
                return self._fill(role)
            case RoleRetired(role=role):
                return self._retire(role, "no source is left to it")
            case PlaceFound():
                return self._start_instead_of(event.member, event.may_hold)
            case _:
                assert_never(event)

    def holder_of(self, role: str) -> Member | None:
        """Return who holds a role; ``None`` while nobody does, or where it is retired."""
        return self._roles[role].holder if role in self._roles else None

    def wants(self, role: str) -> bool:
        """Tell whether a role is to be held."""
        return role in self._roles

    def is_whole(self) -> bool:
        """Tell whether every role is held and every shadow that is wanted stands by."""
        roles = self._roles.values()
        return all(r.holder is not None and len(r.standing_by) >= r.shadows for r in roles)

    def members(self) -> list[Member]:
        """Return all members, those that are being started too."""
        return [member for role in self._roles.values() for member in role.members()]

    def shadows(self) -> list[Member]:
        """Return the members that stand by."""
        return [member for role in self._roles.values() for member in role.standing_by]

    def _release(self, step: int) -> tuple[RosterCommand, ...]:
        if step > self._released_to:
            self._released_to = step
            # Of every role: a step takes all of them, so each has shown that it can.
            for each in self._roles.values():
                each.lost = 0
        return ()

    def _ready(self, member: Member) -> tuple[RosterCommand, ...]:
        role = self._roles.get(member.role)
        if role is None or member not in role.starting:
            return ()  # it was lost meanwhile, or its role retired
        role.starting.remove(member)
        before = role.instead_of.pop(member, None)
        if before and before == role.holder and not role.shadows:
            self._beats.pop(before, None)
            return (EndMember(before, "it moves to a better place"), role.hand_over(member))
        if role.holder is not None:
            role.standing_by.append(member)
            return self._relieve(role, before)
        role.is_new = False
        return (role.hand_over(member),)

    def _start_instead_of(self, member: Member, may_hold: bool) -> tuple[RosterCommand, ...]:
        role = self._roles.get(member.role)
        # One after the other, and not while the holder settles; whoever looks for places finds this one again.
        if role is None or role.starting or role.settles_s > 0:
            return ()
        if member not in (role.members() if may_hold and not role.shadows else role.standing_by):
            return ()
        command = role.start(member.role)
        role.instead_of[command.member] = member
        return (command,)

    def _relieve(self, role: _Role, member: Member | None) -> tuple[RosterCommand, ...]:
        """End a member in whose place another one stands by now, unless it took over or was lost meanwhile."""
        # Nor where somebody else was lost: the new one is counted in that one's place, and both are wanted.
        if member not in role.standing_by or len(role.standing_by) <= role.shadows:
            return ()
        role.standing_by.remove(member)
        self._beats.pop(member, None)
        return (EndMember(member, "another one stands by in a better place"),)

    def _lose(self, member: Member, why: str) -> tuple[RosterCommand, ...]:
        """Replace a member; one that is not on the roster any more was replaced before."""
        role = self._roles.get(member.role)
        if role is None or member not in role.members():
            return ()
        # Nothing is served by it yet: the plane goes on without it, and whoever adds it may try again.
        if role.is_new:
            return (*self._retire(member.role, why), Abandoned(member.role, why))
        self._beats.pop(member, None)
        role.starting.discard(member)
        if (tried := role.instead_of.pop(member, None)) and tried in role.members():
            # Nothing is lost: another place was only tried. But it may have been counted in place of one that was.
            return (EndMember(member, why), *self._fill(member.role))
        role.lost += 1
        if role.lost > _LOST_IN_A_ROW:
            # No further event is heard: what is lost from now on is lost with the plane.
            self._gave_up = True
            reason = (
                f"{member.role} was lost {role.lost} times while no step was taken, the last time: {why}; "
                "mend that and start again from the last checkpoint"
            )
            return (EndMember(member, why), GiveUp(member.role, reason))
        if member in role.standing_by:
            role.standing_by.remove(member)
        # First of all: until it is ended, the lost one may speak beside the next.
        commands: list[RosterCommand] = [EndMember(member, why)]
        if member == role.holder:
            role.holder = None
            if role.standing_by:
                return (*commands, role.hand_over(role.standing_by.pop(0)))
        return (*commands, *self._fill(member.role))

    def _retire(self, name: str, why: str) -> tuple[RosterCommand, ...]:
        """End every member of a role, which nobody replaces; one that is retired already stays so."""
        role = self._roles.pop(name, None)
        members = [] if role is None else role.members()
        for member in members:
            self._beats.pop(member, None)
        return tuple(EndMember(member, why) for member in members)

    def _fill(self, name: str) -> tuple[RosterCommand, ...]:
        """Start as many members as the role lacks; while its holder settles, none."""
        role = self._roles[name]
        # Starting a process takes a core for a second or two, in which the holder has steps to catch up on.
        if role.holder is not None and role.settles_s > 0:
            return ()
        # Those in place of others count: where the one before them is lost meanwhile, they are its next.
        return tuple(role.start(name) for _ in range(1 + role.shadows - len(role.members())))

    def _see(self, seen: MembersSeen) -> tuple[RosterCommand, ...]:
        """Count, in time in which the roster itself ran, how long each member is silent or stopped."""
        passed_s = 0.0 if self._looked_s is None else seen.now_s - self._looked_s
        self._looked_s = seen.now_s
        commands = list(self._settle(passed_s))
        # Settling went on above: whoever took over had the processors in that time, as the roster had not.
        if passed_s > _LONGEST_LOOK_S:
            return tuple(commands)
        for member in self.members():
            progress = seen.beats.get(member.name)
            beat = self._beats.setdefault(member, Watched())
            beat.see(progress, is_stopped=member.name in seen.stopped, passed_s=passed_s)
            if not self._gave_up and (why := self._why_lost(member, progress, beat)) is not None:
                commands += self._lose(member, why)  # none beside one that ends the plane
        for role in self._roles.values():
            commands += self._leave_slow_store(role, seen, passed_s)
        return tuple(commands)

    def _leave_slow_store(
        self, role: _Role, seen: MembersSeen, passed_s: float
    ) -> tuple[RosterCommand, ...]:
        """Have a shadow hold a role whose store answers, where the holder's has become slow."""
        holder = None if role.holder is None else seen.beats.get(role.holder.name)
        shadows = {m.name: m for m in role.standing_by if m.name in seen.beats}
        if holder is None or not shadows or self._gave_up:
            return ()
        found = role.store.see(holder, [seen.beats[name] for name in shadows], passed_s)
        if found is None:
            return ()
        quicker = shadows[found.name]
        role.standing_by.remove(quicker)
        role.standing_by.insert(0, quicker)
        assert role.holder is not None, "its heartbeat was looked at"
        return self._lose(role.holder, found.why)

    def _settle(self, passed_s: float) -> Iterable[RosterCommand]:
        """Start whoever is to stand by behind holders that have settled."""
        for name, role in self._roles.items():
            if role.settles_s > 0:
                role.settles_s -= passed_s
                yield from self._fill(name)

    def _why_lost(self, member: Member, progress: Progress | None, beat: Watched) -> str | None:
        process = "its process" if progress is None else f"process {progress.pid}"
        # First what the kernel knows: it is said within a tenth of a second, silence only after many.
        if beat.stopped_s is not None and beat.stopped_s >= _STOPPED_S:
            return f"{process} is stopped"
        if progress is None:  # of one that stands ready its host does not tell just now
            role = self._roles.get(member.role)
            is_late = role is not None and member in role.starting and beat.silent_s >= _BEGINS_S
            return f"it has not begun in {_BEGINS_S:.0f} s" if is_late else None
        if beat.silent_s >= self.silent_s:
            return f"{process} gave no heartbeat for {beat.silent_s:.0f} s"
        if beat.call is not None and beat.call_s >= self.stuck_s:
            return f"{process} {beat.call.doing} for {beat.call_s:.0f} s, in one call"
        return None
