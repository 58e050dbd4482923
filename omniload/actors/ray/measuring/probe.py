"""Measures Ray's cost on this machine: small planes at full speed, one at rest, and calls to a bare actor.

A loop of calls does not show the cost of a message. In a plane, each message wakes both ends, in threads whose caches
other processes have used meanwhile. Therefore the processor time of the processes of a real plane is measured.

Planes that are compared are open at the same time, each on a Ray of its own below a process that has all its ranks but
one. They run alternately for short periods, so that other work on the machine affects them equally. The first plane
rests alone, after the others have ended, because a wake-up takes twice as long when nothing else runs. Then its ranks
take each step after a pause, as ranks that train do, because a process that has paused finds other caches.

The last rank has a process of its own, as every rank of a job has, and this rank is measured. The other ranks are in
the process that opened the plane. If several ranks share a process, one wake-up serves them all, and they find each
other's windows there: with two ranks, each takes a sixth less time, and with eight, a third less.
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
"""Duration and number of a plane's turns at full speed, and of its periods at rest. Each heartbeat occurs twice in a
period at rest. Now and then Ray starts a spare process, which takes up to half a core for two seconds."""
_LEAST_TURNS, _MOST_S = 3, 60.0
"""Fewer turns are enough if turns take long, as with samples of a few tokens or with much other work on the machine."""
_WARM_TURNS = 2
"""Turns before the measured ones. The first finds the number of steps in a turn. After the second, the pages of the
object store have been touched and heaps have grown."""
_LEAST_WINDOWS = 2
"""Least windows in a turn. With fewer, on a busy machine, a loader may be idle, and the cost of its messages is
unknown."""
_FILLS_S = 0.3
"""Time in which the buffers of a plane fill while its rank asks for nothing."""
_PACES, _PACED_STEPS = 3, 64
"""How often the ranks pause before their steps, alone and all together, and before how many steps, rounded up to whole
plans."""
_SETTLED_WINDOWS = 3
"""Windows after which a rank has taken all batches that it requested at an earlier pace."""
_OPENS_S, _ANSWERS_S, _ENDS_S = 600.0, 300.0, 60.0
"""Longest waits for a plane; the plane's own limits are shorter."""


