"""Members of a plane's roles, what happens to them, and what the roster has done about it.

A *member* is one life of a role: a process, or in the local runtime a set of threads.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from omniload.machine.progress import Progress

__all__ = [
    "Abandoned",
    "EndMember",
    "GiveUp",
    "HandOver",
    "Member",
    "MemberEnded",
    "MemberReady",
    "MembersSeen",
    "PlaceFound",
    "RoleAdded",
    "RoleRetired",
    "RosterCommand",
    "RosterEvent",
    "StartMember",
    "StepsReleased",
]


@dataclass(frozen=True, slots=True)
class Member:
    """One life of a role."""

    role: str
    number: int = 0
    """Lives of the role before this one."""

    @property
    def name(self) -> str:
        """The name that its heartbeats and its actor go by."""
        return f"{self.role}+{self.number}" if self.number else self.role


@dataclass(frozen=True, slots=True)
class MemberReady:
    """A member that was started stands ready to take over."""

    member: Member


@dataclass(frozen=True, slots=True)
class MemberEnded:
    """A member's process has ended, or it could not be made ready."""

    member: Member
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MembersSeen:
    """The shell has looked at heartbeats and processes."""

    now_s: float
    """By a clock that never goes back."""
    beats: Mapping[str, Progress]
    """Last heartbeat of each member, by its name."""
    stopped: frozenset[str] = frozenset()
    """Names of members whose process the kernel calls stopped."""


@dataclass(frozen=True, slots=True)
class StepsReleased:
    """Every rank has taken the steps before ``step``."""

    step: int


@dataclass(frozen=True, slots=True)
class RoleAdded:
    """A role is wanted that nobody has held yet."""

    role: str
    shadows: int = 0
    """Shadows that are wanted for it."""


@dataclass(frozen=True, slots=True)
class RoleRetired:
    """A role is wanted no more: nothing is left to its holder."""

    role: str


@dataclass(frozen=True, slots=True)
class PlaceFound:
    """There is a better place for a member that stands by than where it is, or for a holder without shadows."""

    member: Member
    may_hold: bool = False


RosterEvent = (
    MemberReady | MemberEnded | MembersSeen | StepsReleased | RoleAdded | RoleRetired | PlaceFound
)


@dataclass(frozen=True, slots=True)
class StartMember:
    """Start a member and make it ready."""

    member: Member


@dataclass(frozen=True, slots=True)
class EndMember:
    """See to it that a member never speaks again; it may have ended already."""

    member: Member
    why: str


@dataclass(frozen=True, slots=True)
class HandOver:
    """A member holds its role from now on: tell whoever speaks to it."""

    member: Member


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The role cannot be held: end the plane."""

    role: str
    why: str


@dataclass(frozen=True, slots=True)
class Abandoned:
    """A role that was added is given up before anybody held it; the plane goes on without it."""

    role: str
    why: str


RosterCommand = StartMember | EndMember | HandOver | GiveUp | Abandoned
