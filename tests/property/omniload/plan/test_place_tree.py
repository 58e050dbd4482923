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
def test_a_dp_bucket_is_all_ranks_at_the_dp_place_of_each_of_its_ranks(tree):
    for bucket in tree.buckets("dp"):
        for rank in bucket:
            assert tree.ranks_at(dp=tree.coordinates_of(rank)["dp"]) == bucket


@given(trees, broadcasts)
def test_of_the_ranks_that_a_broadcast_reaches_the_first_fetches_and_no_other(tree, broadcast):
    fetching = set(tree.fetching_ranks(broadcast))

    for rank in range(tree.world_size):
        places = tree.coordinates_of(rank)
        reached = tree.ranks_at(**{a: at for a, at in places.items() if a not in broadcast})
        assert fetching.intersection(reached) == {reached[0]}


@given(trees)
def test_a_place_along_dp_and_cp_has_its_ranks_rising_the_one_that_fetches_first(tree):
    ranks, fetching = tree.ranks_by_place(), set(tree.fetching_ranks(("pp", "tp", "ep")))

    assert ranks.shape[:2] == (tree.size_of("dp"), tree.size_of("cp"))
    for dp in range(len(ranks)):
        for cp, peers in enumerate(ranks[dp].tolist()):
            assert tuple(peers) == tree.ranks_at(dp=dp, cp=cp)
            assert fetching.intersection(peers) == {peers[0]}


@given(trees, st.data())
def test_constructors_serve_runs_of_dp_ranks_of_nearly_equal_length(tree, data):
    dp = tree.size_of("dp")
    num = data.draw(st.integers(1, dp))

    served = [tree.constructor_of(rank, num) for rank in range(dp)]

    assert served == sorted(served)
    counts = [served.count(c) for c in range(num)]
    assert max(counts) - min(counts) <= 1
