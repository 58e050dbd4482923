"""Taking plans back that no rank was given: what is asked of data constructors for it, and what they answer.

::

    a change is asked for ──▶ AskFences ──▶ constructors give out nothing from here on, and say where that is
                                                     │ FenceTold
    CutJournal, KeepEdits, NewEdition ◀── the greatest answer: the first step that no rank holds

A constructor that does not answer in time, or is lost meanwhile, takes nothing back: plans stay as they are.
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
    """A change of the mix waits for the first step that no rank was given."""

    at: int | None
    """As in ``ChangeAsked``."""
    constructors: int
    """How many data constructors there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceTold:
    """A data constructor gives out nothing from a step on until it hears of another edition."""

    number: int
    """Place among the constructors."""
    turn: int
    """Of the question."""
    step: int
    """The first step that it has given to no rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FencesLate:
    """Constructors have had the time that there is to answer."""

    turn: int
    """Of the question."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WithdrawalEnded:
    """The change that waited was taken up, or refused: whatever constructors still withhold may be given out."""


WithdrawalEvent: TypeAlias = WithdrawalAsked | FenceTold | FencesLate | WithdrawalEnded


@dataclass(frozen=True, slots=True, kw_only=True)
class AskFences:
    """Have every constructor give out no further step, and say which is the first one that no rank was given."""

    edition: tuple[int, int]
    """Number of the edition that is to come: what is withheld is given out under it, or under a later one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutJournal:
    """Take the records of a step and those behind it from the journal: no rank was given any of them."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEdition:
    """Have every constructor drop the plans of before from a step on, give out what it withheld, and build the rest."""

    edition: Edition
    windows: tuple[tuple[StepPlan, ...], ...]
    """The steps that are planned and stay: what is still to come of them is of the edition before, and not heard."""


@dataclass(slots=True, kw_only=True)
class Withdrawal:
    """Which plans may be taken back, as far as a planner knows, and what it has asked constructors for it."""

    edition: Edition
    """Of the plans by now."""
    kept_to: int
    """Steps before it stay as they are planned: a constructor that is gone may have given them out, or what was drawn
    for them cannot be undone."""
    turn: int = field(default=0, init=False)
    """Number of the last question."""
    _missing: set[int] | None = field(default=None, init=False)
    """Constructors that have not answered it; ``None`` where none is under way."""
    _step: int = field(default=0, init=False)
    """The greatest answer."""

    @classmethod
    def of(cls, life: int, planned: int, changed: Iterable[int] = ()) -> Self:
        """Return that of a planner which has planned nothing; one that takes over keeps what was planned before it.

        From a step that a change holds from (``changed``) the planner before may have planned anew, and not have told
        every constructor that the plans of before are void: so they are told again from there on.
        """
        return cls(edition=Edition(life=life, since=min((planned, *changed))), kept_to=planned)

    def ask(self, constructors: int) -> AskFences:
        """Ask so many constructors."""
        self.turn += 1
        self._missing, self._step = set(range(constructors)), 0
        return AskFences(edition=(self.edition.life, self.turn))

    def hear(self, event: FenceTold | FencesLate) -> None:
        """Note an answer, or that the others come too late; of an earlier question neither counts."""
        if event.turn != self.turn or self._missing is None:
            return
        if isinstance(event, FencesLate):
            self.give_up()
        else:
            self._missing.discard(event.number)
            self._step = max(self._step, event.step)

    def keep_to(self, step: int) -> None:
        """Take no step back before one."""
        self.kept_to = max(self.kept_to, step)

    def give_up(self) -> None:
        """Take nothing back for what is asked."""
        self._missing = None

    @property
    def is_settled(self) -> bool:
        """Whether no answer is waited for."""
        return not self._missing

    def opens_at(self, planned: int) -> int:
        """Return the first step that may be planned anew, where ``planned`` is the first that is not planned."""
        if self._missing is None or self._missing:
            return planned
        return min(planned, max(self._step, self.kept_to))

    def renew(self, since: int) -> Edition:
        """Begin an edition whose plans may be others from a step on, and which ends every fence."""
        self._missing = None
        self.edition = Edition(life=self.edition.life, turn=self.turn, since=since)
        return self.edition

    @property
    def is_fenced(self) -> bool:
        """Whether constructors may withhold something."""
        return self.edition.turn < self.turn


@dataclass(slots=True)
class Giving:
    """What a data constructor may give to its ranks, of which edition of the plans, and what it has given."""

    edition: Edition = field(default_factory=Edition)
    """Of the plans that are built."""
    given_to: int = 0
    """First step that no rank was given."""
    _fence: tuple[tuple[int, int], int] | None = field(default=None, init=False)
    """Number of the edition that is waited for, and the step from which on nothing is given out until then."""

    def may_give(self, step: int) -> bool:
        """Tell whether a step is given to whoever asks for it."""
        return self._fence is None or step < self._fence[1]

    def gave(self, step: int) -> None:
        """Note that a rank was given a step."""
        self.given_to = max(self.given_to, step + 1)

    def confirm(self, step: int, number: tuple[int, int]) -> bool:
        """Note a step as given that a rank was lent under an edition; return whether it may have it, asked again too.

        Where not, whoever asks is given the step again once it may be: of an edition of now, or behind the fence.
        """
        stands = number == self.edition.number and self.may_give(step)
        if stands:
            self.gave(step)
        return stands

    def fence(self, number: tuple[int, int]) -> int:
        """Give out no step more until an edition of this number has come; return the first that no rank was given."""
        # Word of an earlier one may come late, also of a planner that is lost.
        if number > self.edition.number and (self._fence is None or number > self._fence[0]):
            self._fence = number, self.given_to
        return self.given_to

    def turn_to(self, edition: Edition) -> bool:
        """Give out what is planned under an edition; return whether it is a later one, which ends the fence."""
        # Never back: what comes late of an edition before is told again with the one that followed it.
        if edition.number <= self.edition.number:
            return False
        self.edition = edition
        if self._fence is not None and self._fence[0] <= edition.number:
            self._fence = None
        return True
