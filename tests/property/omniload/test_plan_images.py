"""Images dealt apart from rows: each encoded once, each embedding lands at its placeholder, rows as without them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload.base.errors import ConfigError
from omniload.machine.strategy import place, place_again
from omniload.mix.pieces import PieceTable
from omniload.mix.state import MixState
from omniload.plan.cost import QuadraticCost
from omniload.plan.dgraph import DGraph
from omniload.plan.images.dealt import ImagePlan
from omniload.plan.images.table import ImageTable
from omniload.plan.membership import Membership
from omniload.plan.place_tree import ClientPlaceTree
from omniload.plan.strategies import PlacementRequest, balanced, hybrid, placed_by
from tests.support.plane.builders import a_mix

LENGTH = 40


@st.composite
def a_step(draw):
    """Return rows of documents, each a text with images in it, as lists of (text, tokens of an image)."""
    image = st.tuples(st.integers(0, 4), st.integers(1, 6))
    document = st.lists(image, max_size=2)
    return draw(st.lists(st.lists(document, min_size=1, max_size=2), min_size=1, max_size=12))


def tables_of(rows):
    pieces, images, offsets = [], [], [0]
    for row in rows:
        for document in row:
            at = 1
            for number, (text, tokens) in enumerate(document):
                images.append((len(pieces), number, at + text, tokens, tokens * 4))
                at += text + tokens
            pieces.append((0, len(pieces), 0, 0, at, at))
        offsets.append(len(pieces))
    columns = np.array(images, np.int64).reshape(-1, 5).T
    names = ("pieces_I", "numbers_I", "firsts_I", "tokens_I", "patches_I")
    types = (np.int64, *[np.int32] * 4)
    table = ImageTable(**{n: c.astype(t) for n, c, t in zip(names, columns, types, strict=True)})
    return PieceTable.from_rows(pieces), np.array(offsets), table


def request_of(images, num_rows, dp, rows_per_microbatch=2, **mesh):
    return PlacementRequest(
        tree=ClientPlaceTree.of(dp=dp, **mesh),
        step=0,
        microbatches=max(1, -(-num_rows // (dp * rows_per_microbatch))),
        rows_per_microbatch=rows_per_microbatch,
        cost=QuadraticCost(8.0, 1.0),
        images=images,
        encoder_cost=QuadraticCost(8.0, 1.0),
    )


@given(a_step(), st.integers(1, 4))
def test_every_embedding_lands_at_the_placeholder_of_its_image(rows, dp):
    pieces, offsets, images = tables_of(rows)
    request = request_of(images, len(rows), dp)
    graph = DGraph.of_rows(pieces.lengths_P, offsets, {"sources": pieces.sources_P})

    placement = placed_by(hybrid, "hybrid", graph, request)
    plan = ImagePlan.of(images, pieces, offsets, placement, LENGTH)

    alone = balanced(graph, request)
    assert np.array_equal(placement.buckets_N, alone.buckets_N)
    assert np.array_equal(placement.microbatches_N, alone.microbatches_N)
    encoded = []
    for microbatch in range(request.microbatches):
        # What each rank trains on, laid out by hand: the image at every place, or -1.
        wanted = np.full((dp, len(rows) * LENGTH), -1)
        for rank in range(dp):
            members = placement.members_of(rank, microbatch).tolist()
            for i, row in enumerate(members):
                at = i * LENGTH
                for piece in range(offsets[row], offsets[row + 1]):
                    for image in np.flatnonzero(images.pieces_I == piece).tolist():
                        first = at + int(images.firsts_I[image])
                        wanted[rank, first : first + images.tokens_I[image]] = image
                    at += int(pieces.lengths_P[piece])
        # The all-to-all, by hand: each rank sends by destination, each receives by origin.
        sent = {}
        for rank in range(dp):
            mine = plan.encoded_by(rank, microbatch)
            encoded += mine.tolist()
            assert (np.diff(plan.dp_ranks_I[mine]) >= 0).all()
            for to in range(dp):
                sent[rank, to] = mine[plan.dp_ranks_I[mine] == to].tolist()
        for rank in range(dp):
            arrived = [image for origin in range(dp) for image in sent[origin, rank]]
            assert arrived == plan.arriving_at(rank, microbatch).tolist()
            found = np.full(len(rows) * LENGTH, -1)
            for image in arrived:
                place, tokens = int(plan.places_I[image]), int(plan.tokens_I[image])
                key = plan.keys_I4[image]
                same = (images.pieces_I == key[1]) & (images.numbers_I == key[3])
                found[place : place + tokens] = np.flatnonzero(same)[0]
            assert np.array_equal(found, wanted[rank])
    assert sorted(encoded) == list(range(len(images)))


@given(a_step(), st.integers(1, 4))
def test_the_part_of_some_ranks_holds_what_they_encode_and_train_on(rows, dp):
    pieces, offsets, images = tables_of(rows)
    graph = DGraph.of_rows(pieces.lengths_P, offsets, {"sources": pieces.sources_P})
    request = request_of(images, len(rows), dp)
    plan = ImagePlan.of(images, pieces, offsets, hybrid(graph, request), LENGTH)
    part = plan.part_of([0])

    for microbatch in range(request.microbatches):
        for of in ("encoded_by", "arriving_at"):
            whole = plan.take(getattr(plan, of)(0, microbatch)).keys_I4
            assert np.array_equal(part.take(getattr(part, of)(0, microbatch)).keys_I4, whole)


@given(a_step(), st.integers(1, 3), st.integers(1, 3))
def test_a_step_placed_anew_deals_its_images_as_if_the_ranks_had_always_been_there(rows, dp, later):
    pieces, offsets, images = tables_of(rows)
    mix = a_mix(rows=len(rows), length=LENGTH, micro_rows=1, balance={"strategy": "hybrid"})
    nothing = np.zeros(2, np.int64)
    membership = Membership(
        pieces=pieces,
        row_offsets=offsets,
        finished_S=nothing,
        served_S=(0, 0),
        dropped_S=nothing,
        lost_S=nothing,
        after=MixState.start(2),
    )
    state = MixState.start(2)
    before, wanted = (
        place(mix, ClientPlaceTree.of(dp=n), state, membership, images=images) for n in (dp, later)
    )

    again = place_again(mix, ClientPlaceTree.of(dp=later), before)

    assert (again.images is None) == (wanted.images is None)
    if again.images is not None:
        for name in ("keys_I4", "dp_ranks_I", "microbatches_I", "places_I", "encoders_I"):
            found, expected = getattr(again.images, name), getattr(wanted.images, name)
            assert np.array_equal(found, expected), name
        assert again.images.num_ranks == later
    assert again.membership_digest() == before.membership_digest()


def test_ranks_that_share_rows_are_refused():
    pieces, offsets, images = tables_of([[[(0, 4)]], [[(1, 4)]]])
    graph = DGraph.of_rows(pieces.lengths_P, offsets, {"sources": pieces.sources_P})

    with pytest.raises(ConfigError, match="mesh of 2 ranks has dp 1; use dp alone"):
        hybrid(graph, request_of(images, 2, 1, cp=2))


def test_a_stranger_that_deals_images_to_no_rank_is_refused():
    pieces, offsets, images = tables_of([[[(0, 4)]], [[(1, 4)]]])
    graph = DGraph.of_rows(pieces.lengths_P, offsets, {"sources": pieces.sources_P})

    def wrong(rows, request):
        placement = hybrid(rows, request)
        return type(placement)(
            **{n: getattr(placement, n) for n in placement.__slots__ if n != "encoders_I"},
            encoders_I=placement.encoders_I + 2,
        )

    with pytest.raises(ConfigError, match="one of 2 ranks, from 0, for each of 2"):
        placed_by(wrong, "wrong", graph, request_of(images, 2, 2))
