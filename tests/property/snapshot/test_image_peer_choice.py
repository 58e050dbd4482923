"""The choice of peers: every node reaches the home, no request goes in a circle, and few blocks move."""

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from snapshot.image.layer.index import BlockRef
from snapshot.image.peer.protocol import (
    REGION_BYTES,
    parent,
    ranking,
    region_of,
    regions,
    runs,
)

NAMES = st.lists(st.integers(0, 9999).map("10.0.0.{}:7070".format), unique=True, max_size=30)
REGIONS = st.integers(0, 10**6).map("sha256:ab/{}".format)
PLACES = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 3 * REGION_BYTES), st.integers(0, 5)),
    max_size=20,
)


def refs(places):
    return [
        BlockRef(f"{i}", blob, i, offset, size) for i, (blob, offset, size) in enumerate(places)
    ]


@given(NAMES, REGIONS, st.integers(1, 9))
def test_every_member_reaches_the_home_in_few_hops(members, region, fanout):
    ranked = ranking(members, region)

    for me in members:
        hops, at = 0, me
        while (above := parent(ranked, at, region, (), fanout=fanout)) is not None:
            assert ranked.index(above) < ranked.index(at)
            at, hops = above, hops + 1
        assert at == ranked[0]
        # A tree of that depth would have more nodes than rank before this one.
        assert sum(fanout**depth for depth in range(hops)) <= ranked.index(me)


@given(NAMES, REGIONS, st.integers(1, 9))
def test_nobody_has_more_children_than_the_fan_out(members, region, fanout):
    ranked = ranking(members, region)

    children = Counter(parent(ranked, me, region, (), fanout=fanout) for me in members)

    assert all(count <= fanout for above, count in children.items() if above is not None)
    assert children[None] == bool(members)


@given(st.data(), NAMES, REGIONS)
def test_waiting_never_goes_in_a_circle_whatever_each_believes(data, members, region):
    """This is also true among nodes with different lists: the order of two members does not depend on a third."""
    for_all = ranking(members, region)

    for me in members:
        known = [*data.draw(st.lists(st.sampled_from(members), unique=True)), me]
        ranked = ranking(set(known), region)
        away = data.draw(st.sets(st.sampled_from(members)))
        above = parent(ranked, me, region, away)
        assert above is None or for_all.index(above) < for_all.index(me)
        assert above not in away


@given(st.data(), NAMES.filter(lambda names: len(names) > 1), REGIONS)
def test_those_who_see_the_home_away_turn_to_one_node(data, members, region):
    """The registry is then asked by one more node, not by all."""
    ranked = ranking(members, region)
    gone = set(ranked[: data.draw(st.integers(1, len(ranked) - 1))])
    stand_in = ranked[len(gone)]

    for me in ranked[len(gone) :]:
        at = me
        while (above := parent(ranked, at, region, gone)) is not None:
            at = above
        assert at == stand_in


@given(NAMES, NAMES, REGIONS)
def test_members_who_come_or_go_change_nobody_elses_order(members, others, region):
    both = ranking({*members, *others}, region)

    assert [member for member in both if member in members] == list(ranking(members, region))


def test_homes_and_children_are_spread_evenly():
    members = [f"node{i}:7070" for i in range(16)]
    homes, asked = Counter(), Counter()
    for number in range(4000):
        region = f"sha256:cd/{number}"
        ranked = ranking(members, region)
        homes[ranked[0]] += 1
        asked.update(parent(ranked, me, region, (), fanout=3) for me in members)

    assert set(homes) == set(members)
    assert max(homes.values()) < 1.3 * 4000 / 16
    assert min(homes.values()) > 0.7 * 4000 / 16
    del asked[None]
    assert max(asked.values()) < 1.2 * 4000 * 15 / 16


def test_a_new_member_takes_its_share_of_the_homes_and_no_other_home_moves():
    members = [f"node{i}:7070" for i in range(9)]
    moved = 0
    for number in range(2000):
        region = f"sha256:ef/{number}"
        before, after = ranking(members, region)[0], ranking([*members, "new:1"], region)[0]
        moved += before != after
        assert after in {before, "new:1"}

    assert 0.7 * 200 < moved < 1.3 * 200


@given(NAMES, REGIONS, st.text(max_size=5))
def test_who_serves_nobody_asks_a_member_that_is_there(members, region, me):
    ranked = ranking(members, region)

    above = parent(ranked, me, region, members[:1])

    assert above in members[1:] if members[1:] else above is None


@given(PLACES)
def test_blocks_are_grouped_by_region_and_by_run_and_none_is_lost(places):
    blocks = refs(places)

    by_region = list(regions(blocks))
    assert [ref for _, together in by_region for ref in together] == blocks
    assert all(region_of(ref) == region for region, together in by_region for ref in together)
    by_run = list(runs(blocks))
    assert [ref for run in by_run for ref in run] == blocks
    for run in by_run:
        for before, ref in pairwise(run):
            assert (before.blob, before.end) == (ref.blob, ref.offset)


@given(PLACES, st.integers(0, 5 << 20))
def test_runs_hold_blocks_that_lie_at_most_the_bridge_apart(places, bridge):
    blocks = refs(places)

    by_run = list(runs(blocks, bridge))

    assert [ref for run in by_run for ref in run] == blocks
    for run in by_run:
        assert all(a.blob == b.blob and 0 <= b.offset - a.end <= bridge for a, b in pairwise(run))
    for one, other in pairwise(by_run):
        apart = other[0].offset - one[-1].end
        assert other[0].blob != one[-1].blob or not 0 <= apart <= bridge
