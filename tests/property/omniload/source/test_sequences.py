"""Documents joined to sequences: the unit's documents and a length decide all, and no token is lost.

The oracle is the recipe ``group_texts`` of Hugging Face's ``run_clm`` without its last line: the rest is not dropped.
"""

from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload.base.errors import IntegrityError
from omniload.base.ragged import Ragged
from omniload.mix.columns import LOSS_MASK
from omniload.mix.config import OnError, ShuffleConfig
from omniload.mix.order import Order
from omniload.mix.schema.transforms import ConcatTransform, FilterTransform, MiddleTransform
from omniload.source.block_memory import BlockMemory
from omniload.source.distinct.drawn_before import DrawnBefore
from omniload.source.distinct.first_seen import Bits
from omniload.source.distinct.mask import RecordRules
from omniload.source.formats.format import Records
from omniload.source.record_source import RecordSource
from omniload.source.transforms import sequences
from omniload.source.transforms.fill_in_middle import MiddleFiller
from omniload.source.transforms.pipeline import Pipeline
from tests.property.omniload.source.test_parts import divided
from tests.property.omniload.source.test_records import ListFormat, contents

METHODS = ("none", "shards", "block", "units", "full")
FIM = MiddleTransform(type="fim", prefix=200, suffix=201, middle=202)
methods = st.sampled_from(METHODS)
cuts = st.lists(st.integers(0, 25), max_size=6)


class MaskedFormat(ListFormat):
    """Token lists whose even tokens are trained on."""

    def read_unit(self, unit):
        records = super().read_unit(unit)
        column = records.column
        mask = Ragged(values_V=column.values_V % 2 == 0, offsets=column.offsets)
        return Records(
            column=column,
            bad_B=records.bad_B,
            reason=records.reason,
            others={LOSS_MASK: mask},
        )


def an_order(units, method="block", block_units=2):
    table = ListFormat(units).units()
    shuffle = ShuffleConfig(method=method, block_units=block_units)
    return Order(table.rows_U, table.shards_U, seed=5, source="web", shuffle=shuffle)


def a_source(
    units,
    method="block",
    *,
    tokens=None,
    documents="joined",
    least=None,
    drawn=(),
    block_units=2,
    fim=False,
    held=None,
):
    """Return a source, joined to ``tokens`` if given, without the records that another loader had drawn."""
    held = held or (ListFormat(units) if fim else MaskedFormat(units))
    table = held.units()
    transforms = [
        *([FIM] if fim else []),
        *(
            []
            if tokens is None
            else [ConcatTransform(type="concat", tokens=tokens, documents=documents)]
        ),
        *([] if least is None else [FilterTransform(type="filter", min_tokens=least)]),
    ]
    filler = MiddleFiller(rate=0.5, spm=0.5, marks=(200, 201, 202), end=None, key=9)
    pipeline = Pipeline(None, transforms).with_fillers({FIM: filler} if fim else {})
    before = None
    if drawn:
        bits = Bits.none(int(table.rows_U.sum()))
        bits.set(np.array(sorted(drawn)))
        before = DrawnBefore(bits, table.rows_U)
    rules = RecordRules(on_error=OnError(policy="skip", limit=10_000), drawn_before=before)
    order = an_order(units, method, block_units)
    return RecordSource("web", order, held, pipeline=pipeline, rules=rules)


def rows_of(block):
    """Return the read values, one for each sample."""
    columns = {"tokens": block.tokens, **block.others}
    keys = zip(block.table.positions_N.tolist(), block.table.subs_N.tolist(), strict=True)
    return [
        (*key, *((name, column[i].tolist()) for name, column in sorted(columns.items())))
        for i, key in enumerate(keys)
    ]


def group_texts(examples, block_size):
    concatenated = {k: list(chain(*examples[k])) for k in examples}
    total_length = len(concatenated[next(iter(examples))])
    return {
        k: [t[i : i + block_size] for i in range(0, total_length, block_size)]
        for k, t in concatenated.items()
    }


def expected_of(plain, order, epoch, length, *, apart=False):
    """Return the sequences of an epoch by position, made of the documents of the same source without joining.

    If documents stay apart, each sequence also has the places where a new document begins.
    """
    n = plain.positions_per_epoch
    found = order.locate(epoch * n, (epoch + 1) * n)
    places = list(zip(found.units_N.tolist(), found.rows_N.tolist(), strict=True))
    documents = {places[row[0] - epoch * n]: dict(row[2:]) for row in rows_of(_all(plain, epoch))}
    position_of = {place: epoch * n + i for i, place in enumerate(places)}
    expected = []
    for unit in {unit for unit, _ in places}:
        there = sorted(place for place in documents if place[0] == unit)
        if not there:
            continue
        if apart:
            for number, place in enumerate(there):
                document = documents[place]
                document["document_starts"] = [number] * len(document["tokens"])
                if "loss_mask" in document:
                    document["loss_mask"][:1] = [False] * len(document["loss_mask"][:1])
        names = sorted(documents[there[0]])
        cut = group_texts({k: [documents[place][k] for place in there] for k in names}, length)
        if apart:
            cut["document_starts"] = [
                [i for i in range(1, len(of)) if of[i] != of[i - 1]]
                for of in cut["document_starts"]
            ]
        owners = list(chain(*([place] * len(documents[place]["tokens"]) for place in there)))
        begun = [owners[i * length] for i in range(len(cut["tokens"]))]
        expected += [
            (position_of[place], begun[:i].count(place), *((k, cut[k][i]) for k in names))
            for i, place in enumerate(begun)
        ]
    return sorted(expected)


def _all(source, epoch):
    n = source.positions_per_epoch
    return source.read(epoch * n, (epoch + 1) * n)


