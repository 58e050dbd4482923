"""What a journal says: its base and records, the state before any step, and what its last writer had come to."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from omniload.base.errors import StateError
from omniload.base.state import JsonObject
from omniload.mix.journal.lines import JournalLine, Since, base_of, last_base, sound_lines
from omniload.mix.journal.records import StepRecord
from omniload.mix.journal.storage import JournalStorage
from omniload.mix.state import COUNT_LIMIT, MixState

__all__ = ["Tail", "read_journal", "read_tail", "read_worlds", "state_before", "states_in"]


Entering: TypeAlias = Callable[[MixState, int], MixState]


def _as_it_is(state: MixState, revision: int) -> MixState:
    """Leave a state to its record: no edit of the run does more than change weights and add sources."""
    del revision
    return state


@dataclass(frozen=True, slots=True)
class Tail:
    """The end of a journal, from a base on."""

    since: Since
    lines: Sequence[JournalLine]
    """The base, and all that follows."""

    @property
    def base(self) -> JsonObject:
        """The state that the end begins with."""
        return base_of(self.lines[0])[0]

    @property
    def first_step(self) -> int:
        """The step that its base stands before."""
        return base_of(self.lines[0])[1]

    @property
    def next_step(self) -> int:
        """The step behind the last record."""
        return self.first_step + len(self._steps())

    @property
    def records(self) -> list[JsonObject]:
        """The records of steps.

        Raises:
            StateError: One of them is none.
            IntegrityError: A line is no object.
        """
        return [_record_in(line) for line in self._steps()]

    @property
    def world(self) -> JsonObject | None:
        """The ranks that were noted last; ``None`` where there are those that the plane was opened for."""
        noted = [line.parsed() for line in self.lines[1:] if line.is_world]
        return noted[-1] if noted else None

    def texts_from(self, step: int) -> Iterator[tuple[int, bytes]]:
        """Yield every step from ``step`` on, with the text of its record."""
        for number, line in enumerate(self._steps(), start=self.first_step):
            if number >= step:
                yield number, line.text

    def _steps(self) -> list[JournalLine]:
        return [line for line in self.lines[1:] if not line.is_note]


def read_journal(path: Path | JournalStorage) -> tuple[JsonObject, list[JsonObject]]:
    """Return the base state and the records of a journal.

    Raises:
        StateError: There is no journal, or it has another version.
        IntegrityError: A line is damaged, or missing, or where it does not belong.
    """
    lines = sound_lines(path)
    base, _ = base_of(next(lines))
    return base, [_record_in(line) for line in lines if not line.is_note]


def read_worlds(path: Path | JournalStorage) -> list[JsonObject]:
    """Return the ranks that are noted in a journal, in order; of several that begin at a step the last one holds.

    Raises:
        StateError: As for ``read_journal``.
        IntegrityError: As for ``read_journal``.
    """
    return [line.parsed() for line in sound_lines(path) if line.is_world]


def _record_in(line: JournalLine) -> JsonObject:
    """Return the record of a step; of its values no more than the types is checked here."""
    match line.parsed():
        case {
            "step": int(),
            "revision": int(),
            "digest": str(),
            "after": str(),
            "drawn": dict(),
            "carried": list(),
        } as record:
            return record
        case _:
            raise StateError(
                f"the journal has {line.text[:80]!r} where the record of a step was due; resume from a checkpoint"
            )


def _states_after(
    base: MixState,
    records: Iterable[StepRecord],
    weights_by_state: Callable[[MixState], Sequence[int]],
    entering: Entering,
) -> Iterator[MixState]:
    """Yield ``base``, and the state after each record."""
    state = base
    yield state
    for record in records:
        # Of the record's own revision: it was drawn under the edits that were known then.
        begun = entering(state, record.revision)
        state = record.applied_to(begun, weights_by_state(begun))
        yield state


def state_before(
    step: int,
    base: MixState,
    records: Sequence[StepRecord],
    weights_by_state: Callable[[MixState], Sequence[int]],
    entering: Entering = _as_it_is,
) -> MixState:
    """Fold records into ``base`` until ``step`` is next.

    Args:
        step: Step that the state stands before.
        base: State that the journal begins with.
        records: Its records.
        weights_by_state: Integer weights of the step that a state stands before.
        entering: What edits make of a state as a step of another revision begins.

    Raises:
        StateError: The journal does not reach ``step``, or starts after it.
    """
    for state in _states_after(base, records, weights_by_state, entering):
        if state.step == step:
            return state
    raise StateError(
        f"the journal covers steps {base.step} to {base.step + len(records)}, step {step} is outside; "
        "choose a step within"
    )


def read_tail(path: Path | JournalStorage, ahead: int) -> Tail:
    """Return the end of a journal, with the base of a step that is ``ahead`` or more before the next one.

    Where the journal begins later, it is all of it. What lies before is not read.

    Raises:
        StateError: There is no journal, or it has another version.
        IntegrityError: A line is damaged, or missing, or where it does not belong.
    """
    # The last base is mostly far enough back; where it is, no step is gone through twice.
    tail = _tail_from(path, at_most=COUNT_LIMIT)
    wanted = tail.next_step - ahead
    return (
        _tail_from(path, at_most=wanted) if tail.since.offset and tail.first_step > wanted else tail
    )


def _tail_from(path: Path | JournalStorage, *, at_most: int) -> Tail:
    since = last_base(path, at_most=at_most)
    return Tail(since, list(sound_lines(path, since)))


def states_in(
    tail: Tail,
    base: MixState,
    names: Sequence[str],
    weights_by_state: Callable[[MixState], Sequence[int]],
    entering: Entering = _as_it_is,
) -> list[MixState]:
    """Return the state that a journal's end begins with, which is ``base``, and that after each of its steps.

    Raises:
        StateError: The journal is of another mix or other data, or damaged.
    """
    records = (StepRecord.from_json(stored, names) for stored in tail.records)
    return list(_states_after(base, records, weights_by_state, entering))
