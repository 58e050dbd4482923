"""Taking back plans that no rank was given yet, by a question to the data constructors.

::

    a change is requested ──▶ AskFences ──▶ constructors withhold all steps not given out, and name the first
                                                     │ FenceTold
    CutJournal, KeepEdits, NewEdition ◀── the greatest answer: the first step that no rank holds

If a constructor does not answer in time, or is lost meanwhile, nothing is taken back and all plans stay.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self, TypeAlias

from omniload.plan.records import StepPlan
from omniload.plan.world import Edition

__all__ = [
    "AskFences",
    "CutJournal",
    "FenceTold",
    "FencesLate",
    "Giving",
    "NewEdition",
    "Withdrawal",
    "WithdrawalAsked",
    "WithdrawalEnded",
    "WithdrawalEvent",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class WithdrawalAsked:
    """A change of the mix waits to hear the first step that no rank was given."""

    at: int | None
    """As in ``ChangeAsked``."""
    constructors: int
    """How many data constructors there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceTold:
    """A data constructor answers: it gives out no step from ``step`` on until it hears of another edition."""

    number: int
    """Place among the constructors."""
    turn: int
    """Number of the question that it answers."""
    step: int
    """The first step that it has given to no rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FencesLate:
    """The time for the constructors' answers is over."""

    turn: int
    """Number of the question."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WithdrawalEnded:
    """The waiting change was applied or refused, so constructors may give out every step again."""


WithdrawalEvent: TypeAlias = WithdrawalAsked | FenceTold | FencesLate | WithdrawalEnded


@dataclass(frozen=True, slots=True, kw_only=True)
class AskFences:
    """Ask every constructor to give out no further step, and to report the first step that no rank was given."""

    edition: tuple[int, int]
    """Number of the next edition; withheld steps are given out under that edition or a later one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutJournal:
    """Remove the records of a step and of all later steps from the journal; no rank was given any of them."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEdition:
    """Tell every constructor to drop old plans from a step on, give out withheld steps, and build the new plans."""

    edition: Edition
    windows: tuple[tuple[StepPlan, ...], ...]
    """The planned steps that stay valid, sent again because messages of the old edition are ignored from now on."""


@dataclass(slots=True, kw_only=True)
class Withdrawal:
    """What the planner knows about taking plans back: which steps must stay, and the state of its question."""

    edition: Edition
    """Current edition of the plans."""
    kept_to: int
    """Steps before this one stay as planned: a lost constructor may have given them out, or their draws cannot be
    undone."""
    turn: int = field(default=0, init=False)
    """Number of the last question."""
    _missing: set[int] | None = field(default=None, init=False)
    """Constructors that have not answered yet; ``None`` while no question is open."""
    _step: int = field(default=0, init=False)
    """The greatest answer."""

    @classmethod
    def of(cls, life: int, planned: int, changed: Iterable[int] = ()) -> Self:
        """Return the state of a planner that starts; a planner that takes over keeps every step planned before it.

        The lost planner may have planned steps anew after a change (``changed`` are the steps at which changes take
        effect) without telling every constructor that the old plans are void. So the edition begins there once more.
        """
        return cls(edition=Edition(life=life, since=min((planned, *changed))), kept_to=planned)

    def ask(self, constructors: int) -> AskFences:
        """Begin a new question to this many constructors."""
        self.turn += 1
        self._missing, self._step = set(range(constructors)), 0
        return AskFences(edition=(self.edition.life, self.turn))

    def hear(self, event: FenceTold | FencesLate) -> None:
        """Note an answer, or that time is up; events of an earlier question are ignored."""
        if event.turn != self.turn or self._missing is None:
            return
        if isinstance(event, FencesLate):
            self.give_up()
        else:
            self._missing.discard(event.number)
            self._step = max(self._step, event.step)

    def keep_to(self, step: int) -> None:
        """Never take back a step before ``step``."""
        self.kept_to = max(self.kept_to, step)

    def give_up(self) -> None:
        """End the open question; nothing is taken back."""
        self._missing = None

    @property
    def is_settled(self) -> bool:
        """Whether no answer is missing."""
        return not self._missing

    def opens_at(self, planned: int) -> int:
        """Return the first step that may be planned anew; ``planned`` is the first step without a plan."""
        if self._missing is None or self._missing:
            return planned
        return min(planned, max(self._step, self.kept_to))

    def renew(self, since: int) -> Edition:
        """Begin an edition whose plans may differ from step ``since`` on; it ends every fence."""
        self._missing = None
        self.edition = Edition(life=self.edition.life, turn=self.turn, since=since)
        return self.edition

    @property
    def is_fenced(self) -> bool:
        """Whether constructors may be withholding steps."""
        return self.edition.turn < self.turn


@dataclass(slots=True)
class Giving:
    """Which steps a data constructor may give to its ranks, under which edition, and which it has given."""

    edition: Edition = field(default_factory=Edition)
    """Edition of the plans that are built."""
    given_to: int = 0
    """First step that no rank was given."""
    _fence: tuple[tuple[int, int], int] | None = field(default=None, init=False)
    """The edition that ends the fence, and the first step that is withheld until then."""

    def may_give(self, step: int) -> bool:
        """Return whether a step may be given to a rank that asks for it."""
        return self._fence is None or step < self._fence[1]

    def gave(self, step: int) -> None:
        """Note that a rank was given a step."""
        self.given_to = max(self.given_to, step + 1)

    def confirm(self, step: int, number: tuple[int, int]) -> bool:
        """Confirm a step that was lent to a rank under an edition; return whether the rank may take it.

        A repeated question gets the same answer. If the rank may not take it, it asks for the step again, and is given
        it under the current edition once the fence has ended.
        """
        stands = number == self.edition.number and self.may_give(step)
        if stands:
            self.gave(step)
        return stands

    def fence(self, number: tuple[int, int]) -> int:
        """Withhold steps until the edition ``number`` has come; return the first step that no rank was given."""
        # A request of an earlier edition, or of a lost planner, may come late.
        if number > self.edition.number and (self._fence is None or number > self._fence[0]):
            self._fence = number, self.given_to
        return self.given_to

    def turn_to(self, edition: Edition) -> bool:
        """Give out plans of a later edition from now on; return whether it is a later one, which ends the fence."""
        # Never backwards: plans of an earlier edition that come late were sent again with the later one.
        if edition.number <= self.edition.number:
            return False
        self.edition = edition
        if self._fence is not None and self._fence[0] <= edition.number:
            self._fence = None
        return True
