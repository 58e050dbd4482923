"""The soak: what counts as growth, and what does not."""

import pytest

from benchmarks.faults.soak import Held, grown, table_of

MIB = 1 << 20
STEADY = Held(pss_bytes=100 * MIB, descriptors=40, threads=20)


def looks_of(early, late, count=100):
    """Return looks at one process: what it holds while caches fill, then early and late."""
    filling = [Held(pss_bytes=i * MIB) for i in range(count // 10)]
    middle = [early] * (count * 65 // 100 - len(filling))
    return [
        {"planner": held} for held in (*filling, *middle, *[late] * (count - len(filling + middle)))
    ]


@pytest.mark.parametrize(
    ("late", "is_some"),
    [
        (STEADY, False),
        (Held(pss_bytes=104 * MIB, descriptors=42, threads=22), False),
        (Held(pss_bytes=106 * MIB, descriptors=40, threads=20), True),
        (Held(pss_bytes=100 * MIB, descriptors=43, threads=20), True),
        (Held(pss_bytes=100 * MIB, descriptors=40, threads=23), True),
        (Held(pss_bytes=50 * MIB, descriptors=4, threads=2), False),
    ],
)
def test_more_than_chance_is_growth_and_less_is_none(late, is_some):
    assert grown(looks_of(STEADY, late))["planner"].is_some == is_some


def test_one_look_that_is_out_of_line_is_no_growth():
    looks = looks_of(STEADY, STEADY)
    looks[90] = {"planner": Held(pss_bytes=900 * MIB, descriptors=900, threads=900)}

    assert not grown(looks)["planner"].is_some


def test_who_is_there_in_one_half_only_is_not_compared():
    looks = looks_of(STEADY, STEADY)
    looks[60] |= {"loader-0+1": STEADY}

    assert list(grown(looks)) == ["planner"]


def test_the_table_names_what_grew():
    looks = looks_of(STEADY, Held(pss_bytes=200 * MIB, descriptors=40, threads=20))

    (row,) = table_of(grown(looks), steps=1_000, seconds=10).rows

    assert row == ("planner", "100.0 → 200.0", "40 → 40", "20 → 20", "GREW")
