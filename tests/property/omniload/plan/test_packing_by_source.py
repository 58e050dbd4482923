"""Sources with their own packing: the promises of each, among all others, in every step.

The oracle is a model too simple to be wrong: for each piece it looks at every row, and it cuts token by token.
"""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from omniload.mix.pieces import PieceTable
from omniload.mix.state import MixState
from omniload.plan.membership import Starved, membership_of
from omniload.plan.packing import best_fit, packed
from tests.support.plane.builders import PACKS, a_mix, pieces_of, with_overlong, with_packs
from tests.support.plane.reference import known_ahead

NAMES = ("books", "code", "web")
LENGTH = 8
STEPS = 6

packs = st.sampled_from([None, *PACKS])
methods = st.sampled_from(["best_fit", "concat_and_split"])


@st.composite
def mixes(draw):
    mix = a_mix(
        sources=NAMES,
        weights={name: draw(st.integers(1, 5)) for name in NAMES},
        rows=draw(st.integers(1, 6)),
        length=LENGTH,
        micro_rows=1,
        pack={"method": draw(methods), "lookahead_rows": draw(st.integers(0, 3))},
        mix={"level": draw(st.sampled_from(["token", "sample"]))},
    )
    mix = with_overlong(mix, [draw(st.sampled_from(["split", "truncate", "drop"])) for _ in NAMES])
    return with_packs(mix, [{"cut": "allow", "rows": "own"}, draw(packs), draw(packs)])


records = st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=3), max_size=9)


def kind_of(mix, source):
    pack = mix.sources[mix.names[source]].pack
    return None if pack is None else {"own": source, "alone": "alone"}.get(pack.rows)


def cuts(mix, source):
    pack = mix.sources[mix.names[source]].pack
    if pack is not None and (pack.cut is not None or pack.rows == "alone"):
        return pack.cut == "allow"
    return mix.pack.method == "concat_and_split"


def tokens_of(pieces):
    """Return the tokens of each piece, as ``(source, position, sub, token)``."""
    return [[(s, p, k, t) for t in range(start, stop)] for s, p, k, start, stop, _ in pieces.rows()]


def by_the_model(mix, carried, fresh):
    """Return the tokens of each row, and the carried ones."""
    pieces = [*tokens_of(carried), *tokens_of(fresh)]
    rows, num = [], mix.rows_per_step
    drawn = range(len(carried), len(pieces))
    whole = [p for p in drawn if not cuts(mix, pieces[p][0][0])]
    placed = set()

    def room_in(row, kind):
        return (
            LENGTH - len(row) if rows and kind != "alone" and kind_of(mix, row[0][0]) == kind else 0
        )

    for p in [*range(len(carried)), *sorted(whole, key=lambda p: (-len(pieces[p]), p))]:
        kind, size = kind_of(mix, pieces[p][0][0]), len(pieces[p])
        fitting = [(room_in(row, kind), i) for i, row in enumerate(rows)]
        fitting = [each for each in fitting if each[0] >= size]
        if fitting:
            rows[min(fitting)[1]].extend(pieces[p])
        elif len(rows) < num:
            rows.append(list(pieces[p]))
        else:
            continue
        placed.add(p)
    left = []
    for p in range(len(pieces)):
        for token in [] if p in placed else pieces[p]:
            row = next((row for row in rows if room_in(row, kind_of(mix, token[0]))), None)
            if not cuts(mix, token[0]) or (row is None and len(rows) == num):
                left.append(token)
            elif row is None:
                rows.append([token])
            else:
                row.append(token)
    return rows, left


@st.composite
def pools(draw):
    """A mix, carried pieces and drawn pieces, in the order of their sources."""
    mix = draw(mixes())
    lengths = draw(st.lists(st.tuples(st.integers(0, 2), st.integers(1, LENGTH)), max_size=40))
    rows = [(s, i, 0, 0, n, n) for i, (s, n) in enumerate(lengths)]
    first = draw(st.integers(0, len(rows)))
    return mix, pieces_of(*rows[:first]), pieces_of(*rows[first:])


@given(pools())
def test_pieces_lie_where_the_plain_model_puts_them(pool):
    mix, carried, fresh = pool
    if not len(carried) + len(fresh):
        return

    pieces, offsets, left = packed(mix, carried, fresh, is_last=False)

    found = [
        sorted(token for piece in tokens_of(pieces.part(a, b)) for token in piece)
        for a, b in pairwise(offsets.tolist())
    ]
    rows, carried_on = by_the_model(mix, carried, fresh)
    assert found == [sorted(row) for row in rows] + [[]] * (mix.rows_per_step - len(rows))
    assert [token for piece in tokens_of(left) for token in piece] == carried_on


def steps_of(mix, epochs):
    state = MixState.start(len(NAMES))
    for _ in range(STEPS):
        known = 64
        while isinstance(
            found := membership_of(mix, state, known_ahead(state, epochs, known)), Starved
        ):
            known *= 2
        yield state, found
        state = found.after


@given(mixes(), st.lists(records, min_size=3, max_size=3))
def test_every_step_keeps_what_each_source_is_promised(mix, drawn):
    epochs = [[[5], *rows] for rows in drawn]

    for before, step in steps_of(mix, epochs):
        bounds = step.row_offsets.tolist()
        rows = [step.pieces.part(a, b) for a, b in pairwise(bounds)]
        assert len(rows) == mix.rows_per_step
        full = {}
        for row in rows:
            (kind,) = {kind_of(mix, s) for s in row.sources_P.tolist()}
            assert kind != "alone" or len(row) == 1
            held = int(row.lengths_P.sum())
            assert 0 < held <= LENGTH
            full[kind] = full.get(kind, True) and held == LENGTH
        for s, _, _, start, stop, size in step.pieces.rows():
            if not cuts(mix, s):
                kept = min(size, LENGTH) if mix.overlong_S[s] == "truncate" else size
                assert (start % LENGTH, stop) == (0, min(start + LENGTH, kept))
        # Pieces that may be cut never wait while rows of their kind have room.
        waiting = {s for s in step.after.carried.sources_P.tolist() if cuts(mix, s)}
        assert all(full.get(kind_of(mix, s), True) for s in waiting)
        if len(before.carried):
            oldest = before.carried.rows()[0]
            assert oldest not in step.after.carried.rows()


@given(pools())
def test_where_all_are_alike_rows_are_those_of_best_fit(pool):
    mix, carried, fresh = pool
    mix = with_packs(mix, [None, None, {"cut": "allow"}]).model_copy(
        update={"pack": mix.pack.model_copy(update={"method": "best_fit"})}
    )
    both = PieceTable.concatenated([carried, fresh])
    first = int((carried.sources_P < 2).sum())
    both = both.take(np.flatnonzero(both.sources_P < 2))  # without the source that is cut

    if not len(both):
        return
    pieces, offsets, _ = packed(
        mix, both.part(0, first), both.part(first, len(both)), is_last=False
    )

    rows = best_fit(both.lengths_P, num_first=first, num_rows=mix.rows_per_step, capacity=LENGTH)
    held = [both.take(np.flatnonzero(rows == row)).rows() for row in range(mix.rows_per_step)]
    found = [pieces.part(a, b).rows() for a, b in pairwise(offsets.tolist())]
    assert found == held
