"""The Data Constructor machine: fetch, build, serve, release."""

import numpy as np
import pytest

from omniload.base.errors import IntegrityError, StateError
from omniload.base.ragged import Ragged
from omniload.batch.microbatch import CpSlice
from omniload.machine.data_constructor import DataConstructor
from omniload.machine.messages import ReleaseSteps, StepsTaken, StepTaken
from omniload.machine.plans.building import (
    BatchesBuilt,
    BuildSteps,
    FetchSlices,
    SlicesFetched,
    SlicesMissing,
)
from omniload.mix.columns import ColumnRanges, SampleColumns
from omniload.plan.world import RanksServed
from tests.support.plane.builders import a_microbatch, a_plan, tokens_of

A, B, CUT = [0, 1, 0, 0, 5, 5], [1, 5, 0, 0, 9, 12], [0, 2, 0, 4, 8, 16]
ROWS = ([B, A], [CUT], [A], [B])


def the_plan(step=0):
    return a_plan(ROWS, dp_ranks=[0, 1, 0, 1], microbatches=[0, 0, 1, 1], step=step)


def a_constructor(**changes):
    defaults = {"dp_ranks": [0, 1], "names": ["web", "code"], "row_length": 16}
    return DataConstructor(**(defaults | changes))


def answers(fetch):
    """Answer slice requests with the samples' own tokens."""
    return [
        SampleColumns(
            tokens=Ragged.of(
                [
                    tokens_of(r.source, p, sub, stop)[start:]
                    for p, sub, start, stop in zip(
                        r.positions_N.tolist(),
                        r.subs_N.tolist(),
                        r.starts_N.tolist(),
                        r.stops_N.tolist(),
                        strict=True,
                    )
                ]
            )
        )
        for r in fetch.requests
    ]


def built(constructor, plan):
    (fetch,) = constructor.handle(BuildSteps(plans=[plan]))
    assert constructor.handle(
        SlicesFetched(steps=(plan.step,), slices=ColumnRanges.of(answers(fetch)))
    ) == (BatchesBuilt(steps=(plan.step,)),)
    return constructor


def test_it_asks_once_for_each_source_with_one_token_more_where_a_sample_goes_on():
    (fetch,) = a_constructor().handle(BuildSteps(plans=[the_plan()]))

    assert isinstance(fetch, FetchSlices)
    assert [request.source for request in fetch.requests] == [0, 1]
    assert fetch.requests[0].positions_N.tolist() == [1, 2, 1]
    assert fetch.requests[0].starts_N.tolist() == [0, 4, 0]
    assert fetch.requests[0].stops_N.tolist() == [5, 9, 5]
    assert fetch.requests[1].stops_N.tolist() == [10, 10]


def test_batches_have_one_table_of_tags_of_the_sources_that_their_step_knows():
    tags = {"code": {"domain": "software"}, "added": {"domain": "late"}}
    constructor = a_constructor(names=["web", "code", "added"], tags=tags)
    batch = built(constructor, the_plan()).batch_of(0, 1)

    assert list(batch.tokens_by_source) == ["web", "code"]
    assert batch.source_tags == {"code": {"domain": "software"}}
    assert built(a_constructor(tags=tags), the_plan()).batch_of(0, 0).source_tags is tags


@pytest.mark.parametrize(("rank", "rows"), [(0, (ROWS[0], ROWS[2])), (1, (ROWS[1], ROWS[3]))])
def test_every_rank_gets_its_rows_in_their_microbatches(rank, rows):
    batch = built(a_constructor(), the_plan()).batch_of(0, rank)

    expected = [a_microbatch([row], length=16) for row in rows]
    assert [m.tokens_RT.tolist() for m in batch.microbatches] == [
        m.tokens_RT.tolist() for m in expected
    ]
    assert [m.labels_RT.tolist() for m in batch.microbatches] == [
        m.labels_RT.tolist() for m in expected
    ]


