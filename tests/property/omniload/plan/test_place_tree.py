from hypothesis import given
from hypothesis import strategies as st

from omniload.plan.place_tree import ClientPlaceTree

AXES = ("pp", "dp", "cp", "tp", "ep")

trees = st.permutations(AXES).flatmap(
    lambda axes: st.tuples(*[st.integers(1, 4)] * len(axes)).map(
        lambda sizes: ClientPlaceTree(axes=tuple(axes), sizes=sizes)
    )
)
broadcasts = st.lists(st.sampled_from(["pp", "cp", "tp", "ep"]), unique=True).map(tuple)


@given(trees)
def test_coordinates_lead_back_to_their_rank(tree):
    for rank in range(tree.world_size):
        assert tree.ranks_at(**tree.coordinates_of(rank)) == (rank,)


@given(trees, st.sampled_from(AXES))
def test_the_places_along_an_axis_part_the_ranks(tree, axis):
    found = [rank for i in range(tree.size_of(axis)) for rank in tree.ranks_at(**{axis: i})]

    assert sorted(found) == list(range(tree.world_size))


@given(trees, st.sampled_from(["dp", "cp", "ep", "world"]), st.data())
def test_every_rank_is_in_exactly_one_bucket(tree, axis, data):
    consumers = len(tree.buckets(axis))
    group_size = data.draw(
        st.sampled_from([n for n in range(1, consumers + 1) if consumers % n == 0])
    )

    buckets = tree.buckets(axis, group_size)

    assert len(buckets) == tree.num_buckets(axis, group_size) == consumers // group_size
    assert sorted(rank for bucket in buckets for rank in bucket) == list(range(tree.world_size))


@given(trees)
def test_a_dp_bucket_is_the_batch_peers_of_each_of_its_ranks(tree):
    for bucket in tree.buckets("dp"):
        for rank in bucket:
            assert tree.batch_peers_of(rank) == bucket


@given(trees, broadcasts)
def test_whoever_fetches_for_a_rank_fetches_and_shares_its_batch(tree, broadcast):
    fetching = tree.fetching_ranks(broadcast)

    assert {tree.fetcher_of(rank, broadcast) for rank in range(tree.world_size)} == set(fetching)
    for rank in range(tree.world_size):
        assert tree.fetcher_of(rank, broadcast) in tree.batch_peers_of(rank)


@given(trees)
def test_a_place_along_dp_and_cp_has_its_ranks_rising_the_one_that_fetches_first(tree):
    ranks = tree.ranks_by_place()

    assert ranks.shape[:2] == (tree.size_of("dp"), tree.size_of("cp"))
    for dp in range(len(ranks)):
        for cp, peers in enumerate(ranks[dp].tolist()):
            assert tuple(peers) == tree.ranks_at(dp=dp, cp=cp)
            assert {tree.fetcher_of(rank, ("pp", "tp", "ep")) for rank in peers} == {peers[0]}


@given(trees, st.data())
def test_constructors_serve_runs_of_dp_ranks_of_nearly_equal_length(tree, data):
    dp = tree.size_of("dp")
    num = data.draw(st.integers(1, dp))

    served = [tree.constructor_of(rank, num) for rank in range(dp)]

    assert served == sorted(served)
    counts = [served.count(c) for c in range(num)]
    assert max(counts) - min(counts) <= 1
