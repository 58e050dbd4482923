"""Images dealt apart from rows: each is encoded once, each embedding lands at its placeholder, rows stay the same."""

import math
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload.base.errors import ConfigError
from omniload.base.ragged import Ragged
from omniload.batch.encoding import EncoderShare
from omniload.batch.slices import cp_indices
from omniload.front.launch import Launch, place_of
from omniload.machine.images import routes_of
from omniload.machine.strategy import place, place_again
from omniload.mix.pieces import PieceTable
from omniload.mix.state import MixState
from omniload.plan.cost import QuadraticCost
from omniload.plan.dgraph import DGraph
from omniload.plan.images.dealt import ImagePlan
from omniload.plan.images.table import ImageTable
from omniload.plan.membership import Membership
from omniload.plan.place_tree import ClientPlaceTree
from omniload.plan.records import PieceFacts
from omniload.plan.strategies import PlacementRequest, balanced, hybrid, placed_by
from tests.support.plane.builders import a_mix

LENGTH = 96
"""A multiple of 2 * cp for each drawn cp."""


@st.composite
def a_step(draw, least=0):
    """Return rows of documents, each as the text at its start and its images, as (text before, tokens) each."""
    image = st.tuples(st.integers(0, 4), st.integers(1, 6))
    document = st.tuples(st.integers(1, 24), st.lists(image, min_size=least, max_size=2))
    row = st.lists(document, min_size=1 + least, max_size=2)
    return draw(st.lists(row, min_size=1 + 3 * least, max_size=12))


def tables_of(rows):
    pieces, images, offsets = [], [], [0]
    for row in rows:
        for begins, document in row:
            at = begins
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


