"""Shell of the Scaler machine: asks loaders what they do, and carries out what changes. Decides nothing."""

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
"""Name that its heartbeats and lines go by."""
_LOOK_S = 5.0
_AHEAD_S = 90.0
"""A stage of the mix is seen so long before it begins: averages, and another process, take that time."""
_READS = 4
"""Reads at once of a loader that is added."""
_LOG = get_logger(__name__)


class Scaling:
    """Follows the load of the source loaders of a plane, in a thread of the process that opened it."""

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
        """Roles whose answers were faults, and that were named for it."""
        self._heard = crew.spec.history
        """As the planner had it last, where it was asked."""
        self.activity = Activity(SCALER, log=log, host=host_here())
        self.activity.figures.note(loaders=len(crew.sources_of))
        self.activity.figures.count("loader_changes_total", 0)
        self.activity.rest("follows the load of the source loaders")
        self._end_heartbeats = crew.board.post(self.activity)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="omniload-scaler", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Change nothing any more; the gate of the plane is closed, which ends a change that is under way."""
        self._ended.set()
        self._end_heartbeats()

    def _run(self) -> None:
        with self.activity.speaking():
            try:
                while not self._ended.wait(_LOOK_S):
                    # All of it: who asks an actor once Ray has ended here starts another Ray.
                    with self._gate.inside():
                        # Each time, also where nothing changes: what a move that took too long left is dropped here.
                        self._mover.clean_up()
                        for command in self._scaler.handle(self._look()):
                            self._change(command)
            except Exception:  # noqa: BLE001 -- the outermost loop: the plane runs on as it is
                # A plane that is being closed ends the gate under a look: that is no fault to be told.
                if not self._ended.is_set():
                    _LOG.exception("loaders of this data plane are not scaled any more")

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
                # The planner names members, and what is scaled are roles.
                name.partition("+")[0]
                for task in self._planner_of(beats)
                for name in task.waits_for
            ),
            filled_S=self._ask(PLANNER, lambda planner: planner.filled.remote()),
        )

    def _history(self) -> History:
        """Return the mix and its edits, as far as is known.

        Of a stage that waits for epochs only the planner knows that it has begun: it is asked while one waits.
        """
        known = max(self._crew.spec.history, self._heard, key=lambda each: len(each.edits))
        if any(stage.waits for stage in known.latest.mix.stages):
            heard = self._ask(PLANNER, lambda planner: planner.history.remote())
            self._heard = known if heard is None else heard
            known = max(known, self._heard, key=lambda each: len(each.edits))
        return known

    def _measure(self, role: str) -> None:
        """Take in what a loader has done."""
        member = self._crew.holders.get(role)
        work = self._ask(role, lambda loader: loader.work.remote())
        if member is not None and work is not None:
            self._meter.see(member.name, work)

    def _ask(self, role: str, ask: Callable[[Any], Any]) -> Any:  # noqa: ANN401 -- Ray's answers have no static type
        """Return what the holder of a role says; ``None`` where it is lost, busy or at fault: it is asked later."""
        member = self._crew.holders.get(role)
        actor = None if member is None else self._crew.actors.get(member)
        if actor is None:
            return None
        try:
            return answer_to(ask(actor), role, limit_s=_LOOK_S, check=self._gate.check)
        except OmniloadError as error:
            self._gate.check()
            _LOG.debug("%s does not say what it does: %s", role, error)
            # That one is lost or busy passes. Of a fault the others are followed all the same, and it is told once.
            if not isinstance(error, UnavailableError) and role not in self._at_fault:
                self._at_fault.add(role)
                _LOG.warning("source loaders are scaled without what %s says: %s", role, error)
            return None

    def _planner_of(self, beats: Mapping[str, Progress]) -> tuple[Task, ...]:
        planner = beats.get(self._crew.holders[PLANNER].name)
        return () if planner is None else planner.tasks

    def _steps(self, beats: Mapping[str, Progress], now_s: float) -> tuple[int, int]:
        """Return the step that is planned next, and how many are planned until another loader could be there."""
        planner = beats.get(self._crew.holders[PLANNER].name)
        # Not before it is told: a run that goes on from a state would seem to take all steps before that at once.
        if planner is not None and (planned := planner.figures.get("planned_step")) is not None:
            self._planned = int(planned)
            # Over several looks: a step may take longer than from one to the next, and many are planned at once.
            self._pace.reach(self._planned, now_s)
        ahead = math.ceil(self._pace.steps_in(_AHEAD_S)) + self._pace.stride
        return self._planned, ahead

    def _change(self, command: ScalerCommand) -> None:
        """Carry a change out; one that cannot be has changed nothing, and may be due again."""
        try:
            said = self._carry_out(command)
        except MoveUnderWayError as error:
            # It has happened, though some have not heard of it yet: it counts, and is not tried again.
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
