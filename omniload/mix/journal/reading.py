"""The content of a journal: its base and records, the state before any step, and the progress of its last writer."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from omniload.base.errors import StateError
from omniload.base.state import Json, JsonObject
from omniload.mix.journal.lines import JournalLine, base_of, last_base, since_of, sound_lines
from omniload.mix.journal.records import StepRecord, bad_in
from omniload.mix.journal.storage import JournalStorage, Since
from omniload.mix.state import COUNT_LIMIT, MixState

__all__ = [
    "Extent",
    "Head",
    "Tail",
    "head_before",
    "read_base",
    "read_digests",
    "read_extent",
    "read_journal",
    "read_tail",
    "read_worlds",
    "state_before",
    "states_in",
]


_BAD = b'"bad":'

Entering: TypeAlias = Callable[[MixState, int], MixState]


def _as_it_is(state: MixState, revision: int) -> MixState:
    """Return a state unchanged, for runs whose edits only change weights and add sources."""
    del revision
    return state


@dataclass(frozen=True, slots=True)
class Head:
    """The part of a journal that is kept."""

    size_bytes: int
    checksum: bytes
    """Checksum of its last line."""
    digest: Json
    """``MixState.digest`` of the state after its last line."""
    has_worlds: bool = False
    """Whether it contains worlds."""
    moved: tuple[JsonObject, ...] = ()
    """Worlds of its last steps that were noted after it, because a change of ranks may be reported some steps late."""
    lost: int = 0
    """Number of steps recorded after it."""


@dataclass(frozen=True, slots=True)
class Tail:
    """The end of a journal, from a base on."""

    since: Since
    lines: Sequence[JournalLine]
    """The line of the base, and all later lines."""

    @property
    def base(self) -> JsonObject:
        """The state at the beginning of this part."""
        return base_of(self.lines[0])[0]

    @property
    def first_step(self) -> int:
        """The step after the state of its base."""
        return base_of(self.lines[0])[1]

    @property
    def next_step(self) -> int:
        """The step after the last record."""
        return self.first_step + len(self._steps())

    @property
    def records(self) -> list[JsonObject]:
        """The records of steps.

        Raises:
            StateError: One of the lines is not a record.
            IntegrityError: A line is not an object.
        """
        return [_record_in(line) for line in self._steps()]

    @property
    def world(self) -> JsonObject | None:
        """The ranks that were noted last; ``None`` if they are those that the plane was opened for."""
        noted = [line.parsed() for line in self.lines[1:] if line.is_world]
        return noted[-1] if noted else None

    def texts_from(self, step: int) -> Iterator[tuple[int, bytes]]:
        """Yield every step from ``step`` on, with the text of its record."""
        for number, line in enumerate(self._steps(), start=self.first_step):
            if number >= step:
                yield number, line.text

    def bytes_from(self, step: int) -> bytes:
        """Return the lines from the record of a step on; empty if the step is not recorded."""
        due, found = self.first_step, list[bytes]()
        for line in self.lines[1:]:
            if due >= step and (found or not line.is_note):
                found.append(bytes(line))
            due += not line.is_note
        return b"".join(found)

    def _steps(self) -> list[JournalLine]:
        return [line for line in self.lines[1:] if not line.is_note]


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """The steps of a journal, and the sum of their bad records."""

    first_step: int
    """The step after the state of its first base."""
    next_step: int
    """The step after the last record."""
    skipped: Mapping[str, int]
    """Number of records that could not be decoded, by source; sources without any are left out."""


def read_journal(
    path: Path | JournalStorage, step: int | None = None
) -> tuple[JsonObject, list[JsonObject]]:
    """Return a base state of a journal and the records after it.

    Memory holds only the records after one base, even if the journal has a million steps.

    Args:
        path: The file, or the folder of a store.
        step: Last step to return, if it is recorded; the base is then the last one that leads to this step. Without
            it, all records after the first base are returned.

    Raises:
        StateError: There is no journal, it has another version, or it starts after ``step`` or ends before it.
        IntegrityError: A line up to that step is damaged, missing or misplaced.
    """
    lines = sound_lines(path)
    first = base = next(lines)
    records: list[JournalLine] = []
    begun = due = base_of(first)[1]
    for line in lines:
        if step is not None and begun <= step < due:
            break
        if not line.is_note:
            records.append(line)
            due += 1
        elif step is not None and not line.is_world:
            base = line
            records.clear()
    if step is not None and not begun <= step <= due:
        raise _outside(step, begun, due)
    return base_of(base)[0], [_record_in(line) for line in records]


def read_base(path: Path | JournalStorage) -> JsonObject:
    """Return the state at the beginning of a journal; what follows is not read.

    Raises:
        StateError: There is no journal, or it has another version.
        IntegrityError: Its first line is damaged.
    """
    return base_of(next(sound_lines(path)))[0]


def read_extent(path: Path | JournalStorage) -> Extent:
    """Read a whole journal, with one record in memory at a time.

    Raises:
        StateError: As for ``read_journal``.
        IntegrityError: As for ``read_journal``.
    """
    lines = sound_lines(path)
    first = base_of(next(lines))[1]
    count, skipped = 0, Counter[str]()
    for line in lines:
        if not line.is_note:
            count += 1
            # Searched in the bytes: almost no record has bad records, and parsing would take twenty times as long.
            if _BAD in line.text:
                skipped.update(bad_in(_record_in(line)))
    return Extent(first_step=first, next_step=first + count, skipped=skipped)


def read_digests(path: Path | JournalStorage) -> Iterator[tuple[int, str]]:
    """Yield every step of a journal, in order, with the digest of its plan.

    Raises:
        StateError: As for ``read_journal``.
        IntegrityError: As for ``read_journal``.
    """
    lines = sound_lines(path)
    first = base_of(next(lines))[1]
    records = (line for line in lines if not line.is_note)
    for step, line in enumerate(records, start=first):
        yield step, str(_record_in(line)["digest"])


def read_worlds(path: Path | JournalStorage) -> list[JsonObject]:
    """Return the ranks that are noted in a journal, in order; of several notes of one step, the last one applies.

    Raises:
        StateError: As for ``read_journal``.
        IntegrityError: As for ``read_journal``.
    """
    return [line.parsed() for line in sound_lines(path) if line.is_world]


def _record_in(line: JournalLine) -> JsonObject:
    """Return the record of a step; only the types of its values are checked here."""
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
        # Under the record's own revision, because it was drawn under the edits that were known then.
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
    """Apply records to ``base`` until ``step`` is next.

    Args:
        step: Step that follows the state.
        base: State at the beginning of the journal.
        records: Its records.
        weights_by_state: Returns the integer weights of the step after a state.
        entering: Returns a state as changed by edits when a step of another revision begins.

    Raises:
        StateError: The journal does not reach ``step``, or starts after it.
    """
    for state in _states_after(base, records, weights_by_state, entering):
        if state.step == step:
            return state
    raise _outside(step, base.step, base.step + len(records))


def _outside(step: int, begun: int, due: int) -> StateError:
    covers = f"steps {begun} to {due - 1}" if due > begun else "no step"
    return StateError(
        f"the journal covers {covers}, and the state before step {due}; step {step} is outside, choose one within"
    )


def read_tail(path: Path | JournalStorage, ahead: int) -> Tail:
    """Return the end of a journal, from a base that is at least ``ahead`` steps before the next step.

    The whole journal is returned if it begins later. Earlier lines are not read.

    Raises:
        StateError: There is no journal, or it has another version.
        IntegrityError: A line is damaged, missing or misplaced.
    """
    # The last base is usually early enough, and then no step is read twice.
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
    """Return the state at the beginning of a journal's end, which is ``base``, and the state after each of its steps.

    Raises:
        StateError: The journal belongs to another mix or other data, or is damaged.
    """
    records = (StepRecord.from_json(stored, names) for stored in tail.records)
    return list(_states_after(base, records, weights_by_state, entering))


def head_before(storage: JournalStorage, state: JsonObject) -> Head:
    """Check every line, and sum up the lines before ``state``; records are not parsed.

    Raises:
        StateError: The file does not lead up to ``state``.
        IntegrityError: A line is damaged, missing or misplaced.
    """
    since = since_of(storage)
    lines = sound_lines(storage, since)
    first = next(lines)
    base, reached = base_of(first)
    step = state["step"]
    assert isinstance(step, int), "the planner wrote it"
    if not _is_of(base.get("fingerprint"), state["fingerprint"]):
        raise StateError("it is of another mix or other data")
    if reached > step:
        raise StateError(f"it starts at step {reached}, the run goes on from step {step}")
    size, last, record, has_worlds = since.offset + len(bytes(first)), first, first, False
    moved: list[JsonObject] = []
    # Counted without parsing: opening a long journal costs the checksum of each line, and no memory.
    for line in lines:
        # Notes of a step, its base and its ranks, come before its record.
        if reached < step or (reached == step and line.is_note):
            size, last = size + len(bytes(line)), line
            has_worlds |= line.is_world
        elif line.is_world and line.noted_step < step:
            moved.append(line.parsed())
        if not line.is_note:  # later lines are checked, and cut off
            record = line if reached < step else record
            reached += 1
    if reached < step:
        raise StateError(
            f"it ends before step {reached}, the run goes on from step {step}: its last lines are missing"
        )
    after = record.parsed().get("after")
    return Head(size, last.checksum, after, has_worlds, tuple(moved), lost=reached - step)


def _is_of(begun: Json, now: Json) -> bool:
    """Return whether a journal of one fingerprint may continue with another, because edits may have added sources."""
    return isinstance(begun, dict) and isinstance(now, dict) and begun.items() <= now.items()
