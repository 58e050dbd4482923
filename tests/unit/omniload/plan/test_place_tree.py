import pytest

from omniload.plan.place_tree import ClientPlaceTree


def a_tree(**sizes):
    return ClientPlaceTree.of(**({"pp": 2, "dp": 2, "cp": 2, "tp": 2} | sizes))


def test_the_innermost_axis_runs_fastest_over_the_ranks():
    tree = a_tree()

    assert tree.world_size == 16
    assert dict(tree.coordinates_of(0)) == {"pp": 0, "dp": 0, "cp": 0, "tp": 0}
    assert dict(tree.coordinates_of(1)) == {"pp": 0, "dp": 0, "cp": 0, "tp": 1}
    assert dict(tree.coordinates_of(13)) == {"pp": 1, "dp": 1, "cp": 0, "tp": 1}


def test_the_headline_mesh_of_the_paper_has_576_ranks():
    assert ClientPlaceTree.of(pp=9, dp=8, cp=2, tp=4).world_size == 576


def test_one_rank_alone_is_a_tree():
    tree = ClientPlaceTree.of()

    assert tree.world_size == 1
    assert tree.ranks_at() == (0,)
    assert tree.buckets("dp") == tree.buckets("world") == ((0,),)
    assert str(tree) == "world: 1 rank (pp 1, dp 1, cp 1, tp 1)"


def test_experts_are_the_innermost_level_of_a_mesh_that_has_them():
    assert ClientPlaceTree.of(dp=2, ep=2) == ClientPlaceTree.from_sizes(
        {"pp": 1, "dp": 2, "cp": 1, "tp": 1, "ep": 2}
    )
    assert ClientPlaceTree.of(dp=2, ep=2).buckets("ep") == ((0,), (1,), (2,), (3,))


def test_a_mesh_without_axes_has_one_rank():
    tree = ClientPlaceTree.from_sizes({})

    assert tree.world_size == 1
    assert tree.buckets("dp") == ((0,),)


def test_ranks_are_found_by_some_of_their_coordinates():
    tree = a_tree()

    assert tree.ranks_at(pp=0, dp=1) == (4, 5, 6, 7)
    assert tree.ranks_at(tp=1, cp=0) == (1, 5, 9, 13)
    assert tree.ranks_at(pp=1, dp=0, cp=1, tp=1) == (11,)


def test_ranks_along_cp_take_slices_of_the_same_rows():
    tree = a_tree(cp=4)

    assert [tree.slice_of(rank) for rank in tree.ranks_at(pp=0, dp=0, tp=0)] == [
        (0, 4),
        (1, 4),
        (2, 4),
        (3, 4),
    ]


def test_without_broadcast_every_rank_fetches():
    assert a_tree().fetching_ranks() == tuple(range(16))


def test_with_broadcast_the_first_rank_along_the_axes_fetches_for_the_others():
    assert a_tree().fetching_ranks(("tp", "pp")) == (0, 2, 4, 6)


def test_broadcast_along_an_axis_that_the_mesh_lacks_changes_nothing():
    tree = ClientPlaceTree.from_sizes({"dp": 4})

    assert tree.fetching_ranks(("tp",)) == (0, 1, 2, 3)


def test_a_dp_bucket_holds_all_ranks_of_its_dp_rank():
    assert a_tree().buckets("dp") == (
        (0, 1, 2, 3, 8, 9, 10, 11),
        (4, 5, 6, 7, 12, 13, 14, 15),
    )


def test_a_cp_bucket_holds_the_ranks_of_one_place_on_dp_and_cp():
    assert a_tree(pp=1).buckets("cp") == ((0, 1), (2, 3), (4, 5), (6, 7))


def test_a_world_bucket_holds_one_rank():
    assert a_tree(pp=1).buckets("world") == tuple((rank,) for rank in range(8))


def test_neighbouring_consumers_share_a_bucket_of_a_group():
    tree = ClientPlaceTree.of(dp=4, tp=2)

    assert tree.buckets("dp", 2) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert tree.buckets("world", 4) == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_consumers_keep_the_order_of_dp_when_cp_is_the_outer_level():
    tree = ClientPlaceTree.from_sizes({"cp": 2, "dp": 3})

    assert tree.buckets("dp") == ((0, 3), (1, 4), (2, 5))


def test_dp_ranks_are_shared_out_among_constructors_in_runs():
    tree = ClientPlaceTree.of(dp=8)

    assert [tree.constructor_of(rank, 3) for rank in range(8)] == [0, 0, 0, 1, 1, 1, 2, 2]


