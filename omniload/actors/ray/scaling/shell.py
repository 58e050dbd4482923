"""Shell of the Scaler machine: asks loaders for their load, and carries out changes. The shell decides nothing."""

import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, assert_never

from omniload.actors.gate import Gate
from omniload.actors.heartbeat_board import Activity
from omniload.actors.ray.answers import answer_to
from omniload.actors.ray.crew import Crew
from omniload.actors.ray.hosts.placing import host_here
from omniload.actors.ray.layout import PLANNER
from omniload.actors.ray.scaling.mover import Mover, MoveUnderWayError
from omniload.base.errors import OmniloadError, UnavailableError
from omniload.base.log import RoleLog, get_logger
from omniload.base.units import counted
from omniload.machine.progress import Progress, Task
from omniload.machine.scaler import (
    LoadersSeen,
    MergeLoader,
    MoveSources,
    Scaler,
    ScalerCommand,
    SplitLoader,
)
from omniload.machine.scaling.coming import Pace
from omniload.machine.scaling.meters import WorkMeter
from omniload.mix.edits.history import History

__all__ = ["SCALER", "Scaling"]

SCALER = "scaler"
"""Name of the scaler in heartbeats and log lines."""
_LOOK_S = 5.0
_AHEAD_S = 90.0
"""How long before its begin a stage counts, because averages and the start of a process take that time."""
_READS = 4
"""Simultaneous reads of an added loader."""
_LOG = get_logger(__name__)


