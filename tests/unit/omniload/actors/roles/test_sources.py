"""Ranges are read in parts of about a quarter of a second each, whatever a record takes."""

import pytest

from omniload.actors.roles import sources as sources_module
from omniload.actors.roles.sources import PartReads
from omniload.base.ragged import Ragged
from omniload.source.block import SampleBlock
from tests.support.plane.builders import a_table


class Reading:
    """A source whose records take ``record_s`` each, by a clock of its own."""

    def __init__(self, record_s, monkeypatch):
        self.record_s, self.now_s, self.sizes = record_s, 0.0, []
        monkeypatch.setattr(sources_module.time, "monotonic", lambda: self.now_s)

    def read(self, start, stop):
        self.sizes.append(stop - start)
        self.now_s += (stop - start) * self.record_s
        lengths = [1 + position % 3 for position in range(start, stop)]
        return SampleBlock(
            table=a_table(lengths, start=start),
            tokens=Ragged.of([[position] * (1 + position % 3) for position in range(start, stop)]),
            skipped=1,
        )


@pytest.mark.parametrize("record_s", [0.0, 1e-4, 1e-3, 1e-2, 0.1, 1.0])
def test_no_part_takes_long_once_it_is_known_what_a_record_takes(record_s, monkeypatch):
    reading, parts = Reading(record_s, monkeypatch), PartReads()

    for start in range(0, 8000, 2000):
        parts.read(start, start + 2000, reading.read)

    usual = reading.sizes[len(reading.sizes) // 2 :]
    assert all(size * record_s <= 0.5 or size == 1 for size in usual)
    # Nor are there many, as each has a cost of its own: what is left of a range, and those that find it out.
    assert len(reading.sizes) <= 8000 * record_s / 0.05 + 4 + 6
    assert sum(reading.sizes) == 8000


def test_what_is_read_in_parts_is_what_is_read_at_once(monkeypatch):
    reading = Reading(1e-2, monkeypatch)

    found = PartReads().read(100, 400, reading.read)

    assert len(reading.sizes) > 1
    whole = reading.read(100, 400)
    assert found.tokens.values_V.tolist() == whole.tokens.values_V.tolist()
    assert found.tokens.offsets.tolist() == whole.tokens.offsets.tolist()
    assert found.table.positions_N.tolist() == whole.table.positions_N.tolist()
    assert found.skipped == len(reading.sizes) - 1


def test_a_range_of_nothing_is_read_as_one(monkeypatch):
    reading = Reading(0.0, monkeypatch)

    assert len(PartReads().read(5, 5, reading.read).table) == 0
    assert reading.sizes == [0]
