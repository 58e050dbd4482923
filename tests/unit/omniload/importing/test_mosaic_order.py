"""Mosaic's order over many nodes, compared with the rest of an epoch that Mosaic itself computes."""

import json
from pathlib import Path

import numpy as np
import pytest

from omniload.importing.mosaic_order import (
    ALGORITHMS,
    Shuffle,
    chosen_of_shards,
    chosen_of_streams,
    first_places,
    places_of,
)

MOSAIC = json.loads((Path(__file__).parent / "mosaic_streaming.json").read_text())


def named(case):
    return f"{case['canonical']}-{case['physical']}-{case['drawn']}"


@pytest.mark.parametrize("rule", ["naive", "py1br", "py1e", "py1s", "py2s"])
@pytest.mark.parametrize("case", MOSAIC["over_nodes"], ids=named)
def test_what_is_not_drawn_is_what_mosaic_has_left(case, rule):
    shards, nodes = np.array(case["shards"]), case["canonical"]
    shuffle = Shuffle(algorithm=rule, seed=77, epoch=3, block_size=40)
    firsts = first_places(int(shards.sum()), nodes, case["drawn"])

    left = [
        places[first:]
        for first, places in zip(firsts, places_of(shards, nodes, shuffle), strict=True)
    ]

    assert sorted(np.concatenate(left).tolist()) == case["left"][rule]


@pytest.mark.parametrize("rule", ALGORITHMS)
def test_every_sample_has_one_place(rule):
    shards = np.array([3, 1, 50, 17, 8])
    shuffle = Shuffle(algorithm=rule, seed=1, epoch=2, block_size=8)

    found = np.concatenate(list(places_of(shards, 7, shuffle)))

    assert sorted(found.tolist()) == list(range(79))


def test_places_are_dealt_round_the_stretches_and_never_past_their_ends():
    assert first_places(10, 3, 4).tolist() == [2, 1, 1]
    assert first_places(10, 3, 10).tolist() == [3, 3, 3]  # the last stretch has four
    assert first_places(10, 3, 12).tolist() == [3, 3, 4]
    assert first_places(10, 3, 0).tolist() == [0, 0, 0]


def test_what_streams_and_shards_are_chosen_of_sums_up():
    assert chosen_of_streams(np.array([100, 300]), None, 41, 5).sum() == 41
    assert chosen_of_streams(np.array([1, 1, 1]), [1.0, 1.0, 2.0], 10, 5).tolist()[2] in (5, 6)
    assert chosen_of_shards(np.array([5, 8, 2]), 30, 1, 9).tolist() == [10, 16, 4]

    some = chosen_of_shards(np.array([5, 8, 2]), 19, 3, 9)

    assert some.sum() == 19
    assert (some >= [5, 8, 2]).all()
    assert (some <= [10, 16, 4]).all()
