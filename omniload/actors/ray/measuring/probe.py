"""What Ray takes of this machine: small planes at full speed, one at rest, and calls to a bare actor beside it.

What a message takes is not seen in a loop of calls: in a plane every end is woken for one message, in threads, with
caches that other processes have used meanwhile. So processor time is that of the processes of a real plane.

Planes that are compared are open side by side, each on a Ray of its own below a process that is its ranks. They are
driven in turns, a short while each: what the machine does beside them is no difference between them then. The first
rests alone, once the others have ended: where nothing else runs, a wake-up takes twice as long.
"""

import multiprocessing
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import count, islice
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import psutil

from omniload.actors.plane import PlaneSpec, RankHandle
from omniload.actors.ray.measuring.calls import Call, measured_calls
from omniload.actors.ray.measuring.spent import (
    PlaneSpent,
    Spent,
    cores_at_rest,
    memory_of,
    rays_own,
    spent_at_full_speed,
    spent_by,
)
from omniload.actors.ray.plane import RayPlane
from omniload.base.errors import OmniloadError, UnavailableError

__all__ = ["Probed", "by_role", "probe"]

_TURN_S, _TURNS, _REST_S = 0.4, 7, 2.0
"""How long a plane is at full speed at a time, how often, and at rest, in which every heartbeat comes twice."""
_RESTS = 3
"""As Ray starts a process ahead of its need now and then, which takes as much as half a core for two seconds."""
_LEAST_TURNS, _MOST_S = 3, 60.0
"""Turns that are enough where they take long, as with samples of a few tokens or beside much else."""
_WARM_TURNS = 1
"""Turns before those: pages of the object store are touched, and heaps have grown, by then."""
_LEAST_WINDOWS = 2
"""Of a turn. In fewer a loader may have nothing to do, and nothing is known of its messages, on a busy machine."""
_FILLS_S = 0.3
"""Buffers of a plane whose rank asks for nothing are full by then."""
_PAUSE_S, _PAUSES = 0.02, 24
"""How long a rank does something else between two batches, and how often."""
_OPENS_S, _ANSWERS_S, _ENDS_S = 600.0, 300.0, 60.0
"""How long a plane is waited for, which has limits of its own that are shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """What was found."""

    planes: tuple[PlaneSpent, ...]
    """In the order they were asked for."""
    clock: Mapping[str, float]
    """Cores in use while nobody asks for anything; the process of the ranks also has the keeper of the plane."""
    take_s: float
    """Processor time in which a rank that did something else takes a batch that is at hand."""
    call: Call
    """That is answered with nothing."""
    node_bytes: int
    """Memory of Ray's own processes."""


def probe(specs: Sequence[PlaneSpec], calls: int) -> Probed:
    """Open planes side by side, measure calls beside the first and them in turns, end them, and the first as the last.

    Args:
        specs: The planes: one loader, one constructor, sources without end.
        calls: Calls to measure.

    Raises:
        OmniloadError: A plane did not open.
        UnavailableError: Ray did not start, or a plane was lost.
    """
    with ExitStack() as opened:
        planes = [opened.enter_context(closing(_Beside(spec))) for spec in specs]
        for plane in planes:
            # All before any is waited for: they end side by side, as they open.
            opened.callback(plane.let_go)
        for plane in planes:
            plane.answer(_OPENS_S)
        call, node_bytes = _asked(planes[:1], ("calls", calls))[0]
        turns: list[list[Spent]] = []
        until_s = time.monotonic() + _MOST_S
        while len(turns) < _WARM_TURNS + _TURNS:
            turns.append([_asked([plane], "turn")[0] for plane in planes])
            if len(turns) >= _WARM_TURNS + _LEAST_TURNS and time.monotonic() > until_s:
                break
        first, *others = planes
        for plane in others:
            plane.let_go()
        for plane in others:
            plane.close()
        clock = cores_at_rest([_asked([first], "rest")[0] for _ in range(_RESTS)])
        take_s: float = _asked([first], "pauses")[0]
    of_planes = zip(*turns[_WARM_TURNS:], strict=True)
    return Probed(
        # All have the same roles, and do the same by the clock.
        planes=tuple(spent_at_full_speed(its, clock) for its in of_planes),
        clock=clock,
        take_s=take_s,
        call=call,
        node_bytes=node_bytes,
    )


def _asked(planes: "Sequence[_Beside]", what: object) -> list[Any]:
    """Ask all planes, and then wait for each."""
    for plane in planes:
        plane.ask(what)
    return [plane.answer(_ANSWERS_S) for plane in planes]