def test_a_batch_tells_what_the_plan_says_of_the_whole_step():
    batch = built(a_constructor(dp_ranks=[1]), the_plan()).batch_of(0, 1)

    assert batch.tokens_by_source == {"web": 14, "code": 18}
    assert batch.loss_tokens == the_plan().loss_tokens
    assert (batch.step, batch.imbalance, batch.bound) == (0, 1.0, 1.0)


def test_a_rank_without_rows_in_a_microbatch_gets_an_empty_one():
    plan = a_plan([[A], [B], [A]], dp_ranks=[0, 0, 1], microbatches=[0, 1, 0])

    batch = built(a_constructor(), plan).batch_of(0, 1)

    assert [m.tokens_RT.shape for m in batch.microbatches] == [(1, 16), (0, 16)]


def test_a_step_without_pieces_is_built_without_asking():
    constructor = a_constructor(dp_ranks=[0])
    (fetch,) = constructor.handle(BuildSteps(plans=[a_plan([[], []])]))

    constructor.handle(SlicesFetched(steps=(0,), slices=ColumnRanges.of([])))

    assert list(fetch.requests) == []
    assert constructor.batch_of(0, 0).microbatches[0].tokens_RT.tolist() == [[0] * 16] * 2


def test_building_again_answers_at_once():
    constructor = built(a_constructor(), the_plan())

    assert constructor.handle(BuildSteps(plans=[the_plan()])) == (BatchesBuilt(steps=(0,)),)


def test_a_second_answer_changes_nothing():
    constructor = built(a_constructor(), the_plan())

    assert constructor.handle(SlicesFetched(steps=(0,), slices=ColumnRanges.of([]))) == ()
    assert constructor.has(0)


def test_asking_again_while_the_answer_is_out_asks_the_same():
    constructor = a_constructor()
    (first,) = constructor.handle(BuildSteps(plans=[the_plan()]))
    (second,) = constructor.handle(BuildSteps(plans=[the_plan()]))

    assert [r.positions_N.tolist() for r in first.requests] == [
        r.positions_N.tolist() for r in second.requests
    ]


def test_released_steps_are_gone_and_later_ones_stay():
    constructor = built(built(a_constructor(), the_plan(0)), the_plan(1))

    constructor.handle(ReleaseSteps(step=1))

    assert not constructor.has(0)
    assert constructor.has(1)
    with pytest.raises(StateError, match=r"step 0 of dp rank 1 is not held \(steps \[1\]"):
        constructor.batch_of(0, 1)


def test_a_released_step_is_not_built_again():
    constructor = built(a_constructor(), the_plan(0))
    constructor.handle(ReleaseSteps(step=1))

    assert constructor.handle(BuildSteps(plans=[the_plan(0)])) == (BatchesBuilt(steps=(0,)),)
    assert not constructor.has(0)
    assert constructor.is_released(0)


def test_steps_are_released_with_the_plans_of_later_ones():
    constructor = built(a_constructor(), the_plan(0))

    constructor.handle(BuildSteps(plans=[the_plan(0), the_plan(1)], released_to=1))

    assert not constructor.has(0)
    assert constructor.is_released(0)


def test_an_answer_for_a_released_step_is_dropped():
    constructor = a_constructor()
    (fetch,) = constructor.handle(BuildSteps(plans=[the_plan(0)]))
    constructor.handle(ReleaseSteps(step=1))

    constructor.handle(SlicesFetched(steps=(0,), slices=ColumnRanges.of(answers(fetch))))

    assert not constructor.has(0)


def test_a_rank_that_it_does_not_serve_is_a_state_error():
    with pytest.raises(StateError, match="dp rank 7 is not held"):
        built(a_constructor(), the_plan()).batch_of(0, 7)