_Takers = Callable[[RankHandle], Taker]
_Shown = Callable[[str, float], AbstractContextManager[Callable[[float], object]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """Results of a probe."""

    planes: tuple[PlaneSpent, ...]
    """Planes, in the order of the specifications."""
    clock: Mapping[str, float]
    """Cores in use while no rank asks for anything, by role; ``opener`` includes the keeper of the plane."""
    paced_step_s: Mapping[str, float]
    """Processor time of a step of the first plane, by role, with a pause of each rank before the step."""
    paced_steps: int
    """Number of steps with pauses."""
    takes_s: tuple[tuple[float, ...], ...]
    """Seconds in which a rank that has paused takes a batch that is ready, over several batches, by place as in
    ``Paced``, without places that no batch had."""
    call: Call
    """A call that is answered with nothing."""
    node_bytes: int
    """Memory of Ray's own processes."""
    idle: float
    """Share of the processor time wanted by planes at full speed that they did not get although a core was idle."""


def probe(specs: Sequence[PlaneSpec], calls: int, taker: _Takers, shown: _Shown) -> Probed:
    """Open planes together, run them alternately, measure bare calls next to the first, and end the first plane last.

    Args:
        specs: The planes, each with one loader, one constructor and endless sources.
        calls: Number of calls to measure.
        taker: Returns a rank's taker of batches. Its work before its clock starts warms the caches.
        shown: Shows the present task and its progress.

    Raises:
        OmniloadError: A plane did not open.
        UnavailableError: Ray did not start, or a plane was lost.
    """
    with ExitStack() as opened:
        planes = [opened.enter_context(closing(_Beside(_serve, spec, taker))) for spec in specs]
        for plane in planes:
            # All planes are told to end before any is awaited, so that they end in parallel, as they open.
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
        # These alternate too. The ranks of a job wake a constructor together, each from a process that has paused.
        with shown("measuring steps after pauses", 2 * _PACES + 1) as advance:
            both = ("apart", "together")
            paced = [[first.asked(each, advance) for each in both] for _ in range(_PACES)]
            # The opener of a job has no ranks in its process, and each rank checks on the plane at fixed times.
            clock["opener"] = cores_at_rest([first.asked("leave", advance)])["opener"]
    apart, together = zip(*paced, strict=True)
    of_planes = zip(*turns[_WARM_TURNS:], strict=True)
    return Probed(
        # All planes have the same roles, with the same time-driven work.
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
    """Return the times of batches in all these periods, by place."""
    of_places = zip(*(each.takes_s for each in paced), strict=True)
    return tuple(filter(None, (tuple(chain.from_iterable(of_place)) for of_place in of_places)))


class _Beside:
    """A helper process; it reads this process's pipe and ends with this process."""

    def __init__(self, serve: Callable[..., None], *arguments: object) -> None:
        """Run ``serve`` in the helper process, with the other end of the pipe as its last argument."""
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
        """Ask for a measurement."""
        try:
            self._pipe.send(what)
        except OSError as error:
            raise self._lost() from error

    def answer(self, limit_s: float) -> Any:  # noqa: ANN401 -- as it was asked
        """Return the measurement; raise the error of the helper process."""
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
        """Ask, wait for the answer, and report progress."""
        self.ask(what)
        answer = self.answer(_ANSWERS_S)
        advance(1)
        return answer

    def _lost(self) -> UnavailableError:
        self._process.join(_ENDS_S)
        return UnavailableError(
            f"a small plane ended while it was measured (exit {self._process.exitcode}); free memory and measure again"
        )

    def stop(self) -> None:
        """Have the process end once it has answered what it was asked."""
        self._pipe.close()

    def close(self) -> None:
        """Wait until the process has ended."""
        self.stop()
        self._process.join(_ENDS_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(spec: PlaneSpec, taker: _Takers, pipe: Connection) -> None:
    """Open a plane and measure as asked, until the other end of the pipe is closed."""
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
        pass  # no process asks any more: the opener was interrupted together with this process, and reports why


def _serve_rank(address: str, rank: int, taker: _Takers, pipe: Connection) -> None:
    """Join a plane as one rank, and take steps as asked, until the other end of the pipe is closed."""
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
        pass  # no process asks any more: the opener was interrupted together with this process, and reports why


class _Driven:
    """A plane, the ranks of this process, and the rank in a process of its own."""

    def __init__(
        self, spec: PlaneSpec, pids: Mapping[str, int], ranks: Ranks, alone: _Beside
    ) -> None:
        self._roles = {pid: name.partition("-")[0] for name, pid in pids.items()}
        self._roles |= {os.getpid(): "opener", alone.pid: "rank"}
        self._window, self._ahead = spec.mix.steps_at_once, spec.mix.steps_ahead
        self._ranks, self._alone = ranks, alone
        self._steps = _LEAST_WINDOWS * self._window
        """Steps in a turn."""

    def _take(self, steps: int) -> None:
        self._alone.ask(("take", steps))
        self._ranks.take(steps)
        self._alone.answer(_ANSWERS_S)

    def rest(self) -> Spent:
        """Fill the buffers, then measure a period without steps."""
        self._take(2 * (self._ahead + self._window))
        return self.left()

    def left(self) -> Spent:
        """Measure a period in which no rank asks for a step."""
        time.sleep(_FILLS_S)
        began = self._begun()
        time.sleep(_REST_S)
        return self._since(began, 0)

    def turn(self) -> Spent:
        """Take steps for one turn; the previous turn's speed sets their number, which is the least at first."""
        # Batches that are already built are taken first; the later ones are built as fast as they are taken.
        self._take(self._ahead + self._window)
        began, steps = self._begun(), self._steps
        self._take(steps)
        spent = self._since(began, steps)
        windows = round(_TURN_S / spent.seconds * steps / self._window)
        self._steps = max(_LEAST_WINDOWS, windows) * self._window
        return spent

    def pace(self, *, together: bool) -> Paced:
        """Have the separate rank pause before each step; with ``together``, the ranks of this process pause too."""
        steps = _SETTLED_WINDOWS * self._window
        self._alone.ask(("settle", steps))
        self._ranks.settle(steps, resting=together)
        self._alone.answer(_ANSWERS_S)
        steps = -(-_PACED_STEPS // self._window) * self._window
        began = self._begun()
        self._alone.ask(("pace", steps))
        # Only the first rank of this process pauses, which delays all of them, because they share one thread.
        self._ranks.pace(int(together), steps)
        takes_s, aside_s = self._alone.answer(_ANSWERS_S)
        return Paced(spent=self._since(began, steps), takes_s=takes_s, aside_s=aside_s)

    def _begun(self) -> tuple[dict[int, float], float]:
        """Return the processor seconds of the plane's processes, and the time."""
        # Reading all of them takes some milliseconds, which count in neither period.
        return self._spent(), time.perf_counter()

    def _since(self, began: tuple[Mapping[int, float], float], steps: int) -> Spent:
        seconds, now = time.perf_counter() - began[1], self._spent()
        return Spent(seconds=seconds, steps=steps, by_role=by_role(began[0], now, self._roles))

    def _spent(self) -> dict[int, float]:
        """Return the processor seconds of each process of the plane so far."""
        below = {each.pid: spent_by(each) for each in psutil.Process().children(recursive=True)}
        return below | {os.getpid(): time.process_time()}