class Scaling:
    """Follows the load of a plane's source loaders, in a thread of the process that opened the plane."""

    def __init__(
        self,
        crew: Crew,
        mover: Mover,
        gate: Gate,
        cost_S: Mapping[int, float],
        log: RoleLog | None,
    ) -> None:
        """Begin with the loaders of ``crew``; ``cost_S`` is the seconds that a token of each source takes."""
        scaling = crew.spec.mix.runtime.scaling
        self._crew, self._gate = crew, gate
        self._mover = mover
        self._scaler = Scaler(least=scaling.least, most=scaling.most, cost_S=cost_S)
        self._meter = WorkMeter()
        self._planned, self._pace = 0, Pace()
        self._at_fault: set[str] = set()
        """Roles whose answers were faults that have been logged."""
        self._heard = crew.spec.history
        """History of the mix as last received from the planner, if it was asked."""
        self.activity = Activity(SCALER, log=log, host=host_here())
        self.activity.figures.note(loaders=len(crew.sources_of))
        self.activity.figures.count("loader_changes_total", 0)
        self.activity.rest("follows the load of the source loaders")
        self._end_heartbeats = crew.board.post(self.activity)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="omniload-scaler", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all changes; the plane's gate is closed already, which ends a change that is under way."""
        self._ended.set()
        self._end_heartbeats()

    def _run(self) -> None:
        with self.activity.speaking():
            try:
                while not self._ended.wait(_LOOK_S):
                    # All of it, because a call to an actor after the end of this Ray would start another Ray.
                    with self._gate.inside():
                        # At each look, because this drops the leftovers of moves that took too long.
                        self._mover.clean_up()
                        for command in self._scaler.handle(self._look()):
                            self._change(command)
            except Exception:  # noqa: BLE001 -- the outermost loop: the plane continues as it is
                # The closing of a plane ends the gate during a look; this is not a fault and is not reported.
                if not self._ended.is_set():
                    _LOG.exception("loaders of this data plane are no longer scaled")

    def _look(self) -> LoadersSeen:
        crew = self._crew
        for role in crew.sources_of:
            self._measure(role)
        beats, now_s = crew.board.read(), time.monotonic()
        busy_S, tokens_S = self._meter.since_last(now_s)
        step, ahead = self._steps(beats, now_s)
        history = self._history()
        number_of = {name: s for s, name in enumerate(history.latest.names)}
        shares, soon = history.shares_at(step), history.greatest_shares(step, step + ahead)
        return LoadersSeen(
            now_s=now_s,
            sources_of=crew.sources_of,
            busy_S=busy_S,
            tokens_S=tokens_S,
            shares_S={number_of[name]: share for name, share in shares.items()},
            soon_S={number_of[name]: share for name, share in soon.items()},
            waited=frozenset(
                # The planner names members, but the scaler works with roles.
                name.partition("+")[0]
                for task in self._planner_of(beats)
                for name in task.waits_for
            ),
            filled_S=self._ask(PLANNER, lambda planner: planner.filled.remote()),
        )

    def _history(self) -> History:
        """Return the mix and its edits, as far as they are known.

        Only the planner knows whether a stage that waits for epochs has begun. Therefore the planner is asked while
        such a stage is pending.
        """
        known = max(self._crew.spec.history, self._heard, key=lambda each: len(each.edits))
        if any(stage.waits for stage in known.latest.mix.stages):
            heard = self._ask(PLANNER, lambda planner: planner.history.remote())
            self._heard = known if heard is None else heard
            known = max(known, self._heard, key=lambda each: len(each.edits))
        return known

    def _measure(self, role: str) -> None:
        """Pass a loader's measured load to the machine."""
        member = self._crew.holders.get(role)
        work = self._ask(role, lambda loader: loader.work.remote())
        if member is not None and work is not None:
            self._meter.see(member.name, work)

    def _ask(self, role: str, ask: Callable[[Any], Any]) -> Any:  # noqa: ANN401 -- Ray's answers have no static type
        """Return the answer of a role's holder; ``None`` if it is lost, busy or at fault, to be asked again later."""
        member = self._crew.holders.get(role)
        actor = None if member is None else self._crew.actors.get(member)
        if actor is None:
            return None
        try:
            return answer_to(ask(actor), role, limit_s=_LOOK_S, check=self._gate.check)
        except OmniloadError as error:
            self._gate.check()
            _LOG.debug("%s does not say what it does: %s", role, error)
            # A lost or busy role recovers. The other roles are followed despite a fault, which is logged once.
            if not isinstance(error, UnavailableError) and role not in self._at_fault:
                self._at_fault.add(role)
                _LOG.warning("source loaders are scaled without what %s says: %s", role, error)
            return None

    def _planner_of(self, beats: Mapping[str, Progress]) -> tuple[Task, ...]:
        planner = beats.get(self._crew.holders[PLANNER].name)
        return () if planner is None else planner.tasks

    def _steps(self, beats: Mapping[str, Progress], now_s: float) -> tuple[int, int]:
        """Return the step planned next, and the number of steps planned before another loader could be ready."""
        planner = beats.get(self._crew.holders[PLANNER].name)
        # Not before the step is known: a run that continues from a state would seem to take all steps at once.
        if planner is not None and (planned := planner.figures.get("planned_step")) is not None:
            self._planned = int(planned)
            # Over several looks: a step may take longer than the time between looks, and many are planned at once.
            self._pace.reach(self._planned, now_s)
        ahead = math.ceil(self._pace.steps_in(_AHEAD_S)) + self._pace.stride
        return self._planned, ahead

    def _change(self, command: ScalerCommand) -> None:
        """Carry out a change; a change that fails has had no effect, and may be due again."""
        try:
            said = self._carry_out(command)
        except MoveUnderWayError as error:
            # The change has happened, although some roles do not know of it yet: it counts, and is not repeated.
            said = str(error)
        except OmniloadError as error:
            self._gate.check()
            _LOG.warning("source loaders stay as they are: %s", error)
            return
        self.activity.figures.count("loader_changes_total")
        self.activity.figures.note(loaders=len(self._crew.sources_of))
        self.activity.rest(f"{said}, as {command.why}; follows the load since")
        _LOG.warning("%s: %s", said, command.why)

    def _carry_out(self, command: ScalerCommand) -> str:
        named = f"{counted(len(command.sources), 'source')} of {command.role}"
        with self.activity.doing(f"moves {named}"):
            match command:
                case SplitLoader(sources=sources):
                    return f"{self._mover.split(sources, _READS)} was added for {named}"
                case MoveSources(sources=sources, to=to):
                    self._mover.move(sources, to)
                    return f"{to} took {named}"
                case MergeLoader(role=role, sources=sources, to=to):
                    self._mover.move(sources, to)
                    self._mover.retire(role)
                    return f"{to} took {named}, which had no other and has ended"
                case _:
                    assert_never(command)
