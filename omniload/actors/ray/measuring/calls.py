"""What a call between two processes of a plane on Ray takes, measured between the ends of bare actors."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil

from omniload.actors.ray.answers import answer_to
from omniload.actors.ray.environment import ray
from omniload.actors.ray.measuring.spent import memory_of

__all__ = ["Call", "measured_calls"]

_ROLE = "the probe"
_START_S = 300.0
_WARM_UP = 20
_TOGETHER = 8
"""Calls that are under way at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Seconds of a call."""

    waits_s: tuple[float, ...]
    """From asking to the answer, of each that came alone, less the processor time of both ends."""
    asking_s: float
    """Processor time of the process that asks, where some calls are under way at once, as they are in a plane."""
    answering_s: float
    """Of the one that answers."""
    process_bytes: int
    """Memory of an actor's process that holds nothing."""


class _Answering:
    """The end that answers."""

    def answer(self) -> None:
        """Answer with nothing."""

    def spent(self) -> tuple[float, int]:
        """Return the processor seconds of this process so far, and its memory."""
        return time.process_time(), memory_of(psutil.Process())


def measured_calls(calls: int) -> Call:
    """Measure calls to an actor in the Ray of this process that answers with nothing."""
    remote: Any = ray.remote
    actor = remote(num_cpus=0)(_Answering).remote()
    _, process_bytes = answer_to(actor.spent.remote(), _ROLE, limit_s=_START_S)
    for _ in range(_WARM_UP):
        answer_to(actor.answer.remote(), _ROLE)
    rounds_s = []

    def one_by_one() -> None:
        for _ in range(calls):
            began_s = time.perf_counter()
            ray.get(actor.answer.remote())
            rounds_s.append(time.perf_counter() - began_s)

    def together() -> None:
        for _ in range(calls // _TOGETHER):
            ray.get([actor.answer.remote() for _ in range(_TOGETHER)])

    alone = _spent(actor, one_by_one)
    asking_s, answering_s = _spent(actor, together)
    done = calls // _TOGETHER * _TOGETHER
    # Both ends work one after the other while the caller waits: what is left is the way itself.
    ends_s = sum(alone) / calls
    return Call(
        waits_s=tuple(max(0.0, round_s - ends_s) for round_s in rounds_s),
        asking_s=asking_s / done,
        answering_s=answering_s / done,
        process_bytes=process_bytes,
    )


def _spent(actor: Any, work: Callable[[], None]) -> tuple[float, float]:  # noqa: ANN401 -- Ray's handle has no static type
    """Return the processor seconds of this process and of the actor's that something takes."""
    before_s, _ = answer_to(actor.spent.remote(), _ROLE)
    own_s = time.process_time()
    work()
    own_s = time.process_time() - own_s
    after_s, _ = answer_to(actor.spent.remote(), _ROLE)
    return own_s, after_s - before_s
