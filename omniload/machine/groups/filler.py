"""Fills batches of groups, round by round, identically on every rank, from the reports of all ranks.

::

    BatchBegun ──▶ DrawPrompts ──▶ RoundReported ──▶ too few kept: DrawPrompts, or GiveUp at the limit
                                                 ──▶ enough:       HandOut: this batch, and who trains on what

Groups that are kept wait in the order of their rounds. Groups beyond a full batch are carried to the next one, or
dropped. No rank decides for the others: each runs this machine on the same events and gets the same commands.

Shape suffixes:
    N  prompts of a round over all ranks        G  answers of each        B  groups of a batch
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, assert_never

import numpy as np
from numpy.typing import NDArray

from omniload.base.errors import StateError
from omniload.mix.journal.groups import Answers, BatchDecision, RoundDecision, Surplus
from omniload.plan.groups.dealing import EVERYBODY, dealt, in_order
from omniload.plan.groups.verdicts import ALL_RIGHT, ALL_WRONG, KEPT, verdicts_of

__all__ = [
    "BatchBegun",
    "Command",
    "DataEnded",
    "DrawPrompts",
    "Event",
    "Filler",
    "Filling",
    "GiveUp",
    "GroupCounts",
    "HandOut",
    "NoMore",
    "PromptKey",
    "RoundReplayed",
    "RoundReported",
    "Waiting",
]

PromptKey: TypeAlias = tuple[int, int, int]
"""Source, position and sub of a prompt, unique in a run."""


@dataclass(slots=True)
class GroupCounts:
    """Number of groups of one source. Each drawn group is counted in exactly one of the other groups' counts."""

    drawn: int = 0
    kept: int = 0
    """Handed out in a batch."""
    all_right: int = 0
    all_wrong: int = 0
    waiting: int = 0
    """Waiting for the next batch, or for the rest of this one."""
    dropped: int = 0
    """Left over from a full batch, and not carried to the next."""
    answers: int = 0
    """Answers in the drawn groups; a replay has none."""
    right_answers: int = 0

    def is_whole(self) -> bool:
        """Return whether every drawn group is accounted for exactly once."""
        judged = self.all_right + self.all_wrong
        return self.drawn == self.kept + judged + self.waiting + self.dropped


@dataclass(frozen=True, slots=True)
class Waiting:
    """A group that was kept and not handed out yet."""

    key: PromptKey
    owner: int
    """The rank that holds it, or ``EVERYBODY``."""
    digest: str
    """Digest of its prompt's tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filling:
    """How batches are filled."""

    groups: int
    """Groups of a batch, over all ranks."""
    max_rounds: int
    """Most steps that are drawn for one batch."""
    surplus: Surplus = "carry"
    right_above: float = 0.0
    tolerance: float = 0.0
    num_ranks: int = 1


@dataclass(frozen=True, slots=True)
class BatchBegun:
    """A batch is wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    step: int
    keys_N3: NDArray[np.int64]
    owners_N: NDArray[np.int64]
    digests: Sequence[str]
    """Digest of the tokens of each prompt, ``[N]``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReported(_Round):
    """All ranks have rolled out their prompts of a step."""

    rewards_NG: NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReplayed(_Round):
    """All ranks have drawn their prompts of a step that was judged in an earlier run."""

    judged: RoundDecision


@dataclass(frozen=True, slots=True)
class DataEnded:
    """There are no more prompts."""


Event: TypeAlias = BatchBegun | RoundReported | RoundReplayed | DataEnded


@dataclass(frozen=True, slots=True)
class DrawPrompts:
    """Draw the next step, on all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOut:
    """Hand a batch out."""

    groups: tuple[Waiting, ...]
    """Groups of the batch, ``[B]``."""
    ranks: tuple[int, ...]
    """Rank that trains on each group, ``[B]``."""
    carried: tuple[Waiting, ...]
    """Groups that wait for the next batch; every rank has to hold them."""
    decision: BatchDecision


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """The limit of rounds was reached with too few groups."""

    rounds: int
    drawn: int
    """Prompts of those rounds."""
    kept: int
    """Groups that wait."""
    counts: Mapping[int, GroupCounts]


@dataclass(frozen=True, slots=True, kw_only=True)
class NoMore:
    """The data has ended within a batch."""

    carried: tuple[Waiting, ...]


Command: TypeAlias = DrawPrompts | HandOut | GiveUp | NoMore


