"""Whether a state can belong to a mix: a state that no run of the mix reaches is refused before it is used.

A digest shows that a state is damaged. If a state was changed and given a new digest, or if a faulty release wrote it,
only its values show the fault, because they bound one another. A state within the bounds may be wrong all the same: a
run might have reached it with a cursor some records further, or with one carried document fewer. The state alone does
not show the difference. The journal of the run does, because it holds a digest of every state
(``omniload.mix.journal``).

Shape suffixes:
    S  sources        P  carried pieces
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from omniload.base.errors import StateError
from omniload.mix.config import MixConfig
from omniload.mix.deficit import WEIGHT_ONE, integer_weights
from omniload.mix.pieces import PieceTable
from omniload.mix.samples import SampleTable
from omniload.mix.schedule import weights_at
from omniload.mix.state import MixState

__all__ = ["require_possible", "require_samples"]


def require_possible(
    state: MixState,
    mix: MixConfig,
    records_S: Sequence[int],
    *,
    skipped_steps: int = 0,
) -> None:
    """Refuse a state that no run of ``mix`` reaches.

    Args:
        state: The state; its values are in the ranges of ``MixState.from_json``.
        mix: The mix.
        records_S: Raw records of each source.
        skipped_steps: Steps that edits left out, whose samples count as drawn.

    Raises:
        StateError: A value is not possible; the message names the first such value and its limit.
    """
    fault = next(_faults(state, mix, records_S, skipped_steps), None)
    if fault is not None:
        raise StateError(
            f"the mix state before step {state.step} is not one that this mix reaches: {fault}; "
            "resume from an earlier checkpoint"
        )


def require_samples(state: MixState, source: int, name: str, table: SampleTable) -> None:
    """Refuse a state whose cursor or carried pieces do not match the samples that were found.

    Args:
        state: The state from which a run resumes.
        source: Number of the source.
        name: Its name, for the message.
        table: Samples found in a range of its positions.

    Raises:
        StateError: The sample of a piece is missing or has another length, or the cursor is behind the end of its
            sample.
    """
    carried = state.carried
    here_P = (
        (carried.sources_P == source)
        & (carried.positions_P >= table.start)
        & (carried.positions_P < table.stop)
    )
    found_P = here_P.nonzero()[0]
    for _, position, sub, start, stop, size in carried.take(found_P).rows() if len(found_P) else ():
        if (found := _length_of(table, position, sub)) != size:
            raise _other_samples(
                f"tokens {start} to {stop} of {size} of sample {sub} of record {position} of source {name!r} are "
                f"carried, the sample has {found}"
            )
    position, sub, token = state.cursors_S[source]
    # The cursor is checked together with the part of the source that contains its record.
    if not table.start <= position < table.stop:
        return
    if token and token >= (found := _length_of(table, position, sub)):
        raise _other_samples(
            f"source {name!r} goes on at token {token} of sample {sub} of record {position}, which has {found}"
        )
    # The samples of a record are numbered without gaps.
    if sub and not _length_of(table, position, sub - 1):
        raise _other_samples(
            f"source {name!r} goes on at sample {sub} of record {position}, which has no sample {sub - 1}"
        )


def _other_samples(fault: str) -> StateError:
    return StateError(
        f"the state is of other samples than the data holds: {fault}; resume from an earlier checkpoint"
    )


def _length_of(table: SampleTable, position: int, sub: int) -> int:
    """Return the tokens of a sample; 0 where there is no such sample."""
    # Binary search, because a state may carry thousands of pieces and a table may hold as many samples.
    first, last = np.searchsorted(table.positions_N, (position, position + 1))
    at = int(first + np.searchsorted(table.subs_N[first:last], sub))
    return int(table.lengths_N[at]) if at < last and table.subs_N[at] == sub else 0


def _faults(
    state: MixState, mix: MixConfig, records_S: Sequence[int], skipped_steps: int
) -> Iterator[str]:
    yield from _faults_of_cursors(state, mix, records_S)
    yield from _faults_of_credits(state, mix, skipped_steps)
    yield from _faults_of_amounts(state, mix, state.step + skipped_steps)
    yield from _faults_of_pieces(state, mix)


def _faults_of_cursors(state: MixState, mix: MixConfig, records_S: Sequence[int]) -> Iterator[str]:
    length = mix.pack.length
    for s, (name, overlong) in enumerate(zip(mix.names, mix.overlong_S, strict=True)):
        position, _, token = state.cursors_S[s]
        drawn, records = state.drawn_S[s], records_S[s]
        # An epoch without a sample is refused when it is read, so each finished epoch gave something. Two cases are
        # exceptions: a split that ends may be empty, and so may the first epoch if another loader had drawn from it.
        amounts = mix.mix.amounts
        amount = None if amounts is None else amounts.get(name)
        end = records if amount is None else amount.units(records)
        ends = mix.mix.stop in ("each_once", "amounts") and state.cursors_S[s] == (end, 0, 0)
        source = mix.sources[name]
        # A part of the first epoch need not give a sample either, for example if conditions leave out all of it.
        ends = ends and (source.may_end_empty or end < records)
        given = position // records - (source.drawn_before is not None)
        if given > drawn and not ends:
            yield (
                f"source {name!r} stands at position {position}, after {position // records} epochs of {records} "
                f"records, and {drawn} were drawn of it"
            )
        if (bad := state.bad_of(s)) > position % records:
            yield (
                f"source {name!r} has {bad} bad records in its epoch before position {position}, and "
                f"{position % records} records lie there"
            )
        if state.cursors_S[s] != (0, 0, 0) and not drawn and not ends:
            yield f"source {name!r} stands at {state.cursors_S[s]}, and nothing was drawn of it"
        # Samples are drawn in pieces of one row.
        if token % length or (token and overlong != "split"):
            yield (
                f"source {name!r} goes on at token {token} of a sample, not at a multiple of pack.length {length}"
                + (
                    ""
                    if overlong == "split"
                    else f", and overlong samples are not split: {overlong!r}"
                )
            )


def _faults_of_credits(state: MixState, mix: MixConfig, skipped_steps: int) -> Iterator[str]:
    if total := sum(state.credits_S):
        yield f"credits sum to {total}, not to 0"
    drawn = sum(state.drawn_S)
    stages = [stage for stage in mix.mix.stages if stage.from_step < state.step]
    # While only one stage has been reached, its weights apply to every step, because the first stage has no ramp.
    weights_S = integer_weights(weights_at(mix.mix.stages, mix.names, 0))
    for s, name in enumerate(mix.names):
        credit, least = state.credits_S[s], -WEIGHT_ONE * state.drawn_S[s]
        # A credit is what the weights asked for, minus what was drawn. Weights are from 0 to WEIGHT_ONE.
        low, high = least, least + WEIGHT_ONE * drawn
        # Skipped steps may have had the weights of stages that begin after this step.
        repeats = mix.mix.stop not in ("each_once", "amounts")
        if len(stages) <= 1 and not skipped_steps and repeats:
            low = high = least + weights_S[s] * drawn
        if not low <= credit <= high:
            yield (
                f"source {name!r} has credit {credit}, of {drawn} drawn in all and {state.drawn_S[s]} of it the "
                f"weights give {low} to {high}"
            )


def _faults_of_amounts(state: MixState, mix: MixConfig, steps: int) -> Iterator[str]:
    drawn, carried = sum(state.drawn_S), int(state.carried.lengths_P.sum(dtype=np.int64))
    # The last unit drawn may exceed what a step asks for.
    most = (mix.rows_per_step + mix.pack.lookahead_rows + 1) * mix.pack.length
    if carried > most:
        yield f"{carried} tokens are carried, a step leaves {most} at most"
    if mix.mix.level == "token" and drawn < carried:
        yield f"{carried} tokens are carried of {drawn} drawn"
    # This is true for samples too, because each has at least one token. Amounts may count records, which may be empty.
    if mix.mix.amounts is None and drawn - carried > steps * mix.batch.tokens:
        yield f"{drawn} were drawn and {carried} of them carried on, more than {steps} steps hold"
    if mix.mix.stop == "never" and state.step:
        yield from _faults_of_full_steps(mix, drawn, carried, steps)
    # Every step has at least one row, and every row at least one token.
    if mix.mix.level == "token" and state.step > drawn - carried:
        yield f"{drawn} were drawn and {carried} of them carried on, fewer than a token for each step"


def _faults_of_full_steps(mix: MixConfig, drawn: int, carried: int, steps: int) -> Iterator[str]:
    """Report what contradicts a run that never ends: each of its steps draws all its rows, and the rows ahead."""
    length, rows = mix.pack.length, mix.rows_per_step
    # Rows that hold a single document or a single source may be filled to any degree.
    alone = mix.own_packing is not None and mix.own_packing.alone_S.any()
    if not alone and carried < (least := mix.rows_ahead * length):
        yield f"{carried} tokens are carried, a step leaves {least} at least"
    if mix.mix.level != "token" or mix.own_packing is not None:
        return
    # If two rows were half empty, the pieces of both would have gone into one.
    full = {"concat_and_split": rows * length, "best_fit": (rows - 1) * (length // 2)}
    if drawn - carried < (least := steps * full.get(mix.pack.method, 0)):
        yield (
            f"{drawn} were drawn and {carried} of them carried on, {steps} steps hold {least} at least"
        )


def _faults_of_pieces(state: MixState, mix: MixConfig) -> Iterator[str]:
    carried = state.carried
    if not len(carried):
        return
    if mix.pack.method == "none":
        yield f"{len(carried)} pieces are carried, and without packing a step leaves none"
    longest = int(carried.lengths_P.max())
    if mix.pack.method == "best_fit" and longest > mix.pack.length:
        yield f"a piece of {longest} tokens is carried, longer than pack.length {mix.pack.length}"
    ends_P = np.asarray(state.cursors_S, np.int64)[carried.sources_P]
    here_P = np.column_stack([carried.positions_P, carried.subs_P, carried.stops_P])
    for p in np.flatnonzero(_after(here_P, ends_P)).tolist():
        yield (
            f"tokens to {carried.stops_P[p]} of sample {carried.subs_P[p]} of record {carried.positions_P[p]} of "
            f"source {mix.names[carried.sources_P[p]]!r} are carried, which stands at {ends_P[p].tolist()}"
        )
    order_P = np.lexsort((carried.starts_P, carried.subs_P, carried.positions_P, carried.sources_P))
    if (twice := _overlap(carried.take(order_P))) is not None:
        yield f"sample {twice[2]} of record {twice[1]} of source {mix.names[twice[0]]!r} is carried twice"
    # The pieces of a source come in its order, so sorting them by source alone gives the same result as a full sort.
    by_source_P = np.argsort(carried.sources_P, kind="stable")
    for p in by_source_P[order_P != by_source_P][:1].tolist():
        yield (
            f"sample {carried.subs_P[p]} of record {carried.positions_P[p]} of source "
            f"{mix.names[carried.sources_P[p]]!r} is carried out of the order of its source"
        )
    yield from _faults_of_cuts(mix, carried)


def _faults_of_cuts(mix: MixConfig, carried: PieceTable) -> Iterator[str]:
    """Report a piece that is not one of the pieces that its sample is cut into: full rows, and the rest."""
    length = mix.pack.length
    whole_P = np.asarray([overlong == "split" for overlong in mix.overlong_S])[carried.sources_P]
    # The kept part of a longer sample that is not split. A dropped sample does not occur here.
    kept_P = np.where(whole_P, carried.sizes_P, np.minimum(carried.sizes_P, length))
    # 64 bits, because a row that starts below 2^31 may stop above it.
    starts_P = carried.starts_P.astype(np.int64)
    begins_P = starts_P - starts_P % length
    wrong_P = (carried.stops_P != np.minimum(begins_P + length, kept_P)) | (starts_P != begins_P)
    if (packing := mix.own_packing) is not None:  # each kind of row cut its last piece anywhere
        is_cut_P = packing.cut_S[carried.sources_P]
        stops_P = np.minimum(begins_P + length, kept_P)
        wrong_P = (carried.stops_P != stops_P) | ((starts_P != begins_P) & ~is_cut_P)
    elif mix.pack.method == "concat_and_split":  # the last row cut the first of them anywhere
        wrong_P[0] = carried.stops_P[0] != min(begins_P[0] + length, kept_P[0])
    for p in np.flatnonzero(wrong_P)[:1].tolist():
        yield (
            f"tokens {carried.starts_P[p]} to {carried.stops_P[p]} of {carried.sizes_P[p]} of sample "
            f"{carried.subs_P[p]} of record {carried.positions_P[p]} of source {mix.names[carried.sources_P[p]]!r} are "
            f"carried, which rows of {length} tokens do not cut so"
        )


def _after(here_P3: NDArray[np.int64], ends_P3: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return where (position, sub, token) comes after a cursor."""
    differs_P3 = here_P3 != ends_P3
    first_P = np.argmax(differs_P3, axis=1)
    rows_P = np.arange(len(here_P3))
    after_P: NDArray[np.bool_] = here_P3[rows_P, first_P] > ends_P3[rows_P, first_P]
    return after_P


def _overlap(pieces: PieceTable) -> list[int] | None:
    """Return a piece that shares tokens with the piece before it; pieces are sorted by key and first token."""
    same = (
        (pieces.sources_P[1:] == pieces.sources_P[:-1])
        & (pieces.positions_P[1:] == pieces.positions_P[:-1])
        & (pieces.subs_P[1:] == pieces.subs_P[:-1])
    )
    twice = np.flatnonzero(same & (pieces.starts_P[1:] < pieces.stops_P[:-1]))
    return pieces.take(twice[:1] + 1).rows()[0] if len(twice) else None
