"""The spool: what it fetches, what it holds, what it says has changed."""

import errno

import pytest

from fusefs.write.spool import Spool, SpoolPlace
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