def test_cp_peers_get_slices_of_the_same_rows():
    batch = built(a_constructor(), the_plan()).batch_of(0, 0)
    sliced = built(a_constructor(cp_size=2), the_plan())

    for number, whole in enumerate(batch.microbatches):
        found = np.empty_like(whole.tokens_RT)
        for peer in range(2):
            part = sliced.batch_of(0, 0, peer).microbatches[number]
            assert isinstance(part, CpSlice)
            found[:, part.indices_C] = part.tokens_RC
        assert np.array_equal(found, whole.tokens_RT)


def test_a_sample_of_another_length_than_planned_stops_the_build():
    constructor = a_constructor()
    (fetch,) = constructor.handle(BuildSteps(plans=[the_plan()]))
    slices = answers(fetch)
    whole = slices[0].tokens
    slices[0] = SampleColumns(tokens=Ragged.of([whole[0][:-1], whole[1], whole[2]]))

    with pytest.raises(IntegrityError, match="gave 4 tokens where 5 were planned"):
        constructor.handle(SlicesFetched(steps=(0,), slices=ColumnRanges.of(slices)))


def test_a_mask_and_scores_come_with_the_pieces_they_belong_to():
    constructor = a_constructor(columns=("loss_mask", "scores"))
    (fetch,) = constructor.handle(BuildSteps(plans=[the_plan()]))
    plain, code = answers(fetch)
    # Source 0 has a mask, and a score with each piece that holds its sample's first token; source 1 has neither.
    masks = Ragged.of([np.arange(n) % 2 == 0 for n in plain.tokens.lengths_N], np.bool_)
    scores = Ragged.of([[0.5], [], [1.5]], np.float32)
    web = SampleColumns(tokens=plain.tokens, others={"loss_mask": masks, "scores": scores})
    constructor.handle(SlicesFetched(steps=(0,), slices=ColumnRanges.of([web, code])))

    (first, _), (cut, _) = (constructor.batch_of(0, rank).microbatches for rank in (0, 1))

    assert fetch.requests[0].columns == ("loss_mask", "scores")
    assert (first.labels_RT[0] != -100).tolist() == [True] * 9 + [False, True, False, True] + [
        False
    ] * 3
    assert (cut.labels_RT[0] != -100).tolist() == [False, True, False, True] + [False] * 12
    assert [first.columns_K["scores"][k].tolist() for k in range(2)] == [[], [0.5]]
    assert cut.columns_K["scores"].lengths_N.tolist() == [0]


def the_same(one, other):
    return all(
        np.array_equal(getattr(a, name), getattr(b, name))
        for a, b in zip(one.microbatches, other.microbatches, strict=True)
        for name in (
            "tokens_RT",
            "labels_RT",
            "positions_RT",
            "source_ids_RT",
            "cu_seqlens",
            "keys_K4",
        )
    )


def test_steps_built_together_are_as_each_alone():
    plans = [
        the_plan(0),
        a_plan([[A], [B], [A]], dp_ranks=[0, 0, 1], microbatches=[0, 1, 0], step=1),
    ]
    together = a_constructor()
    (fetch,) = together.handle(BuildSteps(plans=plans))

    assert together.handle(SlicesFetched(steps=(0, 1), slices=ColumnRanges.of(answers(fetch)))) == (
        BatchesBuilt(steps=(0, 1)),
    )

    assert [request.source for request in fetch.requests] == [0, 1]
    for plan in plans:
        for rank in (0, 1):
            alone = built(a_constructor(), plan).batch_of(plan.step, rank)
            assert the_same(together.batch_of(plan.step, rank), alone)


def test_of_steps_asked_together_those_built_before_are_left_as_they_are():
    constructor = built(a_constructor(), the_plan(0))
    before = constructor.batch_of(0, 0)

    (fetch,) = constructor.handle(BuildSteps(plans=[the_plan(0), the_plan(1)]))
    constructor.handle(SlicesFetched(steps=(1,), slices=ColumnRanges.of(answers(fetch))))

    assert fetch.steps == (1,)
    assert constructor.batch_of(0, 0) is before
    assert constructor.has(1)


