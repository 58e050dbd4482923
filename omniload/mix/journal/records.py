"""The record of a step: what the step changed, and how the record is applied to the state before it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Self

from omniload.base.errors import StateError
from omniload.base.state import Json, JsonObject, whole_number
from omniload.mix.pieces import PieceTable
from omniload.mix.state import COUNT_LIMIT, Cursor, MixState, cursor_of

__all__ = ["StepRecord", "bad_in"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """The changes of one step."""

    step: int
    """The step."""
    revision: int
    """Revision of the mix under which it was drawn."""
    digest: str
    """``StepPlan.membership_digest`` of its plan."""
    after: str
    """``MixState.digest`` of the state after it."""
    drawn: Mapping[int, tuple[Cursor, int]]
    """For each source drawn from: its cursor afterwards, and the amount drawn, in the unit of the weights."""
    carried: PieceTable
    """All pieces carried to the next step."""
    bad: Mapping[int, int] = field(default_factory=dict)
    """Number of records that could not be decoded, between the cursors of each source before and after the step;
    sources without any are left out."""
    bad_after: Mapping[int, int] = field(default_factory=dict)
    """``MixState.bad_S`` after the step, for the sources where it changed."""

    @classmethod
    def between(
        cls, before: MixState, after: MixState, digest: str, bad: Mapping[int, int] | None = None
    ) -> Self:
        """Return the record that leads from one state to the next."""
        return cls(
            step=before.step,
            revision=after.mix_revision,
            digest=digest,
            after=after.digest(),
            drawn={
                s: (after.cursors_S[s], after.drawn_S[s] - before.drawn_S[s])
                for s in range(len(after.cursors_S))
                if after.cursors_S[s] != before.cursors_S[s]
            },
            carried=after.carried,
            bad=bad or {},
            bad_after={
                s: count
                for s, (count, known) in enumerate(
                    zip_longest(after.bad_S, before.bad_S, fillvalue=0)
                )
                if count != known
            },
        )

    def applied_to(self, state: MixState, weights_S: Sequence[int]) -> MixState:
        """Return the state after this step; ``weights_S`` are the integer weights of the step.

        Raises:
            StateError: The record is not that of the next step, names a source that the mix of its step does not have,
                or leads to another state than when it was written.
        """
        if self.step != state.step:
            raise StateError(
                f"the journal has step {self.step} where step {state.step} was due; resume from a checkpoint"
            )
        state = state.widened(len(weights_S))  # sources that an edit added at this step
        changes_S = [(cursor, 0) for cursor in state.cursors_S]
        # The names are those of all edits, so a record may name a source that only a later edit adds.
        last = max((*self.drawn, *self.bad_after, int(self.carried.sources_P.max(initial=0))))
        if last >= len(changes_S):
            raise StateError(
                f"the record of step {self.step} is of source {last}, and the mix has {len(changes_S)} by then; "
                "resume from a checkpoint"
            )
        for s, change in self.drawn.items():
            changes_S[s] = change
        after = (
            replace(state, mix_revision=self.revision)
            .after(
                cursors_S=[cursor for cursor, _ in changes_S],
                served_S=[served for _, served in changes_S],
                weights_S=weights_S,
                carried=self.carried,
            )
            .with_bad(self.bad_after)
        )
        try:
            # A forged line may have a valid checksum, and its amounts may sum to more than 64 bits can hold.
            found = after.digest()
        except OverflowError as error:
            raise StateError(
                f"after step {self.step} more than {COUNT_LIMIT} is drawn of a source; resume from a checkpoint"
            ) from error
        if found != self.after:
            raise StateError(
                f"the state after step {self.step} has digest {found}, its journal says {self.after}: "
                "another release, another mix or another state; resume from a checkpoint"
            )
        return after

    def to_json(self, names: Sequence[str]) -> JsonObject:
        """Return the record as plain JSON, keyed by source name."""
        return {
            "step": self.step,
            "revision": self.revision,
            "digest": self.digest,
            "after": self.after,
            "drawn": {names[s]: [*cursor, served] for s, (cursor, served) in self.drawn.items()},
            "carried": self.carried.to_json(names),
            # Without bad records, the line is the same as in releases that did not count them.
            **({"bad": {names[s]: count for s, count in self.bad.items()}} if self.bad else {}),
            **(
                {"bad_after": {names[s]: count for s, count in self.bad_after.items()}}
                if self.bad_after
                else {}
            ),
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Json], names: Sequence[str]) -> Self:
        """Read the output of ``to_json``.

        Raises:
            StateError: The record names a source that is not in ``names``, or is damaged.
        """
        number_of = {name: s for s, name in enumerate(names)}
        try:
            drawn: Mapping[str, list[Json]] = record["drawn"]  # type: ignore[assignment]
            return cls(
                step=whole_number(record["step"], below=COUNT_LIMIT),
                revision=whole_number(record["revision"], below=COUNT_LIMIT),
                digest=str(record["digest"]),
                after=str(record["after"]),
                drawn={
                    number_of[name]: (cursor_of(cursor), whole_number(served, below=COUNT_LIMIT))
                    for name, (*cursor, served) in drawn.items()
                },
                carried=PieceTable.from_json(record["carried"], names),
                bad={number_of[name]: count for name, count in bad_in(record).items()},
                bad_after={
                    number_of[name]: count for name, count in bad_in(record, "bad_after").items()
                },
            )
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise StateError(
                f"a journal record is damaged or of another mix ({error!r})"
            ) from error


def bad_in(record: Mapping[str, Json], key: str = "bad") -> dict[str, int]:
    """Return the number of bad records that a step passed, by source; sources without any are left out.

    With the key ``bad_after``, return the field of this name of ``StepRecord``.

    Raises:
        AttributeError: The value is not in the expected form; likewise ``TypeError`` and ``ValueError``.
    """
    bad: Mapping[str, Json] = record.get(key, {})  # type: ignore[assignment]
    return {name: whole_number(count, below=COUNT_LIMIT) for name, count in bad.items()}
