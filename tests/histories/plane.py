"""A simulated plane with the planner's journal on a disk, and with the worst failures of its processes.

A planner dies between any two of its commands or in the middle of a write of its journal, or it is believed dead and
continues. Source loaders fail in the same ways. A store fails, a role is cut off, and messages are lost, late, out of
order or repeated.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from omniload.actors.planner_journal import Kept, keep
from omniload.base.errors import IntegrityError, StateError
from omniload.base.state import JsonObject
from omniload.machine.messages import (
    KeepEdits,
    PlannerCommand,
    PlannerEvent,
    PublishPlans,
    ReadAhead,
    ResizeAsked,
)
from omniload.machine.planner import Planner
from omniload.machine.plans.fences import CutJournal
from omniload.machine.roster.members import HandOver, MemberEnded
from omniload.mix.journal.journal import Journal
from omniload.mix.journal.reading import read_journal, read_tail
from omniload.mix.progress import states_of
from omniload.plan.world import RanksServed, World
from tests.histories.disk import Disk, PlannerKilledError, Writer
from tests.support.plane.messages import Way
from tests.support.plane.simulation import Simulation

__all__ = ["SOMETIMES", "FaultyPlane"]

SOMETIMES = (
    "a role is cut off",
    "a message to one that is cut off is held up",
    "a message is lost and sent again",
    "a message comes twice",
    "a message is overtaken by many",
    "a read of a store fails",
    "a loader is killed",
    "a loader is killed while it is asked for samples",
    "a loader that is believed dead answers",
    "a loader that is believed dead is asked for what it does not hold",
    "samples are asked of a loader that is dead",
    "a shadow takes over",
    "a new loader takes over, as no shadow is ready",
    "a shadow is replaced by one in a better place",
    "a better place turns out to be none",
    "somebody is lost while a better place is tried",
    "a constructor is killed with a step built",
    "a constructor moves to a better place with a step built",
    "a constructor is lost while another one is started in a better place",
    "a constructor asks for fewer steps than its ranks have meanwhile",
    "what several ranks took is heard in one message",
    "ranks that are ahead are heard of again as others catch up",
    "a rank tells a constructor that does not pass it on",
    "a rank tells the planner past a constructor that is lost",
    "a planner is killed",
    "a planner dies between two commands",
    "a planner dies with a step in the journal that nobody was told of",
    "a planner dies in mid-write",
    "a torn write leaves whole records",
    "a planner that is believed dead writes on until the next one claims the journal",
    "a planner that is believed dead is refused by the journal",
    "a planner takes over steps that are to be planned again",
    "the mix is changed",
    "a change is refused",
    "a change is lost with its planner and asked for again",
    "plans are taken back for a change",
    "a step that is built is withheld",
    "constructors say too late what they have given",
    "a planner dies while constructors withhold steps",
    "a planner dies as it has taken plans back, and nobody knows of it",
    "a planner dies between plans that it has taken back and the edit",
    "a step that was lent stands",
    "a step that was lent is asked for anew",
    "a constructor is lost that has lent a step",
    "ranks change",
    "ranks change in mid-step, and take it again",
    "a source moves to another loader",
    "a source moves on before all have heard of it",
)
"""Things that must happen in some histories; otherwise the histories prove less than they seem to."""


_SPAN = 400
"""Approximate messages of a history until its ranks have the last step."""
_LONGEST_RECOVERY = 40
"""Most messages until another planner starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Former:
    """A planner that is believed dead, and the state of its shell."""

    planner: Planner
    journal: Journal
    served: list[RanksServed]
    """The ranks of each constructor. It is not notified of ranks that join later."""