def a_rebuilding_constructor():
    """Return a constructor that replaces a lost one and asks for two steps, and its requests."""
    constructor = a_constructor()
    (fetch,) = constructor.handle(BuildSteps(plans=[the_plan(step=2), the_plan(step=3)]))
    assert fetch.steps == (2, 3)
    return constructor, SlicesMissing(steps=(2, 3))


def test_steps_that_every_rank_has_meanwhile_are_not_asked_for_again():
    constructor, missing = a_rebuilding_constructor()
    constructor.handle(ReleaseSteps(step=3))

    (again,) = constructor.handle(missing)

    assert again.steps == (3,)
    slices = ColumnRanges.of(answers(again))
    assert constructor.handle(SlicesFetched(steps=(3,), slices=slices)) == (
        BatchesBuilt(steps=(3,)),
    )
    assert constructor.has(3)
    assert not constructor.has(2)


def test_nothing_is_asked_for_again_where_every_rank_has_all_of_it():
    constructor, missing = a_rebuilding_constructor()
    constructor.handle(ReleaseSteps(step=4))

    assert constructor.handle(missing) == (BatchesBuilt(steps=(2, 3)),)


def test_samples_that_are_missing_of_steps_that_ranks_wait_for_stay_missing():
    constructor, missing = a_rebuilding_constructor()

    assert constructor.handle(missing) == ()


def test_samples_that_are_missing_for_ranks_of_before_are_not_missed():
    constructor, _ = a_rebuilding_constructor()

    assert constructor.handle(SlicesMissing(steps=(2, 3), generation=1)) == (
        BatchesBuilt(steps=(2, 3)),
    )


def taken(step, dp_rank, cp_rank=0, generation=0):
    return StepTaken(step=step, dp_rank=dp_rank, cp_rank=cp_rank, generation=generation)


def test_what_ranks_tell_is_due_once_the_slowest_of_them_has_come_further():
    told = a_constructor(cp_size=2).told
    told.hear(taken(7, 0))
    heard = told.number

    due = []
    for rank in ((0, 1), (1, 0), (1, 1)):
        told.hear(taken(7, *rank))
        due.append(told.is_due(heard))
    heard = told.number
    told.hear(taken(9, 0))
    told.hear(taken(8, 0, 1))

    assert due == [False, False, True]
    assert not told.is_due(heard)
    told.hear(taken(8, 1))
    told.hear(taken(8, 1, 1))
    assert told.is_due(heard)
    assert told.taken() == StepsTaken(steps={(0, 0): 9, (0, 1): 8, (1, 0): 8, (1, 1): 8})


def test_a_planner_that_has_heard_nothing_is_due_whatever_was_told():
    told = a_constructor().told
    assert not told.is_due(0)

    told.hear(taken(3, 1))

    assert told.is_due(0)
    assert told.taken() == StepsTaken(steps={(1, 0): 3})


def test_of_a_rank_the_last_step_counts_in_whatever_order_it_is_told():
    told = a_constructor().told

    for step in (3, 5, 4, 5):
        assert told.hear(taken(step, 0))

    assert told.taken().steps == {(0, 0): 5}


def test_ranks_that_it_does_not_serve_yet_tell_the_planner_and_those_of_before_nobody():
    constructor = a_constructor()
    constructor.told.hear(taken(3, 0))
    before = constructor.told.number

    assert not constructor.told.hear(taken(9, 0, generation=1))
    assert not constructor.told.hear(taken(9, 2))

    constructor.handle(BuildSteps(plans=(), served=RanksServed(dp_ranks=(2,), generation=1)))
    assert constructor.told.hear(taken(9, 0))
    assert constructor.told.taken() == StepsTaken(steps={}, generation=1)
    assert constructor.told.hear(taken(9, 2, generation=1))
    assert constructor.told.taken() == StepsTaken(steps={(2, 0): 9}, generation=1)
    assert constructor.told.number > before  # a planner waits for more words than it has heard
