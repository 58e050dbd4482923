"""The messages of a simulation: a seed decides which is delivered next, how often, and which roles are cut off."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Message", "MessageBag", "Moment", "Way", "below"]

_SLOWEST = 250
"""Most deliveries that overtake a slow message."""
_LONGEST_CUT = 60
"""Most deliveries for which a role is cut off."""


def below(chance: random.Random, limit: int) -> int:
    """Return the same number below a limit as ``randrange``, in a third of its time: each message draws one."""
    bits = limit.bit_length()
    while (drawn := chance.getrandbits(bits)) >= limit:
        pass
    return drawn


class Way(NamedTuple):
    """The member that serves a source; later turns are greater."""

    turn: int
    number: int
    """Number of the loader."""
    life: int


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that happened in a simulation."""

    at: int
    """Messages delivered before it."""
    role: str
    """The role at which it happens; empty for the events of the world."""
    what: str
    content: tuple[object, ...] = ()


class Message(NamedTuple):
    """A call that waits to be made."""

    receiver: Callable[..., object]
    content: tuple[object, ...] = ()
    to: str = ""
    """The role that receives it; empty for the events of the world."""
    waits: bool = False
    """Whether it waits for others. Such a message is not repeated: each copy would wait and be repeated again."""
    not_before: int = 0
    """The number of messages that are delivered before this one."""

    @property
    def name(self) -> str:
        """The name of the called function."""
        return getattr(self.receiver, "__name__", "call").removeprefix("_")


@dataclass(slots=True, kw_only=True)
class MessageBag:
    """Messages under way, in no order."""

    chance: random.Random
    repeat_share: float = 0.0
    """Share of messages that are delivered once more, later."""
    lost_share: float = 0.0
    """Share of messages that are lost on their way; the sender sends such a message again, after others."""
    slow_share: float = 0.0
    """Share of messages that take a long time."""
    cuts: int = 0
    """Times that a role is cut off: messages to it stay undelivered until the network is whole again."""
    fired: Counter[str] = field(default_factory=Counter)
    """The faults of messages, and how often each one happened."""
    under_way: list[Message] = field(default_factory=list)
    delivered: int = 0
    _cut: dict[str, int] = field(default_factory=dict)
    """Roles that are cut off, with the number of delivered messages at which each one returns."""

    def __bool__(self) -> bool:
        return bool(self.under_way)

    def __len__(self) -> int:
        return len(self.under_way)

    def add(self, message: Message) -> None:
        """Send a message."""
        if self.slow_share and message.to and self.chance.random() < self.slow_share:
            self.fired["slow"] += 1
            longest = self.delivered + self.chance.randint(1, _SLOWEST)
            message = message._replace(not_before=longest)
        self.under_way.append(message)

    def cut_off(self, roles: Sequence[str]) -> str | None:
        """Cut off one of some roles for a while; return which, or ``None`` if it was done often enough."""
        if self.fired["cut off"] >= self.cuts:
            return None
        self.fired["cut off"] += 1
        role = self.chance.choice(roles)
        self._cut[role] = self.delivered + self.chance.randint(5, _LONGEST_CUT)
        return role

    def is_cut_off(self, role: str) -> bool:
        """Return whether a role is unreachable now."""
        return self._cut.get(role, 0) > self.delivered

    def take(self, at: int) -> Message | None:
        """Remove and return the message that is delivered now; ``None`` if it is delayed, or lost and sent again."""
        self.delivered += 1
        under_way = self.under_way
        message = under_way[at]
        _, _, to, waits, not_before = message
        if not_before > self.delivered:
            return None
        if to and self._cut.get(to, 0) > self.delivered:
            self.fired["held up by a cut"] += 1
            return None
        if to and self.lost_share and not waits and self.chance.random() < self.lost_share:
            self.fired["lost and sent again"] += 1
            return None
        last = under_way.pop()
        if at < len(under_way):
            under_way[at] = last
        if to and self.chance.random() < self.repeat_share and not waits:
            under_way.append(message)
            self.fired["repeated"] += 1
        return message
