"""Splices: what stays, what comes from the patch, and when a file is written anew instead."""

import numpy as np
import pytest

from fusefs.format.layout import StripeLayout
from fusefs.format.manifest import Segment
from fusefs.write.splice import filled, is_worn, splice


def a_segment(name, size, unit=10):
    layout = StripeLayout(unit, 2)
    sums = np.arange(layout.num_units(size), dtype=np.uint64)
    return Segment(segment_id=name * 32, layout=layout, size_bytes=size, checksums_U=sums)


def shown(segments):
    """What each range shows, as ``name start size``."""
    return [f"{s.segment_id[0]} {s.before_bytes} {s.size_bytes}" for s in segments]


def test_changed_ranges_come_from_the_patch_and_the_rest_stays():
    plan = splice([a_segment("a", 100)], 100, [range(25, 30), range(60, 75)])

    assert shown(filled(plan, a_segment("b", 20))) == [
        "a 0 25",
        "b 0 5",
        "a 30 30",
        "b 5 15",
        "a 75 25",
    ]


def test_a_file_cut_short_keeps_the_head_of_its_segments():
    plan = splice([a_segment("a", 40), a_segment("c", 40)], 55, [])

    assert shown(filled(plan, None)) == ["a 0 40", "c 0 15"]


def test_a_file_that_grew_ends_in_the_patch():
    plan = splice([a_segment("a", 40)], 60, [range(40, 60)])

    assert shown(filled(plan, a_segment("b", 20))) == ["a 0 40", "b 0 20"]


def test_a_range_of_a_range_keeps_the_checksums_of_the_units_it_touches():
    part = a_segment("a", 100).part(25, 40).part(10, 6)

    assert (part.before_bytes, part.size_bytes, part.after_bytes) == (35, 6, 59)
    assert part.first_unit == 3
    assert part.checksums_U.tolist() == [3, 4]
    assert part.object_paths() == a_segment("a", 100).object_paths()
    assert not part.is_whole


@pytest.mark.parametrize(("start", "size"), [(-1, 5), (0, 0), (99, 2)])
def test_a_range_outside_a_segment_is_refused(start, size):
    with pytest.raises(ValueError, match="not within 100 bytes"):
        a_segment("a", 100).part(start, size)


def test_bytes_behind_the_end_that_nobody_wrote_are_refused():
    with pytest.raises(ValueError, match="up to 50 are to stay, the file had 40"):
        splice([a_segment("a", 40)], 60, [range(50, 60)])


def test_a_small_change_of_a_large_file_is_worth_a_splice():
    assert not is_worn(splice([a_segment("a", 1000)], 1000, [range(5)]))


@pytest.mark.parametrize(
    ("base", "size", "changed"),
    [
        ([a_segment("a", 100)], 100, [range(51)]),
        ([a_segment("a", 1000)], 100, []),
        ([a_segment("a", 100).part(0, 50), a_segment("b", 100).part(0, 50)], 100, [range(5)]),
        ([a_segment("a", 10_000)], 10_000, [range(i, i + 1) for i in range(0, 1200, 2)]),
    ],
    ids=["most of it changed", "cut to a tenth", "twice its space", "too many ranges"],
)
def test_a_worn_file_is_written_anew(base, size, changed):
    assert is_worn(splice(base, size, changed))
