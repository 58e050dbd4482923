"""The Roster machine: which member holds each role of a plane, which stand by, and which replaces which.

One member of a role holds it; its shadows stand by. A lost member is ended before another one takes over,
so no two members of a role ever answer at the same time.

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
    EndPlane,
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
"""A process that the kernel has reported as stopped for this long will not continue by itself."""
_SETTLES_S = 1.0
"""A member that takes over has the processors for this long before a new shadow is started."""
_LONGEST_LOOK_S = 1.0
"""A longer time between two looks means that the roster's own process did not run; it says nothing about members."""
_BEGINS_S = 900.0
"""A started member without a heartbeat for this long is lost; a cluster may have to find a node for it first."""
_LOST_IN_A_ROW = 5
"""Members of one role that may be lost without a released step in between; the next one would be lost too."""


@dataclass(slots=True)
class _Role:
    shadows: int
    holder: Member | None
    standing_by: list[Member] = field(default_factory=list)
    starting: set[Member] = field(default_factory=set)
    instead_of: dict[Member, Member] = field(default_factory=dict)
    """Members being started, each with the standing-by member that it will replace."""
    next_number: int = 1
    lost: int = 0
    """Members lost since the last released step."""
    settles_s: float = 0.0
    """Remaining time for the holder to settle."""
    is_new: bool = False
    """Whether no member has held the role yet, so that the plane can do without it."""
    store: SlowStore = field(default_factory=SlowStore)
    """Notices when the store is slow for the holder alone."""

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
    """Replaces lost members, as long as steps are released in between."""

    roles: Mapping[str, int]
    """Wanted number of shadows of each role. When the roster begins, the first member of each role holds it."""
    silent_s: float = 10.0
    """A member without a heartbeat for this long hangs; on a busy machine, heartbeats may be some seconds late."""
    stuck_s: float = 300.0
    """A member that spends this long in one call to a store is stuck."""
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
        """Apply one event and return the commands to carry out, in order."""
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
                # Its first life has number 0, as for every role that the plane was opened with.
                self._roles[role] = _Role(shadows=shadows, holder=None, next_number=0, is_new=True)
                return self._fill(role)
            case RoleRetired(role=role):
                return self._retire(role, "no source is left to it")
            case PlaceFound():
                return self._start_instead_of(event.member, event.may_hold)
            case _:
                assert_never(event)

    def holder_of(self, role: str) -> Member | None:
        """Return the holder of a role; ``None`` while there is none, and for a retired role."""
        return self._roles[role].holder if role in self._roles else None

    def wants(self, role: str) -> bool:
        """Return whether a role is wanted."""
        return role in self._roles

    def is_whole(self) -> bool:
        """Return whether every role is held and every wanted shadow stands by."""
        roles = self._roles.values()
        return all(r.holder is not None and len(r.standing_by) >= r.shadows for r in roles)

    def members(self) -> list[Member]:
        """Return all members, including those being started."""
        return [member for role in self._roles.values() for member in role.members()]

    def shadows(self) -> list[Member]:
        """Return the members that stand by."""
        return [member for role in self._roles.values() for member in role.standing_by]

    def _release(self, step: int) -> tuple[RosterCommand, ...]:
        if step > self._released_to:
            self._released_to = step
            # For every role, because a step needs all of them, so each has shown that it works.
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
        # One at a time, and not while the holder settles; the search for places will find this one again.
        if role is None or role.starting or role.settles_s > 0:
            return ()
        if member not in (role.members() if may_hold and not role.shadows else role.standing_by):
            return ()
        command = role.start(member.role)
        role.instead_of[command.member] = member
        return (command,)

    def _relieve(self, role: _Role, member: Member | None) -> tuple[RosterCommand, ...]:
        """End a member whose replacement stands by now, unless that member took over or was lost meanwhile."""
        # Nor if another member was lost meanwhile: the new one then counts as its replacement, and both are wanted.
        if member not in role.standing_by or len(role.standing_by) <= role.shadows:
            return ()
        role.standing_by.remove(member)
        self._beats.pop(member, None)
        return (EndMember(member, "another one stands by in a better place"),)

    def _lose(self, member: Member, why: str) -> tuple[RosterCommand, ...]:
        """Replace a member; if it is no longer on the roster, it was replaced before."""
        role = self._roles.get(member.role)
        if role is None or member not in role.members():
            return ()
        # It serves nothing yet, so the plane continues without it, and the scaler may try again.
        if role.is_new:
            return (*self._retire(member.role, why), Abandoned(member.role, why))
        self._beats.pop(member, None)
        role.starting.discard(member)
        if (tried := role.instead_of.pop(member, None)) and tried in role.members():
            # Only the attempt to move is lost. But the member may have counted as the replacement of a lost one.
            return (EndMember(member, why), *self._fill(member.role))
        role.lost += 1
        if role.lost > _LOST_IN_A_ROW:
            # Further events are ignored, because the plane ends.
            self._gave_up = True
            reason = (
                f"{member.role} was lost {role.lost} times while no step was taken, the last time: {why}; fix the "
                "cause and start again from the last checkpoint"
            )
            return (EndMember(member, why), EndPlane(member.role, reason))
        if member in role.standing_by:
            role.standing_by.remove(member)
        # First of all, because until it is ended the lost member might answer together with the next one.
        commands: list[RosterCommand] = [EndMember(member, why)]
        if member == role.holder:
            role.holder = None
            if role.standing_by:
                return (*commands, role.hand_over(role.standing_by.pop(0)))
        return (*commands, *self._fill(member.role))

    def _retire(self, name: str, why: str) -> tuple[RosterCommand, ...]:
        """End every member of a role for good; a role that is retired already stays so."""
        role = self._roles.pop(name, None)
        members = [] if role is None else role.members()
        for member in members:
            self._beats.pop(member, None)
        return tuple(EndMember(member, why) for member in members)

    def _fill(self, name: str) -> tuple[RosterCommand, ...]:
        """Start the members that the role lacks, except while its holder settles."""
        role = self._roles[name]
        # Starting a process takes a core for a second or two, while the holder has steps to catch up on.
        if role.holder is not None and role.settles_s > 0:
            return ()
        # Replacements count too: if the member that they replace is lost meanwhile, they are its successor.
        return tuple(role.start(name) for _ in range(1 + role.shadows - len(role.members())))

    def _see(self, seen: MembersSeen) -> tuple[RosterCommand, ...]:
        """Count how long each member has been silent or stopped, in time during which the roster itself ran."""
        passed_s = 0.0 if self._looked_s is None else seen.now_s - self._looked_s
        self._looked_s = seen.now_s
        commands = list(self._settle(passed_s))
        # Settling was counted above, because the new holder had the processors while the roster did not run.
        if passed_s > _LONGEST_LOOK_S:
            return tuple(commands)
        for member in self.members():
            progress = seen.beats.get(member.name)
            beat = self._beats.setdefault(member, Watched())
            beat.see(progress, is_stopped=member.name in seen.stopped, passed_s=passed_s)
            if not self._gave_up and (why := self._why_lost(member, progress, beat)) is not None:
                commands += self._lose(member, why)  # no further commands once the plane ends
        for role in self._roles.values():
            commands += self._leave_slow_store(role, seen, passed_s)
        return tuple(commands)

    def _leave_slow_store(
        self, role: _Role, seen: MembersSeen, passed_s: float
    ) -> tuple[RosterCommand, ...]:
        """Let a shadow take over if the store is slow for the holder and quick for the shadow."""
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
        """Start the shadows of holders that have settled."""
        for name, role in self._roles.items():
            if role.settles_s > 0:
                role.settles_s -= passed_s
                yield from self._fill(name)

    def _why_lost(self, member: Member, progress: Progress | None, beat: Watched) -> str | None:
        process = "its process" if progress is None else f"process {progress.pid}"
        # The kernel's knowledge comes first: it is there within a tenth of a second, silence only after many seconds.
        if beat.stopped_s is not None and beat.stopped_s >= _STOPPED_S:
            return f"{process} is stopped"
        if progress is None:  # a ready member whose host does not answer at the moment
            role = self._roles.get(member.role)
            is_late = role is not None and member in role.starting and beat.silent_s >= _BEGINS_S
            return f"it has not begun in {_BEGINS_S:.0f} s" if is_late else None
        if beat.silent_s >= self.silent_s:
            return f"{process} gave no heartbeat for {beat.silent_s:.0f} s"
        if beat.call is not None and beat.call_s >= self.stuck_s:
            return f"{process} {beat.call.doing} for {beat.call_s:.0f} s, in one call"
        return None
