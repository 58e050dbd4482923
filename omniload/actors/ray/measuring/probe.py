"""What Ray takes of this machine: small planes at full speed, one at rest, and calls to a bare actor beside it.

What a message takes is not seen in a loop of calls: in a plane every end is woken for one message, in threads, with
caches that other processes have used meanwhile. So processor time is that of the processes of a real plane.

Planes that are compared are open side by side, each on a Ray of its own below a process that has all its ranks but
one. They are driven in turns, a short while each: what the machine does beside them is no difference between them
then. The first rests alone, once the others have ended: where nothing else runs, a wake-up takes twice as long. Then
its ranks take each step after a pause, as those of a job do that train in between: a process that has rested finds
other caches.

The last rank has a process of its own, as every rank of a job has, and is the one that is measured; the others are in
the process that opened the plane. Several in one process are woken for one of them, and find the windows of the others
there: of two ranks each takes a sixth less then, of eight a third.
"""

import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from itertools import chain
from multiprocessing.connection import Connection
from typing import Any

import psutil

from omniload.actors.address import PlaneAddress
from omniload.actors.plane import PlaneSpec, RankHandle
from omniload.actors.ray.measuring.pauses import Paced, Ranks, Taker, paced_step
from omniload.actors.ray.measuring.spent import (
    Call,
    PlaneSpent,
    Spent,
    by_role,
    cores_at_rest,
    measured_calls,
    memory_of,
    rays_own,
    spent_at_full_speed,
    spent_by,
)
from omniload.actors.ray.plane import RayPlane
from omniload.actors.ray.rank.joining import handle_in
from omniload.base.errors import OmniloadError, UnavailableError
from omniload.base.linux.kept_waiting import IdleBesideWork

__all__ = ["Probed", "probe"]

_TURN_S, _TURNS, _REST_S, _RESTS = 0.4, 7, 2.0, 3
"""How long a plane is at full speed at a time, how often, and at rest, in which every heartbeat comes twice; Ray starts
a process ahead of its need now and then, which takes as much as half a core for two seconds."""
_LEAST_TURNS, _MOST_S = 3, 60.0
"""Turns that are enough where they take long, as with samples of a few tokens or beside much else."""
_WARM_TURNS = 2
"""Turns before those: the first finds how many steps there are in a turn, and by the end of the second pages of the
object store are touched, and heaps have grown."""
_LEAST_WINDOWS = 2
"""Of a turn. In fewer a loader may have nothing to do, and nothing is known of its messages, on a busy machine."""
_FILLS_S = 0.3
"""Buffers of a plane whose rank asks for nothing are full by then."""
_PACES, _PACED_STEPS = 3, 64
"""How often ranks rest before their steps, by themselves and all together, and before how many, or so many more that
the steps of plans are whole."""
_SETTLED_WINDOWS = 3
"""Until then a rank has taken what it asked for at another pace."""
_OPENS_S, _ANSWERS_S, _ENDS_S = 600.0, 300.0, 60.0
"""How long a plane is waited for, which has limits of its own that are shorter."""


