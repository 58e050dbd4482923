"""What a call between two processes of a plane on Ray takes of this machine: measured between two bare actors' ends."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

import omniload.actors.ray.actors  # noqa: F401 -- a role's process has loaded what roles need
from omniload.actors.ray.answers import answer_to
from omniload.actors.ray.cluster import PrivateCluster
from omniload.actors.ray.environment import ray

__all__ = ["Call", "Probed", "probe"]

_STORE_BYTES = 512 << 20
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
    others_s: float
    """Of Ray's own processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """What was found."""

    calls: tuple[Call, ...]
    """With each of the answers that were given."""
    process_bytes: int
    """Memory of an actor's process that holds nothing."""
    node_bytes: int
    """Memory of Ray's own processes."""


class _Answering:
    """The end that answers."""

    def __init__(self) -> None:
        self._answers: Sequence[Any] = ()

    def hold(self, answers: Sequence[Any]) -> None:
        """Hold what is to be answered."""
        self._answers = answers

    def answer(self, number: int) -> Any:  # noqa: ANN401 -- whatever it was given
        """Return an answer."""
        return self._answers[number]

    def spent(self) -> tuple[float, int]:
        """Return the processor seconds of this process so far, and its memory."""
        return time.process_time(), _memory_of(psutil.Process())


def probe(answers: Sequence[Any], calls: int) -> Probed:
    """Start a Ray of our own, measure calls that give each of ``answers``, and end it.

    Raises:
        StateError: This process uses Ray already.
        UnavailableError: Ray did not start.
    """
    cluster = PrivateCluster(object_store_bytes=_STORE_BYTES, workers=1)
    try:
        remote: Any = ray.remote
        actor = remote(num_cpus=0)(_Answering).remote()
        _, process_bytes = answer_to(actor.spent.remote(), _ROLE, limit_s=_START_S)
        answer_to(actor.hold.remote(answers), _ROLE)
        found = tuple(_measured(actor, number, calls) for number in range(len(answers)))
        node_bytes = sum(_memory_of(process) for process in _others())
    finally:
        cluster.close()
    return Probed(calls=found, process_bytes=process_bytes, node_bytes=node_bytes)


def _measured(actor: Any, number: int, calls: int) -> Call:  # noqa: ANN401 -- Ray's handle has no static type
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
    )


def _spent(actor: Any, work: Callable[[], None]) -> tuple[float, float, float]:  # noqa: ANN401 -- as above
    """Return the processor seconds of this process, of the actor's, and of Ray's own, that something takes."""
    before_s, _ = answer_to(actor.spent.remote(), _ROLE)
    others_s, own_s = _others_s(), time.process_time()
    work()
    own_s, others_s = time.process_time() - own_s, _others_s() - others_s
    after_s, _ = answer_to(actor.spent.remote(), _ROLE)
    return own_s, after_s - before_s, others_s


def _others() -> list[psutil.Process]:
    """Return Ray's own processes: those below this one that are no actors."""
    below = psutil.Process().children(recursive=True)
    return [process for process in below if not _name_of(process).startswith("ray::")]


def _name_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()[:1])
    except psutil.Error:
        return ""


def _others_s() -> float:
    seconds = 0.0
    for process in _others():
        try:
            spent = process.cpu_times()
        except psutil.Error:
            continue
        seconds += spent.user + spent.system
    return seconds


def _memory_of(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:
        return 0
