"""The benchmark of one large source: its files can be read, and computed states are those of a run."""

import pytest

import omniload
from benchmarks.startup.large_place import Place, state_at, write_documents, write_shards
from benchmarks.startup.large_source import Found, per_unit, tables_of


def test_a_computed_state_is_the_one_that_a_run_leaves(tmp_path):
    place = Place.of(tmp_path / "mix", write_shards(tmp_path / "shards", 2, groups=8))
    states = []
    with omniload.open(place.file, arrays="numpy") as loader:
        for _ in range(5):
            loader.next_batch()
            states.append(loader.state_dict())

    # Two shards of 8,000 documents, 4,096 a step: the fifth step passes the end of the epoch.
    assert [state_at(states[0], step) for step in range(1, 6)] == states


@pytest.mark.parametrize("kind", ["megatron", "numpy"])
def test_one_file_has_documents_of_equal_length(tmp_path, kind):
    place = Place.of(tmp_path / "mix", write_documents(tmp_path / "files", kind, 10_000, 8))

    with omniload.open(place.file, arrays="numpy") as loader:
        batch = loader.next_batch()

    assert [len(piece.tokens) for piece in batch.pieces()] == [8] * 8_192


def test_growth_is_the_slope_between_two_sizes():
    assert per_unit((2, 10.0), (6, 11.0)) == 0.25


def test_a_report_has_a_table_for_each_part():
    found = Found(grows=[("kept index, million units: MB", "24.2")])

    assert [len(table.rows) for table in tables_of(found)] == [0, 0, 0, 0, 1]
