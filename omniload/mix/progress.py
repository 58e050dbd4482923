"""The progress of a run, computed from its journal alone without opening any source.

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
    """The amount that was drawn of a source."""

    name: str
    drawn: int
    """Tokens or samples, as the mix counts; records if the mix has amounts in epochs."""
    due: float
    """The part of all drawn tokens or samples that its weights ask for; the amount drawn of it, once it has ended."""
    share: float
    """Its share of everything drawn; in a mix with amounts, the part of its own amount that is drawn."""
    target: float
    """The share of everything drawn that its weights ask for; before the first draw, the share at the first step.
    In a mix with amounts, the part of all amounts that is drawn."""
    position: int
    """Raw position of its first record from which nothing is drawn."""
    epochs: float
    """Number of passes over it; a record that is begun counts."""
    has_ended: bool = False
    """Whether the run continues without it, because one pass is over or its amount is drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """The progress of a run."""

    first_step: int
    """First step in its journal."""
    next_step: int
    """Next step to plan. Planned steps count, whether or not the trainer finished them."""
    revision: int
    """Number of edits under which its last step was planned."""
    level: str
    """Unit of ``drawn``: ``token``, ``sample``, or ``amount``, where each source is counted in the unit of its
    amount."""
    carried_tokens: int
    """Drawn tokens that wait for a row."""
    sources: tuple[SourceProgress, ...]


def weights_by_state(
    history: History, fingerprint: Mapping[str, str] | None = None
) -> Callable[[MixState], tuple[int, ...]]:
    """Return a function from a state to the integer weights of the step that it begins; equal shares are scaled once.

    The weights are those of the state's own revision, because an edit of a run at rest, such as a skip, may begin at a
    step that the journal already contains.

    Args:
        history: The mix and its edits.
        fingerprint: Facts found in the sources of its file; needed where a run continues without a source that has
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
    """Return the state before ``step``, or after all records if no step is given.

    Args:
        history: The mix that the journal belongs to, and its edits.
        base: The base state of the journal.
        records: The records of the journal.
        fingerprint: Fingerprint of the mix in the file and of its data.
        step: Step that follows the state.

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
    """Return the state at which the end of a journal begins, and the state after each of its steps.

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
    """Return the state of a base, with the sources of its own revision; later records may belong to later revisions."""
    begun = len(edits_in(base))
    held = history.fingerprint_at(begun, fingerprint)
    return MixState.from_json(base, history.of_revision(begun).names, held)


def state_json_at(
    history: History,
    base: Mapping[str, Json],
    records: Sequence[Mapping[str, Json]],
    step: int,
) -> JsonObject:
    """Return the state before ``step`` of a journal, as the planner returned it.

    Raises:
        StateError: As for ``fold``.
    """
    fingerprint = fingerprint_in(base)
    state = fold(history, base, records, fingerprint, step)
    return state.to_json(**history.state_fields_at(state.mix_revision, fingerprint))


def progress_of(
    history: History, base: Mapping[str, Json], records: Sequence[Mapping[str, Json]]
) -> RunProgress:
    """Summarize a journal; raises ``StateError`` if it is damaged or belongs to another mix."""
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
        # The cursor stays at the end of the last sample until the next sample is looked for, also when a run ends.
        drawn, position = state.drawn_S[s], drawn_in("epochs", state, s)
        # A credit is the amount that the weights ask for, minus the amount drawn.
        due = drawn + state.credits_S[s] / WEIGHT_ONE
        whole = float(total)
        if ways_S is not None:
            # Each source counts in its own unit, and the same fraction of each amount is due.
            since, whole = ways_S[s]
            due = since + (whole - since) * _part_gone(state, ways_S)
        sources.append(
            SourceProgress(
                name=name,
                drawn=drawn,
                # A source that has ended is owed nothing more, and has not drawn too much.
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
    """Return what was drawn of each source at the last change of amounts, and what the run draws of it in all."""
    wanted_S = amounts_S(mix, records_S)
    since_S = state.since_S or (0,) * len(wanted_S)
    retired_S = [name not in (mix.mix.amounts or {}) for name in mix.names]
    ends = zip(wanted_S, state.drawn_S, retired_S, strict=True)
    # A retired source has ended, so its whole amount is what was drawn of it.
    whole_S = [float(drawn if retired else wanted) for wanted, drawn, retired in ends]
    return list(zip(since_S, whole_S, strict=True))


def _part_gone(state: MixState, ways_S: Sequence[tuple[int, float]]) -> float:
    gone = sum(state.drawn_S) - sum(since for since, _ in ways_S)
    return gone / max(sum(whole - since for since, whole in ways_S), 1)


def fingerprint_in(base: Mapping[str, Json]) -> dict[str, str]:
    """Return the fingerprint that a journal was written under; raises ``StateError`` if the journal has none."""
    fingerprint = base.get("fingerprint")
    if not isinstance(fingerprint, dict):
        raise StateError(
            f"the journal's base has the fingerprint {shown(fingerprint)}, which is none; resume from a checkpoint"
        )
    return {part: str(digest) for part, digest in fingerprint.items()}


def records_in(fingerprint: Mapping[str, str], names: Sequence[str]) -> list[int]:
    """Return the records in an epoch of each source; raises ``StateError`` if the fingerprint lacks a number."""
    return [_records_of(fingerprint, name) for name in names]


def _records_of(fingerprint: Mapping[str, str], name: str) -> int:
    """Return the records in an epoch of a source, as given by its fingerprint."""
    found = fingerprint.get(f"sources.{name}.records", "")
    if not (records := decimal_of(found)):
        raise StateError(
            f"the fingerprint of source {name!r} gives {found!r} for its number of records; "
            "read the journal with the release that wrote it"
        )
    return records
