"""A state must fit the samples that were found: its carried pieces, and its cursors."""

from dataclasses import replace

import numpy as np
import pytest

from omniload.base.errors import StateError
from omniload.mix.possible import require_possible, require_samples
from omniload.mix.samples import SampleTable
from omniload.mix.state import MixState
from tests.support.plane.builders import a_mix, pieces_of


class Counted(np.ndarray):
    """An array that counts the values that are gone through."""

    gone_through = 0

    def __array_ufunc__(self, ufunc, method, *inputs, **words):
        Counted.gone_through += self.size
        plain = [x.view(np.ndarray) if isinstance(x, Counted) else x for x in inputs]
        return getattr(ufunc, method)(*plain, **words)


def a_table(records, subs=2):
    positions = np.repeat(np.arange(records), subs)
    return SampleTable(
        start=0,
        stop=records,
        positions_N=positions.view(Counted),
        subs_N=np.tile(np.arange(subs, dtype=np.int32), records).view(Counted),
        lengths_N=(positions % 7 + 2).astype(np.int32),
    )


def a_state(records, cursor=None, pieces=()):
    carried = pieces_of(*([0, p, 1, 0, p % 7 + 2, p % 7 + 2] for p in range(records)), *pieces)
    cursor = cursor or (records, 0, 0)
    return replace(MixState.start(1), cursors_S=(cursor,), drawn_S=(99,), carried=carried)


def test_pieces_are_looked_up_however_many_are_carried():
    Counted.gone_through = 0

    require_samples(a_state(500), 0, "web", a_table(4000))

    assert Counted.gone_through < 40_000  # once or twice, and not for each of them


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (a_state(3, pieces=([0, 1, 2, 0, 2, 2],)), "sample 2 of record 1 .* the sample has 0"),
        (a_state(3, pieces=([0, 2, 0, 0, 3, 3],)), "sample 0 of record 2 .* the sample has 4"),
        (a_state(3, (5, 0, 7)), "at token 7 of sample 0 of record 5, which has 7"),
        (a_state(3, (5, 3, 0)), "at sample 3 of record 5, which has no sample 2"),
    ],
)
def test_samples_that_are_not_there_are_named(state, said):
    with pytest.raises(StateError, match=said):
        require_samples(state, 0, "web", a_table(40))


@pytest.mark.parametrize("cursor", [(5, 2, 0), (5, 1, 6), (5, 0, 0), (60, 9, 9)])
def test_a_cursor_within_its_record_or_outside_of_the_table_is_taken(cursor):
    require_samples(a_state(3, cursor), 0, "web", a_table(40))


@pytest.mark.parametrize(("bad", "is_possible"), [(2, True), (3, False)])
def test_as_many_bad_records_as_lie_before_the_cursor_in_its_epoch_are_possible(bad, is_possible):
    mix = a_mix(sources=("web",), pack={"lookahead_rows": 0})
    state = replace(a_state(0, cursor=(12, 0, 0)), step=1, drawn_S=(128,)).with_bad({0: bad})

    if is_possible:
        require_possible(state, mix, [10])
    else:
        with pytest.raises(StateError, match=r"has 3 bad records .* and 2 records lie there"):
            require_possible(state, mix, [10])


@pytest.mark.parametrize(
    ("epochs", "cursor", "is_possible"), [(0.3, 3, True), (0.3, 2, False), (1, 10, False)]
)
def test_a_part_of_the_first_epoch_may_give_nothing_as_a_whole_one_may_not(
    epochs, cursor, is_possible
):
    amounts = {"code": {"samples": 9}, "web": {"epochs": epochs}}
    mix = a_mix(version=2, mix={"amounts": amounts})
    state = MixState.start(2)
    state = replace(state, step=1, cursors_S=((9, 0, 0), (cursor, 0, 0)), drawn_S=(9, 0))

    if is_possible:
        require_possible(state, mix, [10, 10])
    else:
        with pytest.raises(
            StateError, match=r"'web' stands at .* nothing was drawn of it|after 1 epoch"
        ):
            require_possible(state, mix, [10, 10])
