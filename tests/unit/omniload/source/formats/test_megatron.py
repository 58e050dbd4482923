"""An index of Megatron's of more documents than are looked at together."""

import struct
import tracemalloc

import numpy as np
import pytest

from omniload.base.errors import IntegrityError
from omniload.mix.sources import MegatronSource
from omniload.source.formats.megatron import MegatronFormat
from omniload.source.formats.opening import shards_of

SEQUENCES = 2_600_000
"""More than twice as many as are looked at together."""
LENGTH, UNIT = 2, 1 << 20


@pytest.fixture
def documents():
    """The sequence that each document starts at: a first of many, then three of each length from none to 40."""
    counts = np.concatenate(([1_500_000], np.tile(np.repeat(np.arange(41), 3), 400)))
    starts = np.concatenate(([0], np.cumsum(counts)))
    return np.append(starts[starts < SEQUENCES], SEQUENCES)


@pytest.fixture
def write(tmp_path, documents):
    (tmp_path / "a.bin").write_bytes(np.zeros(SEQUENCES * LENGTH, "<u2").tobytes())

    def write(lengths=None, pointers=None, starts=documents):
        lengths = np.full(SEQUENCES, LENGTH, "<i4") if lengths is None else lengths
        pointers = np.arange(SEQUENCES, dtype="<i8") * 2 * LENGTH if pointers is None else pointers
        (tmp_path / "a.idx").write_bytes(
            b"MMIDIDX\0\0"
            + struct.pack("<QBQQ", 1, 8, SEQUENCES, len(starts))
            + lengths.tobytes()
            + pointers.tobytes()
            + np.asarray(starts, "<i8").tobytes()
        )
        return opened(tmp_path)

    return write


def opened(folder):
    config = MegatronSource(type="megatron", path="*.bin", unit=UNIT)
    return MegatronFormat(shards_of("web", config, base_dir=folder), config)


def test_documents_are_cut_as_if_all_of_them_were_looked_at_together(write, documents):
    ends = documents[1:] * 2 * LENGTH
    expected, start = [0], 0
    while expected[-1] < len(ends):
        expected.append(min(int(np.searchsorted(ends, start + UNIT)) + 1, len(ends)))
        start = ends[expected[-1] - 1]

    units = write().units()

    assert [0, *units.stops_U.tolist()] == expected
    assert units.starts_U.tolist() == expected[:-1]
    assert units.rows_U.tolist() == np.diff(expected).tolist()


def test_an_index_takes_no_memory_by_its_documents(write, tmp_path):
    write(starts=np.arange(SEQUENCES + 1))

    tracemalloc.start()
    units = opened(tmp_path).units()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert units.rows_U.sum() == SEQUENCES
    assert peak < 20 * SEQUENCES  # bytes; all of its columns would be 47 for each


@pytest.mark.parametrize("at", [5, 2_000_000])
def test_a_fault_is_told_by_its_number_in_the_whole_index(write, at):
    lengths = np.full(SEQUENCES, LENGTH, "<i4")
    lengths[at] = -1
    pointers = np.arange(SEQUENCES, dtype="<i8") * 2 * LENGTH
    pointers[at] += 1

    with pytest.raises(IntegrityError, match=f"sequence {at} has the length -1; replace"):
        write(lengths=lengths)
    with pytest.raises(IntegrityError, match=f"sequence {at} starts at byte {4 * at + 1}, not"):
        write(pointers=pointers)


def test_documents_that_fall_between_two_parts_or_end_early_are_refused(write):
    falls = np.arange(SEQUENCES + 1)
    falls[1 << 20] = 7

    with pytest.raises(IntegrityError, match=f"document {1 << 20} starts at sequence 7, before"):
        write(starts=falls)
    with pytest.raises(IntegrityError, match="reach from sequence 0 to 9 of 2600000; replace"):
        write(starts=np.arange(10))
    with pytest.raises(IntegrityError, match="reach from sequence 1 to 2600000 of 2600000"):
        write(starts=np.arange(1, SEQUENCES + 1))