def test_the_drawing_shows_levels_and_who_fetches():
    tree = ClientPlaceTree.of(dp=2, cp=2, tp=4)

    assert tree.render(broadcast=("tp",)).splitlines() == [
        "world: 16 ranks (pp 1, dp 2, cp 2, tp 4)",
        "|-- dp 0: ranks 0-7",
        "|   |-- cp 0: ranks 0-3",
        "|   |   `-- tp 0-3: ranks 0-3, fetching 0",
        "|   `-- cp 1: ranks 4-7",
        "|       `-- tp 0-3: ranks 4-7, fetching 4",
        "`-- dp 1: ranks 8-15",
        "    |-- cp 0: ranks 8-11",
        "    |   `-- tp 0-3: ranks 8-11, fetching 8",
        "    `-- cp 1: ranks 12-15",
        "        `-- tp 0-3: ranks 12-15, fetching 12",
    ]


def test_the_drawing_of_thousands_of_ranks_stays_short():
    shown = str(ClientPlaceTree.of(dp=512, tp=8)).splitlines()

    assert len(shown) < 12
    assert "|   ... 508 more" in shown
    assert "`-- dp 511: ranks 4088-4095" in shown


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: a_tree(dp=0), "axis dp has size 0"),
        (lambda: a_tree(ep=0), "axis ep has size 0"),
        (lambda: ClientPlaceTree.from_sizes({"dq": 2}), "axis 'dq' is no level of a mesh"),
        (lambda: ClientPlaceTree.from_sizes({"world": 2}), "axis 'world' is no level"),
        (
            lambda: ClientPlaceTree.from_sizes({"dp": 2, "tp": 3}, world_size=8),
            r"dp 2 \* tp 3 make 6 ranks, the job has 8",
        ),
        (lambda: ClientPlaceTree(axes=("dp",), sizes=(1, 2)), "differ in number"),
        (lambda: ClientPlaceTree(axes=("dp", "dp"), sizes=(1, 2)), "name an axis twice"),
        (lambda: a_tree().coordinates_of(16), "rank is 16; this mesh has ranks 0 to 15"),
        (lambda: a_tree().coordinates_of(-1), "rank is -1"),
        (lambda: a_tree().ranks_at(dp=2), "dp is 2; this mesh has dp 0 to 1"),
        (lambda: a_tree().ranks_at(ep=1), "ep is 1; this mesh has ep 0 to 0"),
        (lambda: a_tree().buckets("tp"), "axis 'tp' has no buckets"),
        (lambda: a_tree().buckets("dp", 3), "group_size is 3, which does not divide the 2"),
        (lambda: a_tree().buckets("dp", 0), "group_size is 0"),
        (lambda: a_tree().fetching_ranks(("dp",)), "broadcast along 'dp' is not possible"),
        (lambda: a_tree().fetching_ranks(("world",)), "broadcast along 'world' is not"),
        (lambda: a_tree().constructor_of(2, 1), "dp_rank is 2; this mesh has dp ranks 0 to 1"),
        (lambda: a_tree().constructor_of(0, 3), "num_constructors is 3 for 2 dp ranks"),
        (lambda: a_tree().constructor_of(0, 0), "num_constructors is 0"),
    ],
)
def test_what_does_not_fit_the_mesh_is_refused_with_its_value(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("axis", "group_size", "broadcast"),
    [
        ("dp", 1, ("tp", "cp", "pp")),  # a bucket is shared by all of them
        ("world", 2, ("tp",)),  # each bucket is one group of tp
        ("world", 16, ("pp", "cp", "tp")),
        ("cp", 1, ("tp", "pp")),
        ("cp", 2, ("cp",)),
    ],
)
def test_ranks_that_share_a_bucket_may_be_broadcast_to(axis, group_size, broadcast):
    a_tree().require_fetched(axis, group_size, broadcast)


@pytest.mark.parametrize(
    ("axis", "group_size", "broadcast", "rank"),
    [
        ("world", 1, ("tp",), "rank 1 .*bucket 1.* of rank 0"),
        ("world", 2, ("pp",), "rank 8 .*bucket 4.* of rank 0"),
        (
            "cp",
            1,
            ("tp", "cp"),
            "rank 2 .*'cp' .bucket 1.* of rank 0, by the broadcast along tp, cp",
        ),
    ],
)
def test_a_rank_that_would_be_sent_the_samples_of_another_is_named(
    axis, group_size, broadcast, rank
):
    with pytest.raises(ValueError, match=f"{rank}.*group_size"):
        a_tree().require_fetched(axis, group_size, broadcast)