class _Beside:
    """A plane in a process of its own, which is all its ranks; it ends with this one, whose pipe it reads."""

    def __init__(self, spec: PlaneSpec) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, its = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(spec, its), daemon=False)
        self._process.start()
        its.close()

    def ask(self, what: object) -> None:
        """Ask for something that is measured."""
        try:
            self._pipe.send(what)
        except OSError as error:
            raise self._lost() from error

    def answer(self, limit_s: float) -> Any:  # noqa: ANN401 -- as it was asked
        """Return what was measured; raise what went wrong there."""
        try:
            found = self._pipe.recv() if self._pipe.poll(limit_s) else None
        except (EOFError, OSError) as error:
            raise self._lost() from error
        if found is None:
            raise UnavailableError(
                f"a small plane did not answer within {limit_s:g} s; measure again"
            )
        if isinstance(found, OmniloadError):
            raise found
        return found

    def _lost(self) -> UnavailableError:
        self._process.join(_ENDS_S)
        return UnavailableError(
            f"a small plane ended as it was measured (exit {self._process.exitcode}); free memory and measure again"
        )

    def let_go(self) -> None:
        """Have it end, once it has answered what it was asked."""
        self._pipe.close()

    def close(self) -> None:
        """Wait until it has ended."""
        self.let_go()
        self._process.join(_ENDS_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(spec: PlaneSpec, pipe: Connection) -> None:
    """Open a plane and measure what is asked for, until the other end of the pipe is closed."""
    try:
        with ExitStack() as opened:
            plane = opened.enter_context(RayPlane(spec))
            ranks = range(spec.tree.size_of("dp"))
            handles = [opened.enter_context(closing(plane.handle(rank))) for rank in ranks]
            driven = _Driven(plane, spec, handles)
            pipe.send(True)
            while True:
                match pipe.recv():
                    case "rest":
                        pipe.send(driven.rest())
                    case "turn":
                        pipe.send(driven.turn())
                    case "pauses":
                        pipe.send(driven.pauses())
                    case ("calls", calls):
                        node_bytes = sum(map(memory_of, rays_own()))
                        pipe.send((measured_calls(calls), node_bytes))
    except OmniloadError as error:
        pipe.send(error)
    except (EOFError, OSError, KeyboardInterrupt):
        pass  # nobody asks any more: the opener says why, and was interrupted with this process


class _Driven:
    """A plane whose ranks take steps, or none."""

    def __init__(self, plane: RayPlane, spec: PlaneSpec, handles: Sequence[RankHandle]) -> None:
        self._roles = {pid: name.partition("-")[0] for name, pid in plane.pids().items()}
        self._roles[os.getpid()] = "rank"
        self._window, self._ahead = spec.mix.steps_at_once, spec.mix.steps_ahead
        self._handles, self._numbers = handles, count(handles[0].first_step)

    def _take(self, steps: int) -> None:
        for step in islice(self._numbers, steps):
            for handle in self._handles:
                handle.take(step)
                handle.taken(step)

    def rest(self) -> Spent:
        """Take none."""
        self._take(2 * (self._ahead + self._window))
        time.sleep(_FILLS_S)
        before, began_s = self._spent_by_process(), time.perf_counter()
        time.sleep(_REST_S)
        return self._since(before, began_s, 0)

    def pauses(self) -> float:
        """Return the processor seconds of a take where the rank has done something else since the one before."""
        first, *others = self._handles
        spent_s = []
        # The first batch of a window is not at hand: the median leaves it out.
        for step in islice(self._numbers, _PAUSES):
            time.sleep(_PAUSE_S)
            began_s = time.thread_time()
            first.take(step)
            spent_s.append(time.thread_time() - began_s)
            first.taken(step)
            for handle in others:
                handle.take(step)
                handle.taken(step)
        return median(spent_s)

    def turn(self) -> Spent:
        """Take steps for a while."""
        # What is built already goes first: what comes after it is made as fast as it is taken.
        self._take(self._ahead + self._window)
        before, began_s, steps = self._spent_by_process(), time.perf_counter(), 0
        while time.perf_counter() - began_s < _TURN_S or steps < _LEAST_WINDOWS * self._window:
            self._take(self._window)
            steps += self._window
        return self._since(before, began_s, steps)

    def _since(self, before: Mapping[int, float], began_s: float, steps: int) -> Spent:
        now, seconds = self._spent_by_process(), time.perf_counter() - began_s
        return Spent(seconds=seconds, steps=steps, by_role=by_role(before, now, self._roles))

    def _spent_by_process(self) -> dict[int, float]:
        """Return the processor seconds of each process so far."""
        own = psutil.Process()
        below = {each.pid: spent_by(each) for each in own.children(recursive=True)}
        return {own.pid: time.process_time()} | below


def by_role(
    before: Mapping[int, float], now: Mapping[int, float], roles: Mapping[int, str]
) -> dict[str, float]:
    """Return what each role had of processors meanwhile; ``node`` is what processes of no role had.

    One that has ended, as workers do that nobody needed, would have had less than nothing: it is left out.
    """
    found = dict.fromkeys((*roles.values(), "node"), 0.0)
    for pid in before.keys() & now.keys():
        found[roles.get(pid, "node")] += now[pid] - before[pid]
    return found