_Takers = Callable[[RankHandle], Taker]
_Shown = Callable[[str, float], AbstractContextManager[Callable[[float], object]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """What was found."""

    planes: tuple[PlaneSpent, ...]
    """In the order they were asked for."""
    clock: Mapping[str, float]
    """Cores in use while nobody asks for anything, by role; ``opener`` has the keeper of the plane."""
    paced_step_s: Mapping[str, float]
    """Processor time of a step of the first plane, by role, where its ranks rested before each."""
    paced_steps: int
    """That were taken so."""
    takes_s: tuple[tuple[float, ...], ...]
    """Time in which a rank that has rested takes a batch that is at hand, of several, by its place as in ``Paced``, but
    for those that no batch had."""
    call: Call
    """That is answered with nothing."""
    node_bytes: int
    """Memory of Ray's own processes."""
    idle: float
    """Part of what planes at full speed wanted of cores that nobody had, as a core idled meanwhile."""


def probe(specs: Sequence[PlaneSpec], calls: int, taker: _Takers, shown: _Shown) -> Probed:
    """Open planes side by side, measure calls beside the first and them in turns, end them, and the first as the last.

    Args:
        specs: The planes: one loader, one constructor, sources without end.
        calls: Calls to measure.
        taker: Gives what a rank of a run takes its batches with: what runs before its clock begins warms caches.
        shown: Shows what is done now, and how far it is.

    Raises:
        OmniloadError: A plane did not open.
        UnavailableError: Ray did not start, or a plane was lost.
    """
    with ExitStack() as opened:
        planes = [opened.enter_context(closing(_Beside(_serve, spec, taker))) for spec in specs]
        for plane in planes:
            # All before any is waited for: they end side by side, as they open.
            opened.callback(plane.stop)
        with shown("opening small planes on Ray", len(planes) + 1) as advance:
            for plane in planes:
                plane.answer(_OPENS_S)
                advance(1)
            call, node_bytes = planes[0].asked(("calls", calls), advance)
        turns: list[list[Spent]] = []
        until_s = time.monotonic() + _MOST_S
        at_speed = shown("measuring them at full speed", (_WARM_TURNS + _TURNS) * len(planes))
        with at_speed as advance, IdleBesideWork() as cores:
            while len(turns) < _WARM_TURNS + _TURNS:
                turns.append([plane.asked("turn", advance) for plane in planes])
                if len(turns) >= _WARM_TURNS + _LEAST_TURNS and time.monotonic() > until_s:
                    break
        first, *others = planes
        for end in (_Beside.stop, _Beside.close):
            for plane in others:
                end(plane)
        with shown("measuring one at rest", _RESTS) as advance:
            clock = cores_at_rest([first.asked("rest", advance) for _ in range(_RESTS)])
        # By turns too. A job's ranks wake a constructor together, each from a process of its own that has rested.
        with shown("measuring steps after pauses", 2 * _PACES + 1) as advance:
            both = ("apart", "together")
            paced = [[first.asked(each, advance) for each in both] for _ in range(_PACES)]
            # A job's opener has none of its ranks, each of which looks after the plane by the clock.
            clock["opener"] = cores_at_rest([first.asked("leave", advance)])["opener"]
    apart, together = zip(*paced, strict=True)
    of_planes = zip(*turns[_WARM_TURNS:], strict=True)
    return Probed(
        # All have the same roles, and do the same by the clock.
        planes=tuple(spent_at_full_speed(its, clock) for its in of_planes),
        clock=clock,
        paced_step_s=paced_step(apart, together, clock),
        paced_steps=sum(each.spent.steps for each in together),
        takes_s=_by_place(apart),
        call=call,
        node_bytes=node_bytes,
        idle=cores.share,
    )


def _by_place(paced: Sequence[Paced]) -> tuple[tuple[float, ...], ...]:
    """Return what batches took in all these whiles, by their place."""
    of_places = zip(*(each.takes_s for each in paced), strict=True)
    return tuple(filter(None, (tuple(chain.from_iterable(of_place)) for of_place in of_places)))


class _Beside:
    """What runs in a process of its own; it ends with this one, whose pipe it reads."""

    def __init__(self, serve: Callable[..., None], *arguments: object) -> None:
        """Have ``serve`` answer at the other end of a pipe, its last argument."""
        spawn = multiprocessing.get_context("spawn")
        self._pipe, its = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(*arguments, its), daemon=False)
        self._process.start()
        its.close()

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid or 0

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

    def asked(self, what: object, advance: Callable[[float], object]) -> Any:  # noqa: ANN401 -- as above
        """Ask, wait for the answer, and tell that it is there."""
        self.ask(what)
        answer = self.answer(_ANSWERS_S)
        advance(1)
        return answer

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


def _serve(spec: PlaneSpec, taker: _Takers, pipe: Connection) -> None:
    """Open a plane and measure what is asked for, until the other end of the pipe is closed."""
    try:
        with ExitStack() as opened:
            plane = opened.enter_context(RayPlane(spec))
            *others, last = range(spec.tree.size_of("dp"))
            address = plane.address.model_dump_json()
            alone = opened.enter_context(closing(_Beside(_serve_rank, address, last, taker)))
            joined = opened.enter_context(ExitStack())
            handles = [plane.handle(rank) for rank in others]
            ranks = [(joined.enter_context(closing(taker(each))), each) for each in handles]
            alone.answer(_OPENS_S)
            driven = _Driven(spec, plane.pids(), Ranks(ranks), alone)
            pipe.send(True)
            while True:
                match pipe.recv():
                    case "rest":
                        pipe.send(driven.rest())
                    case "leave":
                        joined.close()
                        pipe.send(driven.left())
                    case "turn":
                        pipe.send(driven.turn())
                    case "apart":
                        pipe.send(driven.pace(together=False))
                    case "together":
                        pipe.send(driven.pace(together=True))
                    case ("calls", calls):
                        node_bytes = sum(map(memory_of, rays_own()))
                        pipe.send((measured_calls(calls), node_bytes))
    except OmniloadError as error:
        pipe.send(error)
    except (EOFError, OSError, KeyboardInterrupt):
        pass  # nobody asks any more: the opener says why, and was interrupted with this process


def _serve_rank(address: str, rank: int, taker: _Takers, pipe: Connection) -> None:
    """Join a plane as one rank, and take steps as asked for, until the other end of the pipe is closed."""
    try:
        handle = handle_in(PlaneAddress.model_validate_json(address), rank)
        with closing(taker(handle)) as its:
            ranks = Ranks([(its, handle)])
            pipe.send(True)
            while True:
                match pipe.recv():
                    case ("take", steps):
                        ranks.take(steps)
                        pipe.send(True)
                    case ("settle", steps):
                        ranks.settle(steps, resting=True)
                        pipe.send(True)
                    case ("pace", steps):
                        pipe.send(ranks.pace(1, steps))
    except OmniloadError as error:
        pipe.send(error)
    except (EOFError, OSError, KeyboardInterrupt):
        pass  # nobody asks any more: the opener says why, and was interrupted with this process


class _Driven:
    """A plane, the ranks of this process, and the one beside it."""

    def __init__(
        self, spec: PlaneSpec, pids: Mapping[str, int], ranks: Ranks, alone: _Beside
    ) -> None:
        self._roles = {pid: name.partition("-")[0] for name, pid in pids.items()}
        self._roles |= {os.getpid(): "opener", alone.pid: "rank"}
        self._window, self._ahead = spec.mix.steps_at_once, spec.mix.steps_ahead
        self._ranks, self._alone = ranks, alone
        self._steps = _LEAST_WINDOWS * self._window
        """Of a turn."""

    def _take(self, steps: int) -> None:
        self._alone.ask(("take", steps))
        self._ranks.take(steps)
        self._alone.answer(_ANSWERS_S)

    def rest(self) -> Spent:
        """Take none."""
        self._take(2 * (self._ahead + self._window))
        return self.left()

    def left(self) -> Spent:
        """Ask for none."""
        time.sleep(_FILLS_S)
        began = self._begun()
        time.sleep(_REST_S)
        return self._since(began, 0)

    def turn(self) -> Spent:
        """Take steps for a while: as many as the turn before took that long for, and the least in the first."""
        # What is built already goes first: what comes after it is made as fast as it is taken.
        self._take(self._ahead + self._window)
        began, steps = self._begun(), self._steps
        self._take(steps)
        spent = self._since(began, steps)
        windows = round(_TURN_S / spent.seconds * steps / self._window)
        self._steps = max(_LEAST_WINDOWS, windows) * self._window
        return spent

    def pace(self, *, together: bool) -> Paced:
        """Have the rank beside rest before each step; ``together``, those of this process as well."""
        steps = _SETTLED_WINDOWS * self._window
        self._alone.ask(("settle", steps))
        self._ranks.settle(steps, resting=together)
        self._alone.answer(_ANSWERS_S)
        steps = -(-_PACED_STEPS // self._window) * self._window
        began = self._begun()
        self._alone.ask(("pace", steps))
        # The first of this process rests for all of them: they are one thread.
        self._ranks.pace(int(together), steps)
        takes_s, aside_s = self._alone.answer(_ANSWERS_S)
        return Paced(spent=self._since(began, steps), takes_s=takes_s, aside_s=aside_s)

    def _begun(self) -> tuple[dict[int, float], float]:
        """Return the clocks of the processes of the plane, and of this machine."""
        # Looking at all of them takes some milliseconds, which are in neither while.
        return self._spent(), time.perf_counter()

    def _since(self, began: tuple[Mapping[int, float], float], steps: int) -> Spent:
        seconds, now = time.perf_counter() - began[1], self._spent()
        return Spent(seconds=seconds, steps=steps, by_role=by_role(began[0], now, self._roles))

    def _spent(self) -> dict[int, float]:
        """Return the processor seconds of each process of the plane so far."""
        below = {each.pid: spent_by(each) for each in psutil.Process().children(recursive=True)}
        return below | {os.getpid(): time.process_time()}
