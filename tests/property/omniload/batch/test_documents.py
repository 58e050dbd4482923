"""Documents that a sample joins and keeps apart: the batch's description of each token, and the plan's costs.

The model looks at one token after another.
"""

from dataclasses import replace
from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload.base.ragged import Ragged
from omniload.batch.arrays import NumpyArrays
from omniload.batch.digest import microbatch_digest
from omniload.batch.microbatch import IGNORE_LABEL, Batch
from omniload.batch.rows import documents_of, split_rows
from omniload.batch.slices import joined, slice_for_cp, whole_rows
from omniload.batch.wire import from_bytes, to_bytes
from omniload.front.batches.rows import PackedRows
from omniload.machine.metadata.samples import SampleMetadata
from omniload.machine.strategy import place
from omniload.mix.columns import DOCUMENT_STARTS, LOSS_MASK, metadata_of, starts_in
from omniload.mix.pieces import PieceTable
from omniload.mix.state import MixState
from omniload.plan.images.table import ImageTable
from omniload.plan.membership import Membership
from omniload.plan.place_tree import ClientPlaceTree
from omniload.plan.records import PieceFacts, of_documents
from tests.support.plane.builders import a_microbatch, a_mix, a_table, pieces_of, tokens_of

LENGTH = 12
lengths = st.lists(st.integers(1, 6), min_size=1, max_size=4)


@st.composite
def rows_of_documents(draw):
    """Draw rows, each a list of samples, each given by the lengths of its documents; together they fit a row."""
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        row, left = [], LENGTH
        for sample in draw(st.lists(lengths, max_size=3)):
            if sum(sample) <= left:
                row.append(sample)
                left -= sum(sample)
        rows.append(row)
    return rows


def built(rows, *, with_column=True):
    """Return the rows as a microbatch; samples follow one another in sources 0 and 1."""
    number, pieces = iter(range(1000)), []
    pieces.extend(
        [[i % 2, next(number), 0, 0, sum(each), sum(each)] for i, each in enumerate(row)]
        for row in rows
    )
    microbatch = a_microbatch(pieces, length=LENGTH)
    starts = [np.cumsum(sample)[:-1] for sample in chain(*rows)]
    column = {DOCUMENT_STARTS: Ragged.of(starts)} if with_column else {}
    return replace(microbatch, columns_K=column)


def model_of(rows):
    """Return positions and labels of each token, bounds of documents, and the source of each."""
    positions, labels, sizes, sources, number = [], [], [], [], iter(range(1000))
    for row in rows:
        for i, sample in enumerate(row):
            tokens = tokens_of(i % 2, next(number), 0, sum(sample)).tolist()
            for start, stop in pairwise([0, *np.cumsum(sample).tolist()]):
                positions += range(stop - start)
                labels += [*tokens[start + 1 : stop], IGNORE_LABEL]
                sizes.append(stop - start)
                sources.append(i % 2)
        if padding := LENGTH - sum(map(sum, row)):
            positions += [0] * padding
            labels += [IGNORE_LABEL] * padding
            sizes.append(padding)
            sources.append(-1)
    return positions, labels, np.cumsum([0, *sizes]).tolist(), sources


@given(rows_of_documents(), st.sampled_from([1, 2, 3]))
def test_positions_labels_and_bounds_stay_within_documents_on_every_cp_peer(rows, peers):
    whole = built(rows)
    positions, labels, bounds, sources = model_of(rows)
    shape = (len(rows), LENGTH)

    assert whole.labels_RT.reshape(-1).tolist() == labels
    found = documents_of(whole)
    assert found.cu_seqlens.tolist() == bounds
    assert found.positions.reshape(-1).tolist() == positions
    assert whole.max_seqlen == max(np.diff(bounds))
    shown = PackedRows(whole, NumpyArrays(), "shifted")
    assert shown.document_sources.tolist() == sources
    kept = [n for n, source in zip(np.diff(bounds).tolist(), sources, strict=True) if source >= 0]
    work = sum(kept), sum(n * n for n in kept)
    assert shown.work() == work
    of = np.repeat(np.arange(len(sources)), np.diff(bounds)).reshape(shape)
    allowed = (of[:, :, None] == of[:, None, :]) & np.tri(LENGTH, dtype=bool)
    assert np.array_equal(shown.attention_mask[:, 0], allowed)
    parts = [slice_for_cp(whole, peer, peers) for peer in range(peers)]
    for part in parts:
        own = documents_of(part)
        assert own.cu_seqlens.tolist() == bounds
        assert np.array_equal(own.positions, np.reshape(positions, shape)[:, part.indices_C])
        assert np.array_equal(part.labels_RC, np.reshape(labels, shape)[:, part.indices_C])
        seen = PackedRows(part, NumpyArrays(), "shifted")
        assert seen.document_sources.tolist() == sources
        assert seen.work() == work
    again = whole_rows(
        parts[0], np.stack([p.tokens_RC for p in parts]), np.stack([p.labels_RC for p in parts])
    )
    assert microbatch_digest(again) == microbatch_digest(whole)


