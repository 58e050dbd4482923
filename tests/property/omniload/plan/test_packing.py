"""Packing and membership: no sample is lost or repeated, and nothing depends on how much metadata is known."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from omniload.mix.state import MixState
from omniload.plan.membership import Starved, membership_of
from omniload.plan.packing import CARRIED, best_fit, fill_in_order
from omniload.plan.window import window_of
from tests.support.plane.builders import PACKS, a_mix, with_overlong, with_packs
from tests.support.plane.reference import known_ahead
from tests.support.plane.resume import assert_resumes_exactly

capacities = st.integers(1, 64)


@st.composite
def pools(draw):
    capacity = draw(capacities)
    lengths = draw(st.lists(st.integers(1, capacity), max_size=60))
    if draw(st.booleans()):  # pieces of one size are dealt together
        lengths += [draw(st.integers(1, capacity))] * draw(st.integers(8, 30))
    first = draw(st.integers(0, len(lengths)))
    return lengths, first, draw(st.integers(1, 12)), capacity


@given(pools())
def test_no_row_is_overfull_and_what_is_carried_fits_nowhere(pool):
    lengths, first, num_rows, capacity = pool

    rows = best_fit(lengths, num_first=first, num_rows=num_rows, capacity=capacity)

    used = np.bincount(
        rows[rows >= 0], weights=np.array(lengths, float)[rows >= 0], minlength=num_rows
    )
    assert len(used) == num_rows
    assert used.max(initial=0) <= capacity
    left = [n for n, row in zip(lengths, rows.tolist(), strict=True) if row == CARRIED]
    assert all(n > capacity - used.min() for n in left)


def fullest_with_room(lengths, first, num_rows, capacity):
    """Compute the plain model: look at every row for every piece."""
    free, rows = [capacity] * num_rows, [CARRIED] * len(lengths)
    rest = sorted(range(first, len(lengths)), key=lambda p: (-lengths[p], p))
    for p in [*range(first), *rest]:
        fitting = [(free[row], row) for row in range(num_rows) if free[row] >= lengths[p]]
        if fitting:
            rows[p] = min(fitting)[1]
            free[rows[p]] -= lengths[p]
    return rows


@given(pools())
def test_each_piece_goes_to_the_fullest_row_and_of_those_to_the_first(pool):
    lengths, first, num_rows, capacity = pool

    rows = best_fit(lengths, num_first=first, num_rows=num_rows, capacity=capacity)

    assert rows.tolist() == fullest_with_room(lengths, first, num_rows, capacity)


@given(pools())
def test_the_oldest_piece_carried_is_always_placed(pool):
    lengths, first, num_rows, capacity = pool

    rows = best_fit(lengths, num_first=first, num_rows=num_rows, capacity=capacity)

    if first:
        assert rows[0] != CARRIED
    assert all(row != CARRIED for row in rows[: min(first, num_rows)].tolist())


@given(st.lists(st.integers(0, 90), max_size=40), st.integers(1, 8), capacities)
def test_filling_in_order_deals_every_token_once_and_fills_rows_to_the_last(
    lengths, num_rows, capacity
):
    piece, starts, stops, rows = fill_in_order(
        np.array(lengths, np.int32), num_rows=num_rows, capacity=capacity
    )

    dealt = [
        (p, t)
        for p, a, b in zip(piece.tolist(), starts.tolist(), stops.tolist(), strict=True)
        for t in range(a, b)
    ]
    assert dealt == [(p, t) for p, n in enumerate(lengths) for t in range(n)]
    held = np.bincount(rows[rows >= 0], weights=(stops - starts)[rows >= 0], minlength=num_rows)
    total = sum(lengths)
    assert held.tolist() == [max(0, min(capacity, total - r * capacity)) for r in range(num_rows)]


overlongs = st.sampled_from([None, "split", "truncate", "drop"])
packs = st.sampled_from([None, None, None, *PACKS])


@st.composite
def corpora(draw):
    names = ("web", "code", "books")[: draw(st.integers(1, 3))]
    stages = [{"from_step": 0, "weights": {name: draw(st.integers(1, 5)) for name in names}}]
    if draw(st.booleans()):
        later = {name: draw(st.integers(1, 5)) for name in names}
        stages.append({"from_step": 3, "weights": later, "ramp_steps": draw(st.integers(0, 2))})
    mix = a_mix(
        sources=names,
        rows=draw(st.integers(1, 5)),
        length=draw(st.sampled_from([8, 16])),
        micro_rows=1,
        pack={
            "method": draw(st.sampled_from(["best_fit", "concat_and_split", "none"])),
            "overlong": draw(st.sampled_from(["split", "truncate", "drop"])),
            "lookahead_rows": draw(st.integers(0, 2)),
        },
        mix={
            "stages": stages,
            "level": draw(st.sampled_from(["token", "sample"])),
        },
    )
    record = st.lists(st.integers(1, 40), min_size=1, max_size=3)
    epochs = [[[5], *draw(st.lists(record, max_size=9))] for _ in names]
    mix = with_overlong(mix, [draw(overlongs) for _ in names])
    return with_packs(mix, [draw(packs) for _ in names]), epochs


class Steps:
    """Membership of step after step, as an object that can be resumed."""

    def __init__(self, mix, epochs, saved=None, *, known=64):
        self.mix, self.epochs, self.known = mix, epochs, known
        self.state = (
            MixState.start(len(mix.names))
            if saved is None
            else MixState.from_json(saved, mix.names, {})
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def state_dict(self):
        return self.state.to_json(self.mix.names, {})

    def __next__(self):
        known = self.known
        while isinstance(
            found := membership_of(
                self.mix, self.state, known_ahead(self.state, self.epochs, known)
            ),
            Starved,
        ):
            known *= 2
        self.state = found.after
        return found


def content(membership):
    return str((membership.pieces.rows(), membership.row_offsets.tolist()))


@given(corpora())
def test_membership_resumes_exactly_from_any_step(corpus):
    assert_resumes_exactly(lambda saved: Steps(*corpus, saved), content, num_items=5)


@given(corpora(), st.integers(1, 400))
def test_membership_is_the_same_however_much_is_known_ahead(corpus, known):
    much, other = Steps(*corpus, known=512), Steps(*corpus, known=known)

    assert [content(next(much)) for _ in range(4)] == [content(next(other)) for _ in range(4)]


@given(corpora())
def test_rows_hold_no_more_than_their_length_and_concatenation_fills_them(corpus):
    mix, _ = corpus
    steps = Steps(*corpus)

    for _ in range(4):
        found = next(steps)
        ends = np.concatenate(([0], np.cumsum(found.pieces.lengths_P)))
        held = np.diff(ends[found.row_offsets])
        assert len(held) == mix.rows_per_step
        assert held.max() <= mix.pack.length
        assert held.min() > 0
        if mix.pack.method == "concat_and_split" and mix.own_packing is None:
            assert held.min() == mix.pack.length
        if mix.pack.method == "none":
            assert np.diff(found.row_offsets).tolist() == [1] * mix.rows_per_step


def tokens_in(table):
    return [
        ((source, position, sub), token)
        for source, position, sub, start, stop, _ in table.rows()
        for token in range(start, stop)
    ]


@given(corpora())
def test_every_token_drawn_is_in_one_row_or_carried_or_was_cut_off(corpus):
    mix, epochs = corpus
    steps = Steps(*corpus)
    seen = []
    lost = 0
    for _ in range(6):
        found = next(steps)
        seen += tokens_in(found.pieces)
        lost += int(found.lost_S.sum())
    seen += tokens_in(steps.state.carried)

    expected = []
    expected_lost = 0
    for s, (position, sub, token) in enumerate(steps.state.cursors_S):
        for p in range(position + 1):
            for k, length in enumerate(epochs[s][p % len(epochs[s])]):
                if (p, k) > (position, sub):
                    continue
                kept = length
                if length > mix.pack.length and mix.overlong_S[s] != "split":
                    kept = mix.pack.length if mix.overlong_S[s] == "truncate" else 0
                if (p, k) == (position, sub):
                    kept, length = token, token  # noqa: PLW2901 -- drawn so far
                expected += [((s, p, k), t) for t in range(kept)]
                expected_lost += length - kept
    assert sorted(seen) == sorted(expected)
    assert lost == expected_lost


def everything(membership):
    state = membership.after
    return (
        content(membership),
        membership.finished_S.tolist(),
        membership.served_S,
        membership.lost_S.tolist(),
        state.digest(),
    )


@given(corpora(), st.integers(2, 9), st.integers(4, 400), st.integers(0, 3))
def test_steps_drawn_together_are_those_drawn_one_by_one(corpus, most, known, first):
    mix, epochs = corpus
    steps = Steps(*corpus)
    for _ in range(first):
        next(steps)
    state = steps.state

    ahead = known_ahead(state, epochs, known)

    window = window_of(mix, state, ahead, most=most)

    if isinstance(window, Starved):
        alone = membership_of(mix, state, ahead)
        assert alone == window
        far = known_ahead(state, epochs, 400)
        further = [near if s in window.sources else far[s] for s, near in enumerate(ahead)]
        assert window_of(mix, state, further, most=most) == window
    else:
        assert 1 <= len(window) <= most
        assert [everything(step) for step in window] == [everything(next(steps)) for _ in window]


def test_all_steps_wanted_come_from_one_pass_where_enough_is_known():
    mix = a_mix(sources=("web",), rows=2, length=8, micro_rows=1)
    state = MixState.start(1)

    assert len(window_of(mix, state, known_ahead(state, [[[5], [9]]], 99), most=7)) == 7
