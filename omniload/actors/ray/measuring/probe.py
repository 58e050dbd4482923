"""What Ray takes of this machine: small planes at full speed, one at rest, and calls to a bare actor beside it.

What a message takes is not seen in a loop of calls: in a plane every end is woken for one message, in threads, with
caches that other processes have used meanwhile. So processor time is that of the processes of a real plane.

Planes that are compared are open side by side, each on a Ray of its own below a process that is its ranks. They are
driven in turns, a short while each: what the machine does beside them is no difference between them then. The first
rests alone, once the others have ended: where nothing else runs, a wake-up takes twice as long. Then its ranks take
steps after pauses, as those of a job do that train in between: a process that has rested finds other caches.
"""

import multiprocessing
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import chain, count, islice
from multiprocessing.connection import Connection
from typing import Any

import psutil

from omniload.actors.plane import PlaneSpec, RankHandle
from omniload.actors.ray.measuring.calls import Call, measured_calls
from omniload.actors.ray.measuring.spent import (
    Paced,
    PlaneSpent,
    Spent,
    cores_at_rest,
    kept_waiting_s,
    memory_of,
    paced_step,
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
_PAUSE_S, _PACES = 0.04, 4
"""How long a rank rests before a batch, and how often ranks do so for a while."""
_APART_S, _TOGETHER_S = 0.6, 0.3
"""How long that is at least, where each rests by itself and where they get at their windows together."""
_OPENS_S, _ANSWERS_S, _ENDS_S = 600.0, 300.0, 60.0
"""How long a plane is waited for, which has limits of its own that are shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """What was found."""

    planes: tuple[PlaneSpent, ...]
    """In the order they were asked for."""
    clock: Mapping[str, float]
    """Cores in use while nobody asks for anything; the process of the ranks also has the keeper of the plane."""
    paced_step_s: Mapping[str, float]
    """Processor time of a step of the first plane, by role, where its ranks rested before they got at a window."""
    takes_s: tuple[float, ...]
    """Processor time in which a rank that has rested takes a batch that is at hand, of several."""
    opens_s: tuple[float, ...]
    """Time beside processor time in which one gets at batches that have come, of several."""
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
            opened.callback(plane.stop)
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
            plane.stop()
        for plane in others:
            plane.close()
        clock = cores_at_rest([_asked([first], "rest")[0] for _ in range(_RESTS)])
        # By turns too. A job's ranks wake a constructor together, and each has a process of its own that has rested.
        apart, together = zip(
            *[[_asked([first], each)[0] for each in ("apart", "together")] for _ in range(_PACES)],
            strict=True,
        )
    of_planes = zip(*turns[_WARM_TURNS:], strict=True)
    return Probed(
        # All have the same roles, and do the same by the clock.
        planes=tuple(spent_at_full_speed(its, clock) for its in of_planes),
        clock=clock,
        paced_step_s=paced_step(apart, together, clock),
        takes_s=tuple(chain.from_iterable(each.takes_s for each in apart)),
        opens_s=tuple(chain.from_iterable(each.opens_s for each in apart)),
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

    def stop(self) -> None:
        """Have it end, once it has answered what it was asked."""
        self._pipe.close()

    def close(self) -> None:
        """Wait until it has ended."""
        self.stop()
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
                    case "apart":
                        pipe.send(driven.paces(driven.handles, _APART_S))
                    case "together":
                        pipe.send(driven.paces(driven.handles[:1], _TOGETHER_S))
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
        self.handles, self._numbers = handles, count(handles[0].first_step)

    def _take(self, steps: int) -> None:
        for step in islice(self._numbers, steps):
            for handle in self.handles:
                handle.take(step)
                handle.taken(step)

    def rest(self) -> Spent:
        """Take none."""
        self._take(2 * (self._ahead + self._window))
        time.sleep(_FILLS_S)
        began = self._begun()
        time.sleep(_REST_S)
        return self._since(began, 0)

    def turn(self) -> Spent:
        """Take steps for a while."""
        # What is built already goes first: what comes after it is made as fast as it is taken.
        self._take(self._ahead + self._window)
        began, steps = self._begun(), 0
        while time.perf_counter() - began.at_s < _TURN_S or steps < _LEAST_WINDOWS * self._window:
            self._take(self._window)
            steps += self._window
        return self._since(began, steps)

    def paces(self, resting: Sequence[RankHandle], seconds: float) -> Paced:
        """Take windows for a while, some ranks with a pause before they get at one, and once more in it."""
        opens_at = self._opens_at()
        takes_s: list[float] = []
        opens_s: list[float] = []
        began, steps = self._begun(), 0
        while not steps or time.perf_counter() - began.at_s < seconds:
            for place, step in enumerate(islice(self._numbers, self._window)):
                for handle, first in zip(self.handles, opens_at, strict=True):
                    if handle in resting and place == first:
                        opens_s.append(_opened(handle, step))
                    elif handle in resting and place == (first + 1) % self._window:
                        takes_s.append(_taken_after_a_pause(handle, step))
                    else:
                        handle.take(step)
                    handle.taken(step)
            steps += self._window
        return Paced(
            spent=self._since(began, steps), takes_s=tuple(takes_s), opens_s=tuple(opens_s)
        )

    def _opens_at(self) -> list[int]:
        """Take the steps of a window; return which of them each rank had to ask for: the first windows are short."""
        by_rank: list[list[float]] = [[] for _ in self.handles]
        for step in islice(self._numbers, self._window):
            for handle, spent_s in zip(self.handles, by_rank, strict=True):
                began_s = time.thread_time()
                handle.take(step)
                spent_s.append(time.thread_time() - began_s)
                handle.taken(step)
        # Others are at hand, and take a hundredth of that.
        return [spent_s.index(max(spent_s)) for spent_s in by_rank]

    def _begun(self) -> "_Begun":
        # Its own last, and first as a while ends: looking at the others, which takes some milliseconds, is in neither.
        below = self._spent_below()
        return _Begun(below | {os.getpid(): time.process_time()}, time.perf_counter())

    def _since(self, began: "_Begun", steps: int) -> Spent:
        own_s, seconds = time.process_time(), time.perf_counter() - began.at_s
        now = self._spent_below() | {os.getpid(): own_s}
        return Spent(seconds=seconds, steps=steps, by_role=by_role(began.spent, now, self._roles))

    def _spent_below(self) -> dict[int, float]:
        """Return the processor seconds of each process of the plane but this one so far."""
        return {each.pid: spent_by(each) for each in psutil.Process().children(recursive=True)}


@dataclass(frozen=True, slots=True)
class _Begun:
    """Clocks as a while begins."""

    spent: Mapping[int, float]
    """Processor seconds by process."""
    at_s: float


def _opened(handle: RankHandle, step: int) -> float:
    """Rest, and get at batches that have come; return what that took beside processor time of this process."""
    time.sleep(_PAUSE_S)
    began_s, own_s, kept_s = time.perf_counter(), time.process_time(), kept_waiting_s()
    handle.take(step)
    own_s, kept_s = time.process_time() - own_s, kept_waiting_s() - kept_s
    # Cores that others had are shared out in a simulation too: what is left is Ray's way, and its processes.
    return max(0.0, time.perf_counter() - began_s - own_s - kept_s)


def _taken_after_a_pause(handle: RankHandle, step: int) -> float:
    """Rest, and take a batch that is at hand; return the processor time of that."""
    time.sleep(_PAUSE_S)
    began_s = time.thread_time()
    handle.take(step)
    return time.thread_time() - began_s


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
