"""How far a run has come, from its journal alone: no source is opened.

Shape suffixes:
    S  sources
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from omniload.base.errors import StateError
from omniload.base.state import Json, JsonObject, shown
from omniload.base.units import decimal_of
from omniload.mix.config import MixConfig
from omniload.mix.deficit import WEIGHT_ONE, integer_weights
from omniload.mix.edits.edits_file import edits_in
from omniload.mix.edits.history import History
from omniload.mix.journal.reading import Tail, state_before, states_in
from omniload.mix.journal.records import StepRecord
from omniload.mix.schedule import (
    GOES_ON,
    amounts_S,
    draw_weights_at,
    drawn_in,
    gone_on_without_S,
    weights_at,
)
from omniload.mix.state import MixState

__all__ = [
    "RunProgress",
    "SourceProgress",
    "fingerprint_in",
    "fold",
    "progress_of",
    "records_in",
    "state_json_at",
    "states_of",
    "weights_by_state",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceProgress:
    """How much of a source was drawn."""

    name: str
    drawn: int
    """Tokens or samples, as the mix counts; of amounts of epochs, records."""
    due: float
    """What its weights ask for, of what was drawn in all; once it has ended, what was drawn of it."""
    share: float
    """Its share of what was drawn; of amounts, how much of its own is drawn."""
    target: float
    """The share that its weights ask for, of what was drawn; of nothing, those of the first step. Of amounts, how much
    of all is drawn."""
    position: int
    """Raw position of its first record of which nothing is drawn."""
    epochs: float
    """Times it was gone through: a record that is begun counts."""
    has_ended: bool = False
    """Whether the run goes on without it: it was gone through once, or its amount is drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """How far a run has come."""

    first_step: int
    """Step that its journal starts at."""
    next_step: int
    """Step that comes next: planned ones count, whether or not the trainer was done with them."""
    revision: int
    """Edits that its last step was planned under."""
    level: str
    """What ``drawn`` counts: ``token``, ``sample``, or ``amount``: of each source what its amount counts."""
    carried_tokens: int
    """Tokens drawn that wait for a row."""
    sources: tuple[SourceProgress, ...]


def weights_by_state(
    history: History, fingerprint: Mapping[str, str] | None = None
) -> Callable[[MixState], tuple[int, ...]]:
    """Return, as a function, the integer weights of the step that a state begins; equal shares are scaled once.

    They are those of the state's own revision: an edit of a run at rest, such as a skip, may begin at a step that the
    journal has from before it.

    Args:
        history: The mix and its edits.
        fingerprint: What was found of the sources of its file; needed where a run goes on without a source that has
            ended.
    """
    known: dict[tuple[float, ...], tuple[int, ...]] = {}
    found = history.fingerprint_at(len(history.edits), fingerprint or {})

    def weights(state: MixState) -> tuple[int, ...]:
        mix = history.of_revision(state.mix_revision)
        if mix.mix.stop in GOES_ON:
            records_S = records_in(found, mix.names) if mix.mix.amounts is not None else None
            return draw_weights_at(mix, state, records_S)
        shares = weights_at(mix.mix.stages, mix.names, state.step)
        if shares not in known:
            known[shares] = integer_weights(shares)
        return known[shares]

    return weights


def fold(
    history: History,
    base: Mapping[str, Json],
    records: Sequence[Mapping[str, Json]],
    fingerprint: Mapping[str, str],
    step: int | None = None,
) -> MixState:
    """Return the state before ``step``, or after all records.

    Args:
        history: The mix that the journal belongs to, and its edits.
        base: The journal's base state.
        records: Its records.
        fingerprint: Fingerprint of the file's mix and its data.
        step: Step that the state stands before.

    Raises:
        StateError: The journal is of another mix, does not reach ``step``, or starts after it.
    """
    state = _state_in(base, history, fingerprint)
    names = history.latest.names
    parsed = [StepRecord.from_json(record, names) for record in records]
    until = state.step + len(parsed) if step is None else step
    weights = weights_by_state(history, fingerprint)
    return state_before(until, state, parsed, weights, history.entering)


def states_of(history: History, tail: Tail) -> list[MixState]:
    """Return the state that a journal's end begins with, and that after each of its steps.

    Raises:
        StateError: The journal is of another mix or other data, or damaged.
    """
    fingerprint = fingerprint_in(tail.base)
    base = _state_in(tail.base, history, fingerprint)
    weights = weights_by_state(history, fingerprint)
    return states_in(tail, base, history.latest.names, weights, history.entering)


def _state_in(
    base: Mapping[str, Json], history: History, fingerprint: Mapping[str, str]
) -> MixState:
    """Return the state of a base: of the sources of its own revision, which records behind it may go beyond."""
    begun = len(edits_in(base))
    held = history.fingerprint_at(begun, fingerprint)
    return MixState.from_json(base, history.of_revision(begun).names, held)