@dataclass(slots=True, kw_only=True)
class FaultyPlane(Simulation):
    """A plane with every kind of fault."""

    store_faults: float = 0.0
    """Share of reads that fail once."""
    believed_dead: bool = False
    """Whether replaced loaders and planners may stay alive."""
    disk: Disk = field(init=False)
    _planned: list[tuple[int, Callable[[], None]]] = field(default_factory=list, init=False)
    """Actions that are due once a number of messages was delivered, the latest action first."""
    _journal: Journal = field(init=False)
    _former: "_Former | None" = field(default=None, init=False)
    """A planner that is believed dead, but lives."""
    _dies_after: int | None = field(default=None, init=False)
    """Commands that the planner carries out before it dies."""
    _dies_untold: bool = field(default=False, init=False)
    """Whether the planner dies before that, at the moment when it would report a step that its journal holds."""
    _undead: set[tuple[int, int]] = field(default_factory=set, init=False)
    """Lives of loaders that are believed dead."""
    _has_cut: bool = field(default=False, init=False)
    """Whether the last record written to the journal takes plans back."""
    _asked: set[Way] = field(default_factory=set, init=False)
    """Loaders with a read in progress."""

    def _look_at_buffers(self) -> None:
        """Do nothing: a history makes no promise about the buffers of loaders."""

    def _plan_deed(self, deed: Callable[[], None]) -> None:
        """Schedule an action at a moment of the whole history, which takes some hundred messages."""
        self._planned.append((self._random.randrange(_SPAN), deed))
        self._planned.sort(key=lambda each: -each[0])

    def _do_what_is_due(self) -> bool:
        is_due = False
        while self._planned and self._planned[-1][0] <= self._bag.delivered:
            self._planned.pop()[1]()
            is_due = True
        return is_due

    def _began(self) -> None:
        self.disk = Disk(self._random)
        writer = Writer(self.disk)
        writer.claim()
        state = self.planner.state
        begin = self.planner.state_at(state.step)
        self._journal = Journal.leading_up(writer, begin, state.digest())
        super(FaultyPlane, self)._began()

    def run(self) -> list[int]:
        """Run like ``Simulation.run``, then also count the faults of messages."""
        digests = super(FaultyPlane, self).run()
        fired = self._bag.fired
        self.seen["a message to one that is cut off is held up"] += fired["held up by a cut"]
        self.seen["a message is lost and sent again"] += fired["lost and sent again"]
        self.seen["a message comes twice"] += fired["repeated"]
        self.seen["a message is overtaken by many"] += fired["slow"]
        self.seen["a change is refused"] += self.refused
        self.seen["the mix is changed"] += len(self.history.edits) - len(self.edits)
        self.seen["ranks change"] += len(self.worlds)
        self.seen["ranks change in mid-step, and take it again"] += self.redone
        self.seen["a source moves to another loader"] += self.moved
        self.seen["a source moves on before all have heard of it"] += self.moved_on
        self.seen["a torn write leaves whole records"] += self.disk.torn_between_records
        return digests

    def on_disk(self) -> list[JsonObject]:
        """Return the records on the disk."""
        return read_journal(Writer(self.disk))[1]

    def _carry(self, commands: Sequence[PlannerCommand]) -> None:
        """Carry commands out as the planner's shell does: journal writes come first."""
        self._carry_of(self._journal, commands)

    def _carry_of(self, journal: Journal, commands: Sequence[PlannerCommand]) -> None:
        plain = super(FaultyPlane, self)._carry
        try:
            for kept, group in groupby(commands, lambda each: isinstance(each, Kept)):
                each = tuple(group)
                if kept:
                    self._die_if_due(journal)
                    keep(journal, each)
                    plain(each)
                    self._has_cut = any(isinstance(one, CutJournal) for one in each)
                    continue
                for command in each:
                    self._die_if_due(journal, command)
                    plain((command,))
        except PlannerKilledError:
            self._die()

    def _die_if_due(self, journal: Journal, command: PlannerCommand | None = None) -> None:
        if self._dies_after is None or journal is not self._journal:
            return
        if self._dies_after > 0 and not (self._dies_untold and isinstance(command, PublishPlans)):
            self._dies_after -= 1
            return
        self._dies_after = None
        self._saw("a planner dies between two commands", "planner")
        if isinstance(command, KeepEdits) and self._has_cut:
            what = "a planner dies between plans that it has taken back and the edit"
            self._saw(what, "planner")
        if isinstance(command, PublishPlans):
            what = "a planner dies with a step in the journal that nobody was told of"
            self._saw(what, "planner")
        raise PlannerKilledError

    def _die(self) -> None:
        self._saw("a planner is killed", "planner")
        if not self.planner.is_settled:
            self._saw("a planner dies while constructors withhold steps", "planner")
        self.planners_killed += 1
        self._planner_is_there = False
        self._dies_after, self.disk.tears_next = None, False
        self._send(self._recover_later, self._random.randrange(_LONGEST_RECOVERY), waits=True)

    def _recover_later(self, left: int) -> None:
        """Start another planner some messages later; until then the previous one may live on."""
        if left:
            self._send(self._recover_later, left - 1, waits=True)
        else:
            self._recover_planner()

    def _kill_planner(self) -> None:
        """Kill the planner now, between two commands, or in the middle of a write; or believe it dead."""
        if not self._planner_is_there or self.planners_killed >= self.planner_kills:
            return
        if self._dies_after is not None or self.disk.tears_next:
            return  # it will die anyway
        way = self._random.randrange(4 if self.believed_dead else 3)
        if way == 0:
            self._die()
        elif way == 1:
            self._dies_after = self._random.randrange(12)
            self._dies_untold = self._random.random() < 0.5
        elif way == 2:
            self.disk.tears_next = True
        else:
            self._former = _Former(planner=self.planner, journal=self._journal, served=self._served)
            self._die()

    def _recover_planner(self) -> None:
        """Start another planner from the contents of the disk, as ``omniload.actors.planning.make_successor`` does."""
        if self.disk.torn > self.seen["a planner dies in mid-write"]:
            self._saw("a planner dies in mid-write", "planner")
        writer = Writer(self.disk)
        writer.claim()
        _, self.journal = read_journal(writer)
        tail = read_tail(writer, self.mix.steps_held)
        told, cut_untold = self._states, self.disk.cut_untold
        self._states = states_of(self.history, tail)
        # Otherwise a rank may train on a step that is planned differently later.
        reached, self.disk.cut_untold = told[-1].step, False
        if cut_untold:
            self._saw("a planner dies as it has taken plans back, and nobody knows of it")
            reached = max(self._next.values())
        assert self._states[-1].step >= reached, "what was made durable is not there"
        first = self._states[0].step
        step = max(first, tail.next_step - self.mix.steps_held)
        ahead = [state for state in self._states if state.step >= step]
        self.seen["a planner takes over steps that are to be planned again"] += len(ahead) > 1
        self._journal = Journal.taken_over(writer, tail, step)
        world = {} if tail.world is None else {"world": World.from_json(tail.world)}
        self._begin_planner(ahead, **world)

    def _hear(self, planner: Planner, event: PlannerEvent) -> None:
        if self._former is not None and planner is self._former.planner:
            self._hear_former(event)
            return
        super(FaultyPlane, self)._hear(planner, event)

    def _hear_former(self, event: PlannerEvent) -> None:
        """Let a planner that is believed dead continue until its journal refuses it."""
        assert self._former is not None
        former, served = self._former, self._served
        is_there = self._planner_is_there
        self._served = former.served
        try:
            try:
                commands = former.planner.handle(event)
            except IntegrityError:  # as in a run, the shell checks who owns the journal
                former.journal.require_claim()
                raise
            self._carry_of(former.journal, commands)
        except StateError:
            self._saw("a planner that is believed dead is refused by the journal", "planner")
            self._former = None
        else:
            if not is_there and any(isinstance(each, Kept) for each in commands):
                what = "a planner that is believed dead writes on until the next one claims the journal"
                self._saw(what, "planner")
        finally:
            self._served = served

    def _ask(self, asked: ResizeAsked) -> None:
        was_there = self._planner_is_there
        super(FaultyPlane, self)._ask(asked)
        if (
            was_there and not self._planner_is_there
        ):  # it died during the call, so the rank's call has failed
            self._put_off(self._ask, asked, to="planner")

    def _read(self, way: Way, command: ReadAhead) -> None:
        self._asked.add(way)
        if (way.number, way.life) in self._undead:
            self._saw("a loader that is believed dead answers", f"loader-{way.number}")
        super(FaultyPlane, self)._read(way, command)

    def _finish_read(self, way: Way, command: ReadAhead) -> None:
        if self._random.random() < self.store_faults:
            self._saw("a read of a store fails", f"loader-{way.number}")
            self._send(self._finish_read, way, command, to=f"loader-{way.number}")
            return
        self._asked.discard(way)
        super(FaultyPlane, self)._finish_read(way, command)

    def _kill(self) -> None:
        """Kill a loader, or believe it dead."""
        number = self._random.randrange(self.num_loaders)
        holder = self._roster.holder_of(f"loader-{number}")
        if holder is None or self.killed >= self.kills:
            return
        self.killed += 1
        if self.believed_dead and self._random.random() < 0.5:
            self._undead.add((number, len(self._lives[number]) - 1))
        else:
            self._saw("a loader is killed", f"loader-{number}")
            if any(way.number == number for way in self._asked):
                what = "a loader is killed while it is asked for samples"
                self._saw(what, f"loader-{number}")
            self._lives[number] = [None] * len(self._lives[number])
        commands = self._roster.handle(MemberEnded(holder, "killed"))
        at_once = any(isinstance(command, HandOver) for command in commands)
        what = (
            "a shadow takes over" if at_once else "a new loader takes over, as no shadow is ready"
        )
        self._saw(what, f"loader-{number}")
        self._replace(commands)

    def _kill_constructor(self) -> None:
        held = sum(constructor.num_steps for constructor in self._constructors)
        before = self.constructors_killed
        super(FaultyPlane, self)._kill_constructor()
        left = sum(constructor.num_steps for constructor in self._constructors)
        if self.constructors_killed > before and left < held:
            self._saw("a constructor is killed with a step built")
