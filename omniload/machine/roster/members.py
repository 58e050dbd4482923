"""Members of a plane's roles, the events of their lives, and the roster's commands.

A *member* is one life of a role: a process, or in the local runtime a set of threads.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from omniload.machine.progress import Progress

__all__ = [
    "Abandoned",
    "EndMember",
    "EndPlane",
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
        """Name of its heartbeats and its actor."""
        return f"{self.role}+{self.number}" if self.number else self.role


@dataclass(frozen=True, slots=True)
class MemberReady:
    """A started member is ready to take over."""

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
    """Time of a monotonic clock."""
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
    """A new role is wanted."""

    role: str
    shadows: int = 0
    """Wanted number of its shadows."""


@dataclass(frozen=True, slots=True)
class RoleRetired:
    """A role is no longer wanted, because its holder has nothing left to serve."""

    role: str


@dataclass(frozen=True, slots=True)
class PlaceFound:
    """A better place was found for a shadow, or for a holder without shadows."""

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
    """Make sure that a member never answers again; it may have ended already."""

    member: Member
    why: str


@dataclass(frozen=True, slots=True)
class HandOver:
    """A member holds its role from now on; tell everyone who sends it messages."""

    member: Member


@dataclass(frozen=True, slots=True)
class EndPlane:
    """The role cannot be held: end the plane."""

    role: str
    why: str


@dataclass(frozen=True, slots=True)
class Abandoned:
    """An added role is given up before a member held it; the plane continues without it."""

    role: str
    why: str


RosterCommand = StartMember | EndMember | HandOver | EndPlane | Abandoned
