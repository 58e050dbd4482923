"""What Ray takes of this machine: small planes at full speed, one at rest, and calls to a bare actor beside it.

What a message takes is not seen in a loop of calls: in a plane every end is woken for one message, in threads, with
caches that other processes have used meanwhile. So processor time is that of the processes of a real plane.

Planes that are compared are open side by side, each on a Ray of its own below a process that has all its ranks but
one. They are driven in turns, a short while each: what the machine does beside them is no difference between them
then. The first rests alone, once the others have ended: where nothing else runs, a wake-up takes twice as long. Then
its ranks take steps after pauses, as those of a job do that train in between: a process that has rested finds other
caches.

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
from omniload.actors.ray.measuring.calls import Call, measured_calls
from omniload.actors.ray.measuring.spent import (
    PAUSE_S,
    Paced,
    PlaneSpent,
    Spent,
    Taker,
    by_role,
    cores_at_rest,
    memory_of,
    paced_step,
    rays_own,
    spent_at_full_speed,
    spent_by,
    took,
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
_PAUSES, _PACES, _APART, _TOGETHER = 6, 4, 8, 4
"""Batches of a window that a rank rests before; how often, and for how many windows, by itself and all together."""
_PLACES = 4
"""The first of a window, the second, at which the next window is asked for, the third, which finds caches as asking
left them, and those behind it, which are alike."""
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
    """Processor time of a step of the first plane, by role, where its ranks rested before they got at a window."""
    takes_s: tuple[tuple[float, ...], ...]
    """Time in which a rank that has rested takes a batch that is at hand, of several, others left out: of the first of
    windows, at which the next one is asked for, of the second, which finds caches as that left them, and of those
    behind it. Windows of one batch have no second."""
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
        takes_s=tuple(
            tuple(chain.from_iterable(of_place))
            for of_place in zip(*(each.takes_s for each in apart), strict=True)
        ),
        call=call,
        node_bytes=node_bytes,
        idle=cores.share,
    )


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
            window = spec.mix.steps_at_once
            address = plane.address.model_dump_json()
            alone = opened.enter_context(
                closing(_Beside(_serve_rank, address, last, window, taker))
            )
            joined = opened.enter_context(ExitStack())
            takers = [joined.enter_context(closing(taker(plane.handle(rank)))) for rank in others]
            alone.answer(_OPENS_S)
            driven = _Driven(spec, plane.pids(), _Ranks(takers, window), alone)
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
                        pipe.send(driven.pace(_APART, together=False))
                    case "together":
                        pipe.send(driven.pace(_TOGETHER, together=True))
                    case ("calls", calls):
                        node_bytes = sum(map(memory_of, rays_own()))
                        pipe.send((measured_calls(calls), node_bytes))
    except OmniloadError as error:
        pipe.send(error)
    except (EOFError, OSError, KeyboardInterrupt):
        pass  # nobody asks any more: the opener says why, and was interrupted with this process


class _Ranks:
    """Ranks of one process, which take the same steps one after the other."""

    def __init__(self, takers: Sequence[Taker], window: int) -> None:
        self._takers, self._window = takers, window
        self._opens_at: list[int] = []

    def take(self, steps: int) -> None:
        """Take so many steps."""
        for _ in range(steps):
            for taker in self._takers:
                taker.next_batch()

    def look(self) -> None:
        """Take a window, and see which of its steps each rank has to ask for: the first windows are short."""
        by_rank: list[list[float]] = [[] for _ in self._takers]
        for _ in range(self._window):
            for taker, spent_s in zip(self._takers, by_rank, strict=True):
                spent_s.append(took(taker)[1])
        # Others are at hand, and take a hundredth of that.
        self._opens_at = [spent_s.index(max(spent_s)) for spent_s in by_rank]

    def pace(self, resting: int, windows: int) -> tuple[tuple[float, ...], ...]:
        """Take windows, the first ranks with a pause before they get at one, and some more in it.

        Returns:
            What each batch took that was at hand then, by its place as in ``Paced``.
        """
        takes_s: list[list[float]] = [[] for _ in range(min(_PLACES, self._window))]
        for _ in range(windows):
            for place in range(self._window):
                for number, (taker, first) in enumerate(
                    zip(self._takers, self._opens_at, strict=True)
                ):
                    behind = (place - first) % self._window
                    if number >= resting or behind >= _PAUSES:
                        taker.next_batch()
                    else:
                        takes_s[min(behind, _PLACES - 1)].append(_taken_after_a_pause(taker))
        return tuple(map(tuple, takes_s))


def _serve_rank(address: str, rank: int, window: int, taker: _Takers, pipe: Connection) -> None:
    """Join a plane as one rank, and take steps as asked for, until the other end of the pipe is closed."""
    try:
        handle = handle_in(PlaneAddress.model_validate_json(address), rank)
        with closing(taker(handle)) as its:
            ranks = _Ranks([its], window)
            pipe.send(True)
            while True:
                match pipe.recv():
                    case ("take", steps):
                        ranks.take(steps)
                        pipe.send(True)
                    case ("look",):
                        ranks.look()
                        pipe.send(True)
                    case ("pace", windows):
                        pipe.send(ranks.pace(1, windows))
    except OmniloadError as error:
        pipe.send(error)
    except (EOFError, OSError, KeyboardInterrupt):
        pass  # nobody asks any more: the opener says why, and was interrupted with this process


class _Driven:
    """A plane, the ranks of this process, and the one beside it."""

    def __init__(
        self, spec: PlaneSpec, pids: Mapping[str, int], ranks: _Ranks, alone: _Beside
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

    def pace(self, windows: int, *, together: bool) -> Paced:
        """Have the rank beside rest before it gets at a window; ``together``, those of this process as well."""
        self._alone.ask(("look",))
        self._ranks.look()
        self._alone.answer(_ANSWERS_S)
        began = self._begun()
        self._alone.ask(("pace", windows))
        # The first of this process rests for all of them: they are one thread.
        self._ranks.pace(int(together), windows)
        takes_s = self._alone.answer(_ANSWERS_S)
        spent = self._since(began, windows * self._window)
        return Paced(spent=spent, takes_s=takes_s)

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


def _taken_after_a_pause(taker: Taker) -> float:
    """Rest, and take a batch that is at hand; return what that takes of a core that nobody else wants."""
    time.sleep(PAUSE_S)
    # Other work on the core is in the one, and to look at the other takes a twentieth of it.
    return min(took(taker))
