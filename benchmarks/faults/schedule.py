"""Faults of a running plane and their steps: a script, drawn from a seed or read from a file.

Each line is one fault; text after ``#`` is a comment::

    # step  role      kind   seconds
    40      loader-0  kill
    90      shadow-1  stop
    140     -         store  20
    140     planner   kill

A fault strikes when the plane has taken this many steps and has recovered from the line before. Lines of one step
strike together. ``benchmarks.faults.striking`` describes the kinds.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

__all__ = [
    "KINDS",
    "LASTING",
    "NO_ROLE",
    "OF_JOURNALS",
    "OF_ROLES",
    "OF_STORES",
    "Fault",
    "Faults",
    "drawn",
    "together",
    "written",
]

NO_ROLE = "-"
"""Word for faults that strike no role."""
OF_ROLES = frozenset({"kill", "stop", "starve", "memory"})
LASTING = frozenset({"starve", "memory"})
"""The kinds among these that last for a while."""
OF_STORES = frozenset({"store", "delay"})
OF_JOURNALS = frozenset({"torn-journal", "cut-journal", "flipped-journal"})
KINDS: dict[str, float] = {
    **dict.fromkeys((*sorted(OF_ROLES - LASTING), *sorted(OF_JOURNALS)), 0.0),
    # One and a half times as long as a member may be silent.
    "starve": 15.0,
    # A process that needs no more memory in this time is ended nevertheless.
    "memory": 5.0,
    # A small part of the time for which a planner waits for free space.
    "full": 5.0,
    **dict.fromkeys(sorted(OF_STORES), 20.0),
    # Longer than the silence after which a member is replaced, and shorter than the time after which Ray gives a host
    # up.
    "network": 15.0,
}
"""Default duration of a fault of each kind, in seconds; 0 for a fault that strikes once."""
_FIRST_STEP = 10
_LEAST_STEPS, _MOST_STEPS = 10, 60
"""Steps between two faults of a random script."""
_LONGEST_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One line of a script."""

    step: int
    """Least number of steps before the fault."""
    role: str
    """Name of the struck role, such as ``loader-0``, ``planner`` or ``constructor-0``.

    ``shadow-0`` is a shadow of ``loader-0``, and ``reader-0`` is a reader. ``NO_ROLE`` stands for faults that strike no
    role.
    """
    kind: str
    seconds: float = 0.0

    def __str__(self) -> str:
        lasts = f" {self.seconds:g}" if KINDS[self.kind] else ""
        return f"{self.step} {self.role} {self.kind}{lasts}"

    @property
    def what(self) -> str:
        """Return the kind of fault and of role, in a word or two."""
        return f"{self.kind} {self.role.partition('-')[0]}".strip().removesuffix(f" {NO_ROLE}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Faults of a random script: the kinds, the roles, and the number of each."""

    count: int
    roles: tuple[str, ...]
    """Beginnings of the names of roles: ``loader``, ``planner``, ``constructor``, ``shadow``, ``reader``."""
    kinds: tuple[str, ...] = ("kill",)
    seed: int = 0


def drawn(faults: Faults, roles: Iterable[str]) -> list[Fault]:
    """Return a random script; the same seed gives the same script.

    Args:
        faults: The faults to draw from.
        roles: The existing roles.

    Raises:
        ValueError: None of the roles can be struck.
    """
    chance, steps = random.Random(faults.seed), random.Random(f"{faults.seed} steps")
    struck = sorted(role for role in roles if role.startswith(faults.roles))
    if not struck:
        raise ValueError(
            f"no role begins with {' or '.join(faults.roles)}; there are {sorted(roles)}"
        )
    script, step = list[Fault](), _FIRST_STEP
    for _ in range(faults.count):
        kind, role = chance.choice(faults.kinds), chance.choice(struck)
        role = role if kind in OF_ROLES else NO_ROLE
        script.append(Fault(step=step, role=role, kind=kind, seconds=KINDS[kind]))
        step += steps.randint(_LEAST_STEPS, _MOST_STEPS)
    return script


def written(text: str) -> list[Fault]:
    """Return the faults of a script in their order.

    Raises:
        ValueError: A line is no fault; the message names it and the expected form.
    """
    script: list[Fault] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            script.append(_fault_of(words))
        except ValueError as error:
            raise ValueError(f"line {number}: {line.strip()!r}: {error}") from None
        if len(script) > 1 and script[-1].step < script[-2].step:
            raise ValueError(
                f"line {number}: step {script[-1].step} comes behind step {script[-2].step}; put lines in order"
            )
    return script


def _fault_of(words: Sequence[str]) -> Fault:
    if len(words) not in (3, 4):
        raise ValueError("write a step, a role or -, a kind, and for some kinds seconds")
    step, role, kind, *lasts = words
    if not (step.isascii() and step.isdigit()):
        raise ValueError(f"{step!r} is no step; write a whole number")
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is no kind; write one of {', '.join(KINDS)}")
    if (role == NO_ROLE) == (kind in OF_ROLES):
        raise ValueError(
            f"{kind} strikes a role; name one such as loader-0"
            if kind in OF_ROLES
            else f"{kind} strikes no role; write - and not {role!r}"
        )
    return Fault(step=int(step), role=role, kind=kind, seconds=_seconds_of(kind, lasts))


def _seconds_of(kind: str, lasts: Sequence[str]) -> float:
    if not lasts:
        return KINDS[kind]
    if not KINDS[kind]:
        raise ValueError(f"{kind} is done at once; leave {lasts[0]!r} out")
    try:
        seconds = float(lasts[0])
    except ValueError:
        raise ValueError(f"{lasts[0]!r} is no number of seconds") from None
    if not 0 < seconds <= _LONGEST_S:
        raise ValueError(f"{lasts[0]} seconds; write more than 0 and at most {_LONGEST_S:g}")
    return seconds


def together(script: Iterable[Fault]) -> list[list[Fault]]:
    """Return the faults in groups that strike together, in their order."""
    return [list(faults) for _, faults in groupby(script, key=lambda fault: fault.step)]