@given(
    contents,
    methods,
    st.integers(2, 7),
    st.booleans(),
    st.booleans(),
    st.sets(st.integers(0, 47), max_size=9),
    st.integers(0, 2),
)
def test_an_epoch_gives_what_the_documents_of_each_unit_come_to_end_to_end(
    units, method, length, fim, apart, drawn, epoch
):
    total = sum(map(len, units))
    made = {"fim": fim, "drawn": {each for each in drawn if each < total}}
    plain = a_source(units, method, **made)
    documents = "apart" if apart else "joined"

    found = rows_of(
        _all(a_source(units, method, tokens=length, documents=documents, **made), epoch)
    )

    assert sorted(found) == found
    assert found == expected_of(plain, an_order(units, method), epoch, length, apart=apart)


@given(contents, methods, st.integers(2, 7), st.integers(0, 2))
def test_nothing_is_lost_and_the_last_sample_of_a_unit_alone_is_short(units, method, length, epoch):
    source = a_source(units, method, tokens=length)

    found = [dict(row[2:])["tokens"] for row in rows_of(_all(source, epoch))]

    totals = [sum(len(record or ()) for record in unit) for unit in units]
    assert sum(map(len, found)) == sum(totals)
    shorter = sorted(len(tokens) for tokens in found if len(tokens) != length)
    assert shorter == sorted(total % length for total in totals if total % length)


@given(
    contents,
    methods,
    st.integers(1, 4),
    st.integers(2, 7),
    st.booleans(),
    st.sampled_from(["joined", "apart"]),
    st.none() | st.integers(2, 4),
    st.integers(1, 4),
    st.integers(0, 60),
    cuts,
    st.lists(st.sampled_from(["there", "opening", "lost"]), min_size=1, max_size=9),
    st.sampled_from([None, 1, 200]),
)
def test_any_split_of_a_range_among_any_readers_gives_the_same_sequences(
    units,
    method,
    block_units,
    length,
    fim,
    documents,
    least,
    readers,
    start,
    lengths,
    fates,
    limit_bytes,
):
    def make():
        return a_source(
            units,
            method,
            tokens=length,
            documents=documents,
            fim=fim,
            least=least,
            block_units=block_units,
        )

    stops = (start + np.cumsum([0, *lengths])).tolist()
    whole = make().read(start, stops[-1])
    source, _ = divided(make, readers, fates)
    source.own.share(BlockMemory(limit_bytes))

    blocks = [source.read(a, b) for a, b in pairwise(stops)]

    assert [row for block in blocks for row in rows_of(block)] == rows_of(whole)
    assert sum(block.skipped for block in blocks) == whole.skipped
    for block in blocks:
        assert block.table.lengths_N.tolist() == block.tokens.lengths_N.tolist()


def test_one_block_that_every_epoch_reads_is_joined_of_what_that_epoch_makes_of_its_documents():
    units = [[list(range(i, i + 12)) for i in range(20)]]

    def epoch_of(source, epoch):
        n = source.positions_per_epoch
        return rows_of(source.read(epoch * n, (epoch + 1) * n))

    source = a_source(units, "none", tokens=7, fim=True)
    found = [epoch_of(source, epoch) for epoch in range(3)]

    alone = [epoch_of(a_source(units, "none", tokens=7, fim=True), epoch) for epoch in range(3)]
    assert found == alone
    # Otherwise filled in the middle, at the same places of their epochs.
    assert len({str([row[2:] for row in rows]) for rows in found}) == 3


@given(contents, methods, st.integers(2, 7), st.integers(0, 2), st.sets(st.integers(0, 3)))
def test_without_some_shards_those_of_the_others_are_the_same(
    units, method, length, epoch, without
):
    whole = a_source(units, method, tokens=length)
    n = whole.positions_per_epoch

    found = a_source(units, method, tokens=length).read(
        epoch * n, (epoch + 1) * n, tuple(sorted(without))
    )

    expected = [row for row in rows_of(_all(whole, epoch)) if whole.shard_at(row[0]) not in without]
    assert rows_of(found) == expected


@given(contents, methods, st.integers(2, 7), st.integers(2, 7))
def test_a_filter_behind_leaves_short_ones_out(units, method, length, least):
    found = rows_of(_all(a_source(units, method, tokens=length, least=least), 0))

    every = [dict(row[2:]) for row in rows_of(_all(a_source(units, method, tokens=length), 0))]
    kept = [each for each in every if len(each["tokens"]) >= least]
    assert [dict(row[2:]) for row in found] == kept


@given(contents, st.integers(1, 4))
def test_an_epoch_read_in_order_decodes_every_unit_once(units, step):
    held = MaskedFormat(units)
    source = a_source(units, tokens=3, held=held)
    n = source.positions_per_epoch

    source.decode_ahead(0, 1)
    for at in range(0, n, step):
        source.read(at, min(n, at + step))

    assert sorted(held.decoded) == [i for i, unit in enumerate(units) if unit]


@given(contents)
def test_a_source_of_one_block_is_joined_once_for_all_epochs(units):
    held = MaskedFormat(units)
    source = a_source(units, block_units=8, tokens=3, held=held)

    source.read(0, 5 * source.positions_per_epoch)

    assert sorted(held.decoded) == [i for i, unit in enumerate(units) if unit]


def test_more_sequences_of_a_record_than_a_key_can_tell_are_refused(monkeypatch):
    monkeypatch.setattr(sequences, "SUB_LIMIT", 3)
    source = a_source([[[1, 2, 3, 4, 5, 6, 7]]], tokens=2)

    with pytest.raises(IntegrityError, match="4 sequences of 2 tokens begin in one record"):
        source.read(0, 1)