@given(rows_of_documents(), st.data())
def test_rows_cut_apart_sent_and_joined_again_have_the_same_documents(rows, data):
    whole = built(rows)
    first = data.draw(st.integers(0, len(rows)))
    offsets = np.cumsum([0, *map(len, rows)])

    parts = split_rows(whole, [first, len(rows) - first], offsets)
    batch = Batch(step=0, microbatches=parts, loss_tokens=1, imbalance=1.0, bound=1.0)
    sent = from_bytes(to_bytes(batch)).microbatches

    assert sum(map(microbatch_digest, sent)) % (1 << 64) == microbatch_digest(whole)
    found = documents_of(joined(sent))
    assert found.cu_seqlens.tolist() == documents_of(whole).cu_seqlens.tolist()
    assert np.array_equal(found.positions, documents_of(whole).positions)


@given(rows_of_documents())
def test_a_digest_knows_where_documents_begin_and_that_of_other_rows_is_what_it_was(rows):
    apart, plain = built(rows), built(rows, with_column=False)

    several = any(len(sample) > 1 for sample in chain(*rows))
    assert (microbatch_digest(apart) != microbatch_digest(plain)) == several
    # This must also work if no label is left that would show it.
    silent = {"trained_RT": np.zeros((len(rows), LENGTH), np.bool_)}
    digests = [microbatch_digest(replace(each, **silent)) for each in (apart, plain)]
    assert (digests[0] != digests[1]) == several


samples = st.lists(lengths, min_size=1, max_size=8)


@given(samples, samples, st.booleans(), st.data())
def test_a_plan_costs_each_document_and_counts_the_labels_within(first, second, masked, data):
    """Source 0 has bounds of documents, with or without a mask; source 1 has none."""
    tables = [a_table([sum(sample) for sample in each]) for each in (first, second)]
    offsets = np.cumsum([0, *map(sum, first)])
    starts = np.cumsum([0, *chain(*first)])
    others = {DOCUMENT_STARTS: starts_in(starts, offsets)}
    if masked:
        trained = np.ones(offsets[-1], np.bool_)
        trained[starts[:-1]] = False
        others[LOSS_MASK] = Ragged(values_V=trained, offsets=offsets)
    metadata = SampleMetadata()
    metadata.add(0, replace(tables[0], metadata=metadata_of(others)))
    metadata.add(1, tables[1])
    drawn = data.draw(
        st.lists(
            st.sampled_from(
                [(s, p) for s, each in enumerate((first, second)) for p in range(len(each))]
            ),
            min_size=1,
            unique=True,
        )
    )
    documents = [(first[p] if s == 0 else [sum(second[p])]) for s, p in drawn]
    sizes = [sum(each) for each in documents]
    pieces = pieces_of(*[[s, p, 0, 0, n, n] for (s, p), n in zip(drawn, sizes, strict=True)])

    facts = metadata.of(pieces)

    lengths_of = facts.documents
    if all(len(each) == 1 for each in documents):
        assert lengths_of is None
    else:
        assert [lengths_of[i].tolist() for i in range(len(drawn))] == documents
    # All samples of source 0 are there, and no others: labels after the first token of each document.
    nothing = np.zeros(2, np.int64)
    rows = Membership(
        pieces=pieces,
        row_offsets=np.arange(len(drawn) + 1),
        finished_S=nothing,
        served_S=(0, 0),
        lost_S=nothing,
        after=MixState.start(2),
    )
    mix = a_mix(length=32, rows=len(drawn), micro_rows=1)
    plan = place(mix, ClientPlaceTree.of(dp=2), MixState.start(2), rows, facts)
    assert plan.loss_tokens == sum(n - 1 for each in documents for n in each)
    costs = [sum(768 * n + n * n for n in each) for each in documents]
    loads = np.bincount(plan.dp_ranks_R, costs, 2)
    assert plan.imbalance == pytest.approx(loads.max() / loads.mean())


@given(st.lists(lengths, min_size=1, max_size=6), st.data())
def test_to_costs_a_document_is_a_piece_where_it_lies(samples_of, data):
    sizes = [sum(sample) for sample in samples_of]
    pieces = pieces_of(*[[0, i, 0, 0, n, n] for i, n in enumerate(sizes)])
    cuts = sorted(data.draw(st.sets(st.integers(1, len(sizes) - 1)))) if len(sizes) > 1 else []
    row_offsets = np.array([0, *cuts, len(sizes)])
    images = replace(ImageTable.empty(), pieces_I=np.arange(len(sizes)))
    documents = Ragged.of([np.array(sample) for sample in samples_of])

    found = of_documents(pieces, row_offsets, PieceFacts(images=images, documents=documents))

    expected = [
        [0, i, 0, start, stop, sizes[i]]
        for i, sample in enumerate(samples_of)
        for start, stop in pairwise([0, *np.cumsum(sample).tolist()])
    ]
    assert found.pieces.rows() == expected
    for r, (a, b) in enumerate(pairwise(row_offsets.tolist())):
        inside = found.pieces.positions_P[found.row_offsets[r] : found.row_offsets[r + 1]]
        assert sorted(set(inside.tolist())) == list(range(a, b))
    assert found.pieces.positions_P[found.images.pieces_I].tolist() == list(range(len(sizes)))
    assert isinstance(found.pieces, PieceTable)