@dataclass(slots=True, kw_only=True)
class Filler:
    """Decides which groups are a batch."""

    filling: Filling
    batch: int = 0
    """Number of the batch that is filled next."""
    waiting: list[Waiting] = field(default_factory=list)
    counts: dict[int, GroupCounts] = field(default_factory=dict)
    """Counts by number of the source."""
    rounds: list[RoundDecision] = field(default_factory=list)
    """Rounds of the current batch so far, including one that the end of the data left half full."""
    answers: dict[int, Answers] = field(default_factory=dict)
    """Answers of these rounds, by number of the source."""
    _tried: int = 0
    """Rounds since the batch was begun, or since ``GiveUp``; a replay is not limited."""

    def handle(self, event: Event) -> Command:
        """Apply one event and return the command to carry out.

        Raises:
            StateError: Two ranks report the same prompt, or a replay draws other prompts than were judged.
        """
        match event:
            case BatchBegun():
                self._tried = 0
                return self._next()
            case RoundReported():
                # Checks come before any counting, because the call may be repeated with the same prompts.
                order = self._order_of(event)
                verdicts_N = verdicts_of(
                    event.rewards_NG,
                    right_above=self.filling.right_above,
                    tolerance=self.filling.tolerance,
                )
                self._count_answers(event)
                return self._judged(event, order, verdicts_N[order])
            case RoundReplayed():
                order = self._order_of(event)
                _require_same(event, event.keys_N3[order])
                return self._judged(event, order, event.judged.verdicts_N)
            case DataEnded():
                return self._ended()
            case _:
                assert_never(event)

    def _order_of(self, event: _Round) -> NDArray[np.int64]:
        """Return the order of the groups of a round; refuse a prompt that two ranks report."""
        # Compare with the waiting groups too: a prompt that returns in a later round was drawn twice.
        known = {group.key: group.owner for group in self.waiting}
        for key, owner in zip(map(_key_of, event.keys_N3), event.owners_N.tolist(), strict=True):
            if key in known:
                raise StateError(
                    f"rank {owner} reports the prompt at position {key[1]} of source {key[0]}, but rank {known[key]} "
                    "has that prompt; ranks along tp, pp and ep share their prompts: exchange among ranks along dp "
                    "alone (process_group=), and give every rank the state of the same checkpoint"
                )
            known[key] = owner
        return in_order(event.keys_N3)

    def _judged(
        self, event: _Round, order: NDArray[np.int64], verdicts_N: NDArray[np.int8]
    ) -> Command:
        keys_N3 = event.keys_N3[order]
        self.rounds.append(RoundDecision(step=event.step, keys_N3=keys_N3, verdicts_N=verdicts_N))
        for place, key, verdict in zip(
            order.tolist(), map(_key_of, keys_N3), verdicts_N.tolist(), strict=True
        ):
            counts = self.counts.setdefault(key[0], GroupCounts())
            counts.drawn += 1
            counts.all_right += verdict == ALL_RIGHT
            counts.all_wrong += verdict == ALL_WRONG
            if verdict == KEPT:
                counts.waiting += 1
                owner = int(event.owners_N[place])
                self.waiting.append(Waiting(key, owner, event.digests[place]))
        # A replay rolls nothing out, and the limit is on rollouts.
        self._tried += isinstance(event, RoundReported)
        return self._next()

    def _count_answers(self, event: RoundReported) -> None:
        right_N = (event.rewards_NG > self.filling.right_above).sum(axis=1)
        more = event.rewards_NG.shape[1]
        for source, right in zip(event.keys_N3[:, 0].tolist(), right_N.tolist(), strict=True):
            counts = self.counts.setdefault(source, GroupCounts())
            counts.answers += more
            counts.right_answers += right
            before = self.answers.get(source, Answers(0, 0))
            self.answers[source] = Answers(before.answers + more, before.right + right)

    def _next(self) -> Command:
        if len(self.waiting) >= self.filling.groups:
            return self._handed_out()
        if self._tried < self.filling.max_rounds:
            return DrawPrompts()
        # The groups and rounds stay, so that a repeated call continues with them.
        tried, self._tried = self._tried, 0
        drawn = sum(len(each.verdicts_N) for each in self.rounds[len(self.rounds) - tried :])
        return GiveUp(rounds=tried, drawn=drawn, kept=len(self.waiting), counts=self.counts)

    def _handed_out(self) -> HandOut:
        size, filling = self.filling.groups, self.filling
        groups, beyond = self.waiting[:size], self.waiting[size:]
        for group in groups:
            self.counts[group.key[0]].waiting -= 1
            self.counts[group.key[0]].kept += 1
        # A rank gets its own groups first: it has their answers already, so few answers are sent.
        ranks_B = dealt(np.array([group.owner for group in groups]), filling.num_ranks)
        decision = BatchDecision(
            batch=self.batch,
            groups=size,
            surplus=filling.surplus,
            rounds=tuple(self.rounds),
            digest=_digest_of(groups),
            answers=dict(sorted(self.answers.items())),
        )
        self.batch += 1
        self.rounds, self.answers = [], {}
        return HandOut(
            groups=tuple(groups),
            ranks=tuple(ranks_B.tolist()),
            carried=self._surplus(beyond),
            decision=decision,
        )

    def _ended(self) -> NoMore:
        """Leave the batch half full; a resume with more data fills it."""
        return NoMore(carried=self._carried(self.waiting))

    def _surplus(self, beyond: list[Waiting]) -> tuple[Waiting, ...]:
        """Carry surplus groups on, or drop them; return the waiting groups."""
        if self.filling.surplus == "carry":
            return self._carried(beyond)
        for group in beyond:
            self.counts[group.key[0]].waiting -= 1
            self.counts[group.key[0]].dropped += 1
        return self._carried([])

    def _carried(self, groups: list[Waiting]) -> tuple[Waiting, ...]:
        """Make every rank an owner of the waiting groups; return them with their old owners, who have the answers."""
        # All ranks hold them, because other ranks may be there at the next batch.
        self.waiting = [Waiting(group.key, EVERYBODY, group.digest) for group in groups]
        return tuple(groups)


def _key_of(key_3: NDArray[np.int64]) -> PromptKey:
    source, position, sub = key_3.tolist()
    return source, position, sub


def _require_same(event: RoundReplayed, keys_N3: NDArray[np.int64]) -> None:
    judged = event.judged
    if event.step != judged.step or not np.array_equal(keys_N3, judged.keys_N3):
        raise StateError(
            f"step {event.step} has {len(keys_N3)} prompts, but other prompts were judged, {len(judged.keys_N3)} of "
            f"step {judged.step}; open the mix, the settings and the state that the run had there"
        )


def _digest_of(groups: Sequence[Waiting]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for group in groups:
        # Includes the prompts' tokens: a key only says where a prompt stood, not that the file is unchanged.
        digest.update(f"{group.key}{group.digest}".encode())
    return digest.hexdigest()
