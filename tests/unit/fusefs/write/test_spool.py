"""The spool: what it fetches, what it holds, what it says has changed. Splices: what stays, what comes of the patch."""

import errno

import numpy as np
import pytest

from fusefs.format.layout import StripeLayout
from fusefs.format.manifest import Segment
from fusefs.write.spool import Spool, SpoolPlace, filled, is_worn, splice
from tests.support.fusefs.builders import tiny_files

DATA = bytes(range(100))


class CountingReader:
    """A version of the store that counts the bytes asked of it."""

    def __init__(self, data):
        self.data, self.asked = data, []
        self.size_bytes = len(data)

    def read(self, offset, size_bytes, *, process=0):
        self.asked.append((offset, size_bytes))
        return self.data[offset : offset + size_bytes]

    def try_read(self, offset, size_bytes):
        return None


@pytest.fixture
def base():
    return CountingReader(DATA)


@pytest.fixture
def spool(base):
    made = Spool(SpoolPlace(), 10, base)
    yield made
    made.close()


def test_writing_one_byte_fetches_one_granule_and_changes_one(spool, base):
    spool.write(55, b"X")

    assert base.asked == [(50, 10)]
    assert spool.granules.changed() == [range(50, 60)]
    assert spool.read(48, 10) == DATA[48:55] + b"X" + DATA[56:58]


def test_whole_granules_are_written_without_fetching_any(spool, base):
    spool.write(20, bytes(30))

    assert base.asked == []
    assert spool.granules.changed() == [range(20, 50)]


def test_only_a_write_into_an_absent_granule_waits(spool):
    assert not spool.writes_now(55, 2)
    assert spool.writes_now(50, 10)
    assert spool.writes_now(100, 3)
    spool.write(55, b"X")
    assert spool.writes_now(51, 2)


def test_a_write_behind_a_granule_that_is_not_full_waits_for_it():
    spool = Spool(SpoolPlace(), 10, CountingReader(DATA[:95]))

    assert not spool.writes_now(120, 3)
    spool.write(94, b"X")
    assert spool.writes_now(120, 3)
    spool.close()


def test_what_is_not_at_hand_is_not_read_on_the_way(spool):
    spool.write(50, bytes(10))

    assert spool.try_read(50, 10) == bytes(10)
    assert spool.try_read(48, 5) is None


def test_after_publishing_nothing_has_changed_and_the_next_write_fetches_nothing(spool, base):
    spool.write(55, b"X")
    spool.published(CountingReader(spool.read(0, 100)))
    base.asked.clear()
    assert spool.granules.changed() == []

    spool.write(56, b"Y")

    assert base.asked == []
    assert spool.granules.changed() == [range(50, 60)]


def test_cutting_and_extending_leaves_zeroes_and_never_old_bytes(spool):
    spool.truncate(25)
    spool.truncate(60)

    assert spool.read(0, 100) == DATA[:25] + bytes(35)
    assert spool.granules.changed() == [range(20, 60)]


def test_a_write_behind_the_end_leaves_zeroes_between(spool):
    spool.write(125, b"end")

    assert spool.read(98, 40) == DATA[98:] + bytes(25) + b"end"
    assert spool.granules.size_bytes == 128


def test_everything_can_be_held(spool, base):
    assert spool.granules.num_missing() == 10

    spool.hold_all()

    assert spool.granules.num_missing() == 0
    assert spool.try_read(0, 100) == DATA
    assert spool.granules.changed() == []


def test_the_limit_counts_what_is_held_not_the_file(base):
    spool = Spool(SpoolPlace(limit_bytes=30), 10, base)
    spool.write(5, b"a")
    spool.write(95, b"b")
    spool.write(55, b"c")

    with pytest.raises(OSError, match=r"40 bytes, limit 30; raise spool_limit") as caught:
        spool.write(75, b"d")

    assert caught.value.errno == errno.EFBIG
    assert spool.read(70, 10) == DATA[70:80]
    spool.close()


def test_it_reads_a_striped_version_where_nothing_was_written():
    with tiny_files() as files:
        files.write_file("f", DATA)
        with files.open("f") as file:
            spool = Spool(SpoolPlace(), 16, file.reader)
            spool.write(40, b"here")

            assert spool.read(0, 200) == DATA[:40] + b"here" + DATA[44:]
            spool.close()


# Splices


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