def state_json_at(
    history: History,
    base: Mapping[str, Json],
    records: Sequence[Mapping[str, Json]],
    step: int,
) -> JsonObject:
    """Return the state before ``step`` of a journal, as the planner gave it.

    Raises:
        StateError: As for ``fold``.
    """
    fingerprint = fingerprint_in(base)
    state = fold(history, base, records, fingerprint, step)
    return state.to_json(**history.state_fields_at(state.mix_revision, fingerprint))


def progress_of(
    history: History, base: Mapping[str, Json], records: Sequence[Mapping[str, Json]]
) -> RunProgress:
    """Sum up a journal; raises ``StateError`` where it is damaged or of another mix."""
    known, first = fingerprint_in(base), base.get("step")
    state = fold(history, base, records, known)
    mix = history.of_revision(state.mix_revision)
    known = history.fingerprint_at(state.mix_revision, known)
    assert isinstance(first, int), "it was folded"
    total = max(sum(state.drawn_S), 1)
    records_S = None if mix.mix.amounts is None else records_in(known, mix.names)
    ways_S = None if records_S is None else _ways_S(mix, state, records_S)
    ended_S = gone_on_without_S(mix, state, records_S)
    first_S = weights_by_state(history, known)(state) if ways_S is None else ()
    sources = []
    for s, name in enumerate(mix.names):
        # The cursor is at the end of its last sample until the next one is looked for, and so it stays as a run ends.
        drawn, position = state.drawn_S[s], drawn_in("epochs", state, s)
        # A credit is what the weights ask for less what was drawn.
        due = drawn + state.credits_S[s] / WEIGHT_ONE
        whole = float(total)
        if ways_S is not None:
            # Each counts in its own unit, and of each the same part of its way is to be gone.
            since, whole = ways_S[s]
            due = since + (whole - since) * _part_gone(state, ways_S)
        sources.append(
            SourceProgress(
                name=name,
                drawn=drawn,
                # Nobody owes it what its weights had asked for by its end, nor has it more than it should.
                due=drawn if ended_S[s] else due,
                share=drawn / max(whole, 1),
                target=due / max(whole, 1)
                if any(state.drawn_S) or ways_S is not None
                else first_S[s] / WEIGHT_ONE,
                position=position,
                epochs=position / _records_of(known, name),
                has_ended=ended_S[s],
            )
        )
    return RunProgress(
        first_step=first,
        next_step=state.step,
        revision=state.mix_revision,
        level=mix.mix.level if mix.mix.amounts is None else "amount",
        carried_tokens=int(state.carried.lengths_P.sum()),
        sources=tuple(sources),
    )


def _ways_S(mix: MixConfig, state: MixState, records_S: Sequence[int]) -> list[tuple[int, float]]:
    """Return what was drawn of each source when amounts changed last, and what is to be drawn of it in all."""
    wanted_S = amounts_S(mix, records_S)
    since_S = state.since_S or (0,) * len(wanted_S)
    retired_S = [name not in (mix.mix.amounts or {}) for name in mix.names]
    ends = zip(wanted_S, state.drawn_S, retired_S, strict=True)
    # A source that was retired has come to its end with what was drawn of it.
    whole_S = [float(drawn if retired else wanted) for wanted, drawn, retired in ends]
    return list(zip(since_S, whole_S, strict=True))


def _part_gone(state: MixState, ways_S: Sequence[tuple[int, float]]) -> float:
    gone = sum(state.drawn_S) - sum(since for since, _ in ways_S)
    return gone / max(sum(whole - since for since, whole in ways_S), 1)


def fingerprint_in(base: Mapping[str, Json]) -> dict[str, str]:
    """Return the fingerprint that a journal was written under; raises ``StateError`` where there is none."""
    fingerprint = base.get("fingerprint")
    if not isinstance(fingerprint, dict):
        raise StateError(
            f"the journal's base has the fingerprint {shown(fingerprint)}, which is none; resume from a checkpoint"
        )
    return {part: str(digest) for part, digest in fingerprint.items()}


def records_in(fingerprint: Mapping[str, str], names: Sequence[str]) -> list[int]:
    """Return the records in an epoch of each source; raises ``StateError`` where the fingerprint does not say them."""
    return [_records_of(fingerprint, name) for name in names]


def _records_of(fingerprint: Mapping[str, str], name: str) -> int:
    """Return the records in an epoch of a source, as its fingerprint says."""
    found = fingerprint.get(f"sources.{name}.records", "")
    if not (records := decimal_of(found)):
        raise StateError(
            f"the fingerprint of source {name!r} gives {found!r} for its number of records; "
            "read the journal with the release that wrote it"
        )
    return records
