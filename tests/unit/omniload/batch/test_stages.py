"""Stages of a pipeline: each rank has its stage's columns, equal to those of the whole batch; others are refused."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload.base.errors import ConfigError
from omniload.base.ragged import Ragged
from omniload.batch.arrays import NumpyArrays
from omniload.batch.encoding import EncoderShare, counts_by_rank
from omniload.batch.images import own_images
from omniload.batch.microbatch import Batch
from omniload.batch.slices import joined, slice_for_cp
from omniload.batch.stages import Stage, own_part
from omniload.batch.wire import Parts, Routes, from_bytes, from_parts, to_bytes, to_parts
from omniload.front.batches.training_batch import TrainingBatch
from omniload.mix.config import PipelineConfig
from tests.support.plane.builders import a_microbatch

DEFAULT = PipelineConfig().model_dump()
ROWS = [[(0, 0, 0, 0, 20, 20)], [(1, 4, 0, 0, 9, 9), (0, 1, 0, 2, 14, 16)]]
COLUMNS = {name: name for name in ("tokens", "labels", "scores", "images")} | {
    "lang": "own",
    "reward": "own",
}
"""The columns that the stages name."""


def some_rows(length=32):
    rows = a_microbatch(ROWS, length=length)
    pieces = len(rows.keys_K4)
    tokens = np.arange(2 * length, dtype=np.int32).reshape(2, length)
    return replace(
        rows,
        tokens_RT=tokens,
        trained_RT=np.arange(2 * length).reshape(2, length) % 3 > 0,
        columns_K={
            "scores": Ragged.of([np.ones(1, np.float32)] * pieces, np.float32),
            "images": Ragged.of([np.arange(120, dtype=np.uint8)] * pieces, np.uint8),
            "lang": Ragged.of([np.frombuffer(b"en", np.uint8)] * pieces, np.uint8),
        },
        aligned_RT={"reward": np.arange(2 * length, dtype=np.float16).reshape(2, length)},
    )


def a_batch(*parts):
    return Batch(step=3, microbatches=parts, loss_tokens=7, imbalance=1.0, bound=1.0)


def stages_of(numbers, columns=DEFAULT):
    return [Stage.at(number, max(numbers) + 1, columns) for number in numbers]


def served(batch, stages, *, sliced=False):
    """Return the part of a batch that each peer receives from the first one, and the number of bytes."""
    routes = Routes.among(stages, sliced=sliced)
    sent = to_parts(batch, routes)
    assert len(sent.shared) == len(routes.lines)
    found, sizes = [own_part(batch, 0, (), stages[0])], [0]
    for peer, stage in list(enumerate(stages))[1:]:
        lines = zip(routes.lines, sent.shared, strict=True)
        came = Parts(shared=[b for line, b in lines if peer in line], own=sent.own[peer : peer + 1])
        found.append(own_part(from_parts(came), peer, (), stage))
        sizes.append(sum(map(len, [*came.shared, *came.own])))
    return found, sizes


def fields_of(batch):
    """Return the fields of a batch, or the message of the refusal."""
    rows, found = TrainingBatch(batch, NumpyArrays(), "shifted"), {}
    for name in ("tokens", "labels", "position_ids", "cu_seqlens", "columns_in_row"):
        try:
            found[name] = getattr(rows, name)
        except ConfigError as error:
            found[name] = str(error)
    for name in ("scores", "images", "lang", "reward"):
        try:
            found[name] = rows.token_column(name) if name == "reward" else rows.column(name)[0]
        except ConfigError as error:
            found[name] = str(error)
    return found


def assert_has(found, whole, wanted):
    """Check that a rank has the columns of its stage, and that each other column names the way to request it."""
    mine, theirs = fields_of(found), fields_of(whole)
    for name, values in theirs.items():
        if name in COLUMNS and COLUMNS[name] not in wanted:
            assert isinstance(mine[name], str), (name, mine[name])
            assert f"no {name}; " in mine[name]
            assert "pipeline={'" in mine[name]
        else:
            np.testing.assert_array_equal(mine[name], values, strict=True)
    rows = TrainingBatch(found, NumpyArrays(), "shifted")
    assert rows.shape == TrainingBatch(whole, NumpyArrays(), "shifted").shape
    assert [name for name in COLUMNS if rows.has(name)] == [
        n for n in COLUMNS if COLUMNS[n] in wanted
    ]


@pytest.mark.parametrize("sliced", [False, True])
def test_each_stage_has_its_columns_as_the_whole_batch_has_them(sliced):
    parts = [some_rows(), some_rows()]
    if sliced:
        parts = [slice_for_cp(part, 1, 2) for part in parts]
    whole = a_batch(*parts)

    found, _ = served(whole, stages_of([0, 0, 1, 1, 2, 2]), sliced=sliced)

    for batch, wanted in zip(
        found, ["tokens images"] * 2 + [""] * 2 + ["labels scores own"] * 2, strict=True
    ):
        assert_has(batch, whole, wanted.split())
        assert (batch.step, batch.loss_tokens) == (3, 7)


def test_a_refusal_names_the_stage_the_column_and_what_to_type():
    found, _ = served(a_batch(some_rows()), stages_of([0, 1, 2, 3]))
    rows = TrainingBatch(found[1], NumpyArrays(), "shifted")

    with pytest.raises(ConfigError) as refused:
        _ = rows.tokens

    assert str(refused.value) == (
        "this rank is of stage 1 of 4 along pp, a middle one, which gets no column, and no tokens; to have it in such "
        "a stage open the mix with pipeline={'middle': ['tokens']}, or set batch.pipeline.middle of it"
    )
    for ask in (
        rows.pieces,
        lambda: rows.losses_by_document(1.0),
        lambda: np.asarray(found[1].microbatches[0].tokens_RT),
        lambda: own_images(*[found[1].microbatches[0]], found[1].microbatches, None),
    ):
        with pytest.raises(ConfigError, match="stage 1 of 4 along pp"):
            ask()
    assert repr(rows) == "TrainingBatch(step=3, tokens=[2, 32], documents=3, microbatches=1)"
    assert rows.work() == TrainingBatch(a_batch(some_rows()), NumpyArrays(), "shifted").work()


def test_what_a_stage_does_not_use_does_not_travel_to_it():
    part = some_rows(length=4096)
    whole = a_batch(part)

    _, (_, first, middle, last) = served(whole, stages_of([0, 0, 1, 2]))

    tokens, images = part.tokens_RT.nbytes, part.columns_K["images"].values_V.nbytes
    assert middle < 2000 < tokens
    assert tokens + images < first < tokens + images + 3000
    beside = part.trained_RT.nbytes + part.aligned_RT["reward"].nbytes
    assert tokens + beside < last < tokens + beside + 3000
    assert len(to_bytes(whole)) > tokens + images + beside


def test_a_rank_with_the_first_and_the_last_layers_has_both_columns_and_a_word_stands_for_all():
    whole = a_batch(some_rows())
    v_shaped = DEFAULT | {"first": ("tokens", "labels", "images"), "last": ()}

    found, sizes = served(whole, stages_of([0, 0, 1], v_shaped))
    for batch, wanted in zip(found, (["tokens", "labels", "images"],) * 2 + ([],), strict=True):
        assert_has(batch, whole, wanted)
    assert sizes[2] < sizes[1]

    everything = dict.fromkeys(DEFAULT, ("all",))
    assert len(Routes.among(stages_of([0, 1, 2], everything), sliced=False).lines) == 1
    for batch in served(whole, stages_of([0, 1, 2], everything))[0]:
        assert_has(batch, whole, COLUMNS.values())


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=5),
    st.fixed_dictionaries(
        {name: st.sets(st.sampled_from([*COLUMNS.values(), "text"])) for name in DEFAULT}
    ),
    st.booleans(),
)
def test_whatever_stages_ask_for_each_has_that_and_no_more(numbers, columns, sliced):
    whole = a_batch(slice_for_cp(some_rows(), 0, 2) if sliced else some_rows())
    stages = stages_of([0, *numbers], {name: sorted(names) for name, names in columns.items()})

    for batch, stage in zip(served(whole, stages, sliced=sliced)[0], stages, strict=True):
        assert_has(batch, whole, stage.columns)


def a_share(images):
    """Return the share of a rank that encodes some images of 48 values, whose embeddings go to rank 0."""
    return EncoderShare(
        images_I=Ragged.of([np.full(48, i, np.uint8) for i in images], np.uint8),
        grids_I2=np.ones((len(images), 2), np.int32),
        keys_I4=np.array([[0, i, 0, 0] for i in images], np.int64).reshape(-1, 4),
        num_ranks=3,
        sends_C2=counts_by_rank(np.zeros(len(images), np.int64)),
        receives_C2=np.empty((0, 2), np.int64),
        places_E=np.empty(0, np.int64),
        values_per_patch=48,
    )


def test_each_peer_is_sent_the_images_that_it_encodes_and_no_others_whatever_its_stage():
    shares = [a_share([1, 2]), a_share(range(10, 60)), a_share([])]
    rows = replace(some_rows(), encoding=replace(shares[0], others=tuple(shares[1:])))

    (mine, many, none), sizes = served(a_batch(rows, rows), stages_of([0, 1, 2]))

    for batch, share in ((mine, shares[0]), (many, shares[1]), (none, shares[2])):
        for part in batch.microbatches:
            np.testing.assert_array_equal(part.encoding.keys_I4, share.keys_I4)
            np.testing.assert_array_equal(part.encoding.images_I.values_V, share.images_I.values_V)
            assert part.encoding.others == ()
            assert (part.encoding.num_ranks, part.encoding.values_per_patch) == (3, 48)
    assert sizes[1] > 2 * 50 * 48 > sizes[2]


def test_a_rank_that_is_dealt_a_batch_of_its_own_has_the_columns_of_its_stage():
    whole = a_batch(some_rows())

    for stage in stages_of([0, 1, 2]):
        batch = own_part(from_bytes(to_bytes(whole, stage)), 0, (), stage)
        assert_has(batch, whole, stage.columns)
    assert len(to_bytes(whole, stages_of([1, 2])[0])) < len(to_bytes(whole))


def test_rows_without_tokens_are_joined_and_cut_again():
    stage = stages_of([2])[0]
    cut = own_part(a_batch(some_rows(), some_rows()), 0, (), stage)
    again = own_part(cut, 0, (), stage)

    labels = joined(again.microbatches).labels_RT

    np.testing.assert_array_equal(labels, np.concatenate([some_rows().labels_RT] * 2))
    assert joined(again.microbatches).tokens_RT.shape == (4, 32)


def test_pieces_of_a_stage_have_its_tokens_and_the_columns_that_it_gets():
    found, _ = served(a_batch(some_rows()), stages_of([0, 1, 2, 3]))
    whole = TrainingBatch(a_batch(some_rows()), NumpyArrays(), "shifted").pieces()

    pieces = TrainingBatch(found[0], NumpyArrays(), "shifted").pieces()

    assert [(piece.key, piece.tokens.tolist()) for piece in pieces] == [
        (piece.key, piece.tokens.tolist()) for piece in whole
    ]
    assert {name for piece in pieces for name in piece.columns} == {"images"}