def request_of(images, num_rows, tree, rows_per_microbatch=2):
    return PlacementRequest(
        tree=tree,
        step=0,
        microbatches=max(1, -(-num_rows // (tree.size_of("dp") * rows_per_microbatch))),
        rows_per_microbatch=rows_per_microbatch,
        cost=QuadraticCost(8.0, 1.0),
        images=images,
        encoder_cost=QuadraticCost(8.0, 1.0),
    )


@st.composite
def some_sizes(draw, axes):
    """Return sizes of axes in any order, of up to 12 ranks; the first named axes are the largest."""
    sizes, left = {}, 12
    for axis in axes:
        sizes[axis] = draw(st.integers(1, min(3, left)))
        left //= sizes[axis]
    return {axis: sizes[axis] for axis in draw(st.permutations(axes))}


@st.composite
def a_tree(draw):
    """Return a mesh of up to 12 ranks, its axes in any order."""
    sizes = draw(some_sizes(("cp", "dp", "tp", "pp", "ep")))
    return ClientPlaceTree(axes=tuple(sizes), sizes=tuple(sizes.values()))


@dataclass
class Mesh:
    """A fake of torch's mesh, as this rank sees it."""

    mesh_dim_names: tuple[str, ...]
    mesh: np.ndarray
    rank: int

    def size(self, mesh_dim=None):
        return self.mesh.shape[mesh_dim]

    def get_coordinate(self):
        return np.argwhere(self.mesh == self.rank)[0].tolist()


@st.composite
def a_mesh(draw):
    """Return names and numbers of a mesh: axes in any order, rank 0 at the beginning and the others anywhere."""
    sizes = draw(some_sizes(("cp", "dp_shard", "tp", "dp_replicate", "pp", "ep")))
    others = list(range(1, math.prod(sizes.values())))
    numbers = [0, *draw(st.one_of(st.just(others), st.permutations(others)))]
    return tuple(sizes), np.array(numbers).reshape(tuple(sizes.values()))


def planned(rows, tree):
    """Return hybrid's result for a step: its request, placement, images and plan of them, and its boundaries."""
    pieces, offsets, images = tables_of(rows)
    request = request_of(images, len(rows), tree)
    graph = DGraph.of_rows(pieces.lengths_P, offsets, {"sources": pieces.sources_P})
    placement = placed_by(hybrid, "hybrid", graph, request)
    plan = ImagePlan.of(images, pieces, offsets, placement, LENGTH)

    alone = balanced(graph, request)
    assert np.array_equal(placement.buckets_N, alone.buckets_N)
    assert np.array_equal(placement.microbatches_N, alone.microbatches_N)
    return request, placement, images, plan, offsets, pieces


def embedding_of(image, number):
    """Return a number that differs for all embeddings of the step."""
    return image * LENGTH + number


def wanted_in(rows, step, dp, microbatch):
    """Return the rows of a dp rank laid out by hand, ``[R, T]``: the embedding of each place, or -1."""
    _, placement, images, _, offsets, pieces = step
    found = np.full((len(rows), LENGTH), -1)
    for i, row in enumerate(placement.members_of(dp, microbatch).tolist()):
        at = 0
        for piece in range(offsets[row], offsets[row + 1]):
            for image in np.flatnonzero(images.pieces_I == piece).tolist():
                for k in range(images.tokens_I[image]):
                    found[i, at + images.firsts_I[image] + k] = embedding_of(image, k)
            at += int(pieces.lengths_P[piece])
    return found


def shares_of(step, dp, microbatch, part):
    """Return the joined shares of a dp rank's ranks, from its constructor's part of the plan."""
    images = step[2]
    shares = []
    for route in routes_of(part, dp, microbatch):
        keys_I4 = part.keys_I4[route.images]
        ids = [
            int(np.flatnonzero((images.pieces_I == key[1]) & (images.numbers_I == key[3]))[0])
            for key in keys_I4
        ]
        made = [[embedding_of(i, k) for k in range(images.tokens_I[i])] for i in ids]
        shares.append(
            EncoderShare(
                images_I=Ragged.of([np.array(each) for each in made], np.int64),
                grids_I2=np.empty((0, 2), np.int32),
                keys_I4=keys_I4,
                num_ranks=part.num_ranks,
                sends_C2=route.sends_C2,
                receives_C2=route.receives_C2,
                places_E=route.places_E,
                order_M=route.order_M,
            )
        )
    return replace(shares[0], others=tuple(shares[1:]))


def exchanged(shares_W):
    """Return the input of each rank's first layer, place by place, after a hand-made all-to-all."""
    boxes = {}
    for rank, share in enumerate(shares_W):
        made = share.images_I.values_V
        sent = made if share.order_M is None else made[share.order_M]
        assert len(sent) == len(made) == share.sends_W.sum()
        for to, box in enumerate(np.split(sent, np.cumsum(share.sends_W)[:-1])):
            boxes[rank, to] = box
    found = []
    for rank, share in enumerate(shares_W):
        got = [boxes[origin, rank] for origin in range(len(shares_W))]
        assert [len(box) for box in got] == share.receives_W.tolist()
        places = share.places_E.tolist()
        assert len(set(places)) == len(places)
        found.append(dict(zip(places, np.concatenate(got).tolist(), strict=True)))
    return found


def require_landed(rows, step, places_W, found_W, microbatch):
    """Require that each embedding is once in the slice with its placeholder, at the rank that fetches."""
    cp = step[0].tree.size_of("cp")
    for (dp, cp_rank, fetches), found in zip(places_W, found_W, strict=True):
        whole = wanted_in(rows, step, dp, microbatch)
        flat = whole[:, cp_indices(LENGTH, cp_rank, cp)].reshape(-1)
        wanted = {at: int(flat[at]) for at in np.flatnonzero(flat >= 0).tolist()}
        assert found == (wanted if fetches else {})


def fields_of(plan):
    values = [getattr(plan, field.name) for field in fields(plan)]
    return [each.tolist() if isinstance(each, np.ndarray) else each for each in values]


@given(st.one_of(a_step(), a_step(least=1)), a_tree())
def test_every_embedding_lands_at_the_placeholder_of_its_image_on_any_mesh(rows, tree):
    step = planned(rows, tree)
    request, _, images, plan, *_ = step
    at_W = [tree.coordinates_of(rank) for rank in range(tree.world_size)]
    places_W = [(at["dp"], at["cp"], at["tp"] == at["pp"] == at["ep"] == 0) for at in at_W]
    parts = [plan.part_of([dp]) for dp in range(tree.size_of("dp"))]
    at_once = plan.parts_of(np.arange(tree.size_of("dp")), tree.size_of("dp"))
    assert [fields_of(part) for part in at_once] == [fields_of(part) for part in parts]

    encoded = []
    for microbatch in range(request.microbatches):
        shares = [shares_of(step, dp, microbatch, part) for dp, part in enumerate(parts)]
        own_W = []
        for rank, (dp, cp_rank, _) in enumerate(places_W):
            peers = tree.ranks_at(dp=dp, cp=cp_rank)
            of_place = shares[dp].of_place(cp_rank, tree.size_of("cp"))
            own_W.append(of_place.of_peer(peers.index(rank)))
        encoded += [tuple(key) for share in own_W for key in share.keys_I4.tolist()]
        require_landed(rows, step, places_W, exchanged(own_W), microbatch)
    assert len(encoded) == len(set(encoded)) == len(images)


@given(a_step(least=1), a_mesh())
def test_ranks_are_counted_as_the_job_numbers_them_whatever_the_mesh(rows, mesh):
    names, numbers = mesh
    places = [
        place_of(
            Launch(rank=rank, world_size=numbers.size, attempt="", found_in="the test"),
            Mesh(names, numbers, rank),
        )
        for rank in range(numbers.size)
    ]
    tree = ClientPlaceTree.of(
        dp=places[0].dp_size, cp=places[0].cp_size, tp=max(1, len(places[0].peers))
    )
    step = planned(rows, tree)
    request, _, images, plan, *_ = step
    places_W = [(p.dp_rank, p.cp_rank, p.fetches(rank)) for rank, p in enumerate(places)]

    encoded = 0
    for microbatch in range(request.microbatches):
        own_W = []
        for rank, at in enumerate(places):
            shares = shares_of(step, at.dp_rank, microbatch, plan)
            of_place = shares.of_place(at.cp_rank, at.cp_size)
            peer = at.peers.index(rank) if at.peers else 0
            own_W.append(of_place.of_peer(peer).numbered(at.ranks))
        encoded += sum(len(share.keys_I4) for share in own_W)
        require_landed(rows, step, places_W, exchanged(own_W), microbatch)
    assert encoded == len(images)


@given(a_step(), st.integers(1, 4))
def test_embeddings_leave_as_they_are_made_where_every_rank_has_rows_of_its_own(rows, dp):
    request, *_, plan, _, _ = planned(rows, ClientPlaceTree.of(dp=dp))

    for microbatch in range(request.microbatches):
        for rank in range(dp):
            (route,) = routes_of(plan, rank, microbatch)
            assert route.order_M is None


@given(a_step(), a_tree())
def test_images_are_spread_over_all_ranks_of_the_mesh(rows, tree):
    """In each microbatch no rank has more than the mean plus its heaviest image, the guarantee of dealing by cost."""
    request, placement, images, *_, offsets, _ = planned(rows, tree)
    costs_I = request.encoder_cost(images.patches_I)
    microbatches_I = placement.microbatches_N[images.rows_I(offsets)]

    for microbatch in range(request.microbatches):
        mine = microbatches_I == microbatch
        loads_W = np.bincount(placement.encoders_I[mine], costs_I[mine], tree.world_size)
        assert len(loads_W) == tree.world_size
        assert loads_W.max() <= loads_W.mean() + costs_I[mine].max(initial=0.0) + 1e-6


@given(a_step(), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_a_step_placed_anew_deals_its_images_as_if_the_ranks_had_always_been_there(
    rows, dp, later, cp
):
    pieces, offsets, images = tables_of(rows)
    mix = a_mix(rows=len(rows), length=LENGTH, micro_rows=1, balance={"strategy": "hybrid"})
    nothing = np.zeros(2, np.int64)
    membership = Membership(
        pieces=pieces,
        row_offsets=offsets,
        finished_S=nothing,
        served_S=(0, 0),
        lost_S=nothing,
        after=MixState.start(2),
    )
    state = MixState.start(2)
    before, wanted = (
        place(mix, ClientPlaceTree.of(dp=n, cp=cp), state, membership, PieceFacts(images=images))
        for n in (dp, later)
    )

    again = place_again(mix, ClientPlaceTree.of(dp=later, cp=cp), before)

    assert (again.images is None) == (wanted.images is None)
    if again.images is not None:
        for name in ("keys_I4", "dp_ranks_I", "microbatches_I", "places_I", "encoders_I"):
            found, expected = getattr(again.images, name), getattr(wanted.images, name)
            assert np.array_equal(found, expected), name
        assert again.images.num_ranks == later * cp
    assert again.membership_digest() == before.membership_digest()


def test_a_stranger_that_deals_images_to_no_rank_is_refused():
    pieces, offsets, images = tables_of([[(1, [(0, 4)])], [(1, [(1, 4)])]])
    graph = DGraph.of_rows(pieces.lengths_P, offsets, {"sources": pieces.sources_P})

    def wrong(rows, request):
        placement = hybrid(rows, request)
        return type(placement)(
            **{n: getattr(placement, n) for n in placement.__slots__ if n != "encoders_I"},
            encoders_I=placement.encoders_I + 2,
        )

    with pytest.raises(
        ConfigError, match=r"image 0 goes to rank of the tree [23] of 2, numbered from 0"
    ):
        placed_by(wrong, "wrong", graph, request_of(images, 2, ClientPlaceTree.of(tp=2)))
