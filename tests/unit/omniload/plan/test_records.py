"""A plan: its rows, its parts, its digest."""

from dataclasses import fields

import numpy as np
import pytest

from tests.support.plane.builders import a_plan

ROWS = (
    ([0, 1, 0, 0, 5, 5], [1, 2, 0, 0, 3, 3]),
    ([0, 2, 0, 0, 8, 8],),
    (),
    ([1, 3, 1, 4, 9, 20],),
)


def plan(**changes):
    return a_plan(ROWS, dp_ranks=[0, 1, 0, 1], microbatches=[0, 0, 1, 1], **changes)


def test_rows_are_found_by_rank_and_microbatch():
    assert plan().num_rows == 4
    assert [
        part if isinstance(part, list) else part.tolist() for part in plan().rows_by_microbatch(1)
    ] == [[1, 3], [1, 1]]
    rows, counts = plan().rows_by_microbatch(2)
    assert (rows.tolist(), counts) == ([], [0, 0])


def test_a_part_holds_the_rows_of_its_ranks_and_what_is_said_of_the_whole():
    part = plan().part_of([1])

    assert part.pieces.rows() == [[0, 2, 0, 0, 8, 8], [1, 3, 1, 4, 9, 20]]
    assert part.row_offsets.tolist() == [0, 1, 2]
    assert part.microbatches_R.tolist() == [0, 1]
    assert part.tokens_S == plan().tokens_S
    assert part.loss_tokens == plan().loss_tokens


@pytest.mark.parametrize(
    ("ranks", "sources"),
    [([0, 2], [0, 2]), ([2, 0], [0, 2]), ([1, 2], [1, 2]), ([3], []), ([], [])],
)
def test_a_part_holds_the_rows_of_its_ranks_alone_wherever_they_lie(ranks, sources):
    rows = [[[rank, 0, 0, 0, 4, 4]] for rank in (2, 0, 1)]
    part = a_plan(rows, dp_ranks=[2, 0, 1]).part_of(ranks)

    assert sorted(part.pieces.sources_P.tolist()) == sources
    assert set(part.dp_ranks_R.tolist()) == set(sources)


def test_an_empty_row_stays_a_row_of_its_part():
    part = plan().part_of([0])

    assert np.diff(part.row_offsets).tolist() == [2, 0]


def test_a_part_for_every_rank_is_the_plan():
    part = plan().part_of([1, 0])

    assert part.pieces.rows() == plan().pieces.rows()
    assert part.membership_digest() == plan().membership_digest()


@pytest.mark.parametrize(
    "ranks_of",
    [
        [[2, 0], [1]],
        [[1], [], [0], [2]],
        [[3, 5], [0, 2], [9]],
        [[0, 1, 2], []],
        [[], [4]],
        [[1]],
        [],
    ],
)
def test_parts_of_several_constructors_are_those_of_each(ranks_of):
    rows = [[[rank, n, 0, 0, 4, 4]] * (n % 3) for n, rank in enumerate((2, 0, 1, 0, 2, 2, 0))]
    whole = a_plan(rows, dp_ranks=[2, 0, 1, 0, 2, 2, 0], microbatches=[0, 0, 0, 1, 1, 2, 2])

    for part, ranks in zip(whole.parts_of(ranks_of), ranks_of, strict=True):
        alone = whole.part_of(ranks)
        assert fields_of(part) == fields_of(alone)
        assert part is whole or part.pieces.columns_CP.flags.c_contiguous


def fields_of(plan):
    found = {f.name: getattr(plan, f.name) for f in fields(plan)}
    arrays = {name: a.tolist() for name, a in found.items() if isinstance(a, np.ndarray)}
    return found | arrays | {"pieces": plan.pieces.rows()}


def test_the_digest_does_not_depend_on_ranks():
    other = a_plan(ROWS, dp_ranks=[3, 2, 1, 0], microbatches=[0, 0, 0, 0], imbalance=2.0)

    assert other.membership_digest() == plan().membership_digest()


@pytest.mark.parametrize("place", range(6))
def test_the_digest_changes_with_any_part_of_any_piece(place):
    rows = [list(map(list, row)) for row in ROWS]
    rows[3][0][place] += 1

    assert a_plan(rows).membership_digest() != plan().membership_digest()


def test_the_digest_changes_with_the_step_and_with_the_bounds_of_rows():
    moved = [(ROWS[0][0],), (ROWS[0][1], ROWS[1][0]), (), ROWS[3]]

    digests = {
        plan().membership_digest(),
        plan(step=1).membership_digest(),
        a_plan(moved).membership_digest(),
    }

    assert len(digests) == 3
