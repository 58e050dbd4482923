"""What a call between two processes of a plane on Ray takes, measured between the ends of bare actors."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil

from omniload.actors.ray.answers import answer_to
from omniload.actors.ray.environment import ray
from omniload.actors.ray.scaling.spent import memory_of, rays_own, spent_by

__all__ = ["ANSWERS", "Call", "measured_calls"]

_ROLE = "the probe"
_START_S = 300.0
_WARM_UP = 20
ANSWERS = (256 << 10, 4 << 20)
"""Bytes of answers that are measured; both go through Ray's object store, which has a price of its own."""
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
    others_s: float
    """Of Ray's own processes."""
    process_bytes: int
    """Memory of an actor's process that holds nothing."""


class _Answering:
    """The end that answers."""

    def __init__(self) -> None:
        """Hold what is to be answered."""
        self._answers = (None, *(np.ones(size, np.uint8) for size in ANSWERS))

    def answer(self, number: int) -> Any:  # noqa: ANN401 -- an array, or nothing
        """Return an answer."""
        return self._answers[number]

    def spent(self) -> tuple[float, int]:
        """Return the processor seconds of this process so far, and its memory."""
        return time.process_time(), memory_of(psutil.Process())


def measured_calls(calls: int) -> tuple[Call, Call, Call]:
    """Measure calls to an actor in the Ray of this process: answered with nothing, and as ``ANSWERS`` says."""
    remote: Any = ray.remote
    actor = remote(num_cpus=0)(_Answering).remote()
    _, process_bytes = answer_to(actor.spent.remote(), _ROLE, limit_s=_START_S)
    found = [_measured(actor, number, calls, process_bytes) for number in range(3)]
    return found[0], found[1], found[2]


def _measured(actor: Any, number: int, calls: int, process_bytes: int) -> Call:  # noqa: ANN401 -- Ray's handle has no static type
    for _ in range(_WARM_UP):
        answer_to(actor.answer.remote(number), _ROLE)
    rounds_s = []

    def one_by_one() -> None:
        for _ in range(calls):
            began_s = time.perf_counter()
            ray.get(actor.answer.remote(number))
            rounds_s.append(time.perf_counter() - began_s)

    def together() -> None:
        for _ in range(calls // _TOGETHER):
            ray.get([actor.answer.remote(number) for _ in range(_TOGETHER)])

    alone = _spent(actor, one_by_one)
    spent = _spent(actor, together)
    done = calls // _TOGETHER * _TOGETHER
    ends_s = (alone[0] + alone[1]) / calls
    return Call(
        waits_s=tuple(max(0.0, round_s - ends_s) for round_s in rounds_s),
        asking_s=spent[0] / done,
        answering_s=spent[1] / done,
        others_s=spent[2] / done,
        process_bytes=process_bytes,
    )


def _spent(actor: Any, work: Callable[[], None]) -> tuple[float, float, float]:  # noqa: ANN401 -- Ray's handle has no static type
    """Return the processor seconds of this process, of the actor's, and of Ray's own, that something takes."""
    before_s, _ = answer_to(actor.spent.remote(), _ROLE)
    others_s, own_s = sum(map(spent_by, rays_own())), time.process_time()
    work()
    own_s, others_s = time.process_time() - own_s, sum(map(spent_by, rays_own())) - others_s
    after_s, _ = answer_to(actor.spent.remote(), _ROLE)
    return own_s, after_s - before_s, others_s
