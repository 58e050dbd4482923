"""The cost of reading is measured by reads that decode exactly what they claim."""

import numpy as np
import pytest

import omniload.source.block as reading_source
from omniload.actors.plane import PlaneSpec
from omniload.base.errors import ConfigError
from omniload.plan.place_tree import ClientPlaceTree
from omniload.simulation import reading
from omniload.simulation.reading import cores_of, measure_sources, measure_threads
from tests.support.plane.builders import a_mix
from tests.support.plane.corpora import write_tokens


@pytest.mark.parametrize("records", [3_240, 3_200, 1_300, 600])
def test_a_block_costs_its_decoding_also_where_units_are_of_unequal_size(
    tmp_path, monkeypatch, records
):
    documents = [np.arange(9, dtype=np.int32)] * records
    write_tokens(tmp_path / "web" / "0.parquet", documents, rows_per_group=200)
    decoded = []
    own = reading_source.decoded_block
    monkeypatch.setattr(
        reading_source, "decoded_block", lambda *how: decoded.append(how) or own(*how)
    )

    def counted(call):
        before = len(decoded)
        found = call()
        return float(len(decoded) - before), found

    monkeypatch.setattr(reading, "spent_s", counted)
    mix = a_mix(sources=("web",))
    spec = PlaneSpec(mix=mix, base_dir=tmp_path, tree=ClientPlaceTree.of(dp=1))

    costs = measure_sources(spec, lambda _: None)["web"]

    assert costs.block_s == 1.0
    assert costs.read_s == costs.token_s == 0


def test_a_source_without_a_sample_among_its_first_records_is_refused_by_name(tmp_path):
    write_tokens(tmp_path / "web" / "0.parquet", [np.empty(0, np.int32)] * 600, rows_per_group=200)
    mix = a_mix(sources=("web",))
    spec = PlaneSpec(mix=mix, base_dir=tmp_path, tree=ClientPlaceTree.of(dp=1))

    with pytest.raises(ConfigError, match="source 'web' gives no sample of its first 600 records"):
        measure_sources(spec, lambda _: None)


@pytest.mark.parametrize(
    ("tries", "cores"),
    [
        # Own and free seconds: alone on the machine, next to other work, and alternating by a lock.
        ([(0.15, 0.15), (0.15, 0.15)], 2.0),
        ([(0.03, 0.03), (0.06, 0.06)], 2.0),
        ([(0.07, 0.15), (0.08, 0.15)], 1.0),
        # A try in which one of them had next to nothing shows next to nothing.
        ([(0.15, 0.15), (0.15, 0.15), (0.15, 0.15), (0.0, 1e-6)], 2.0),
        ([(0.0, 0.0), (0.0, 0.0)], 0.0),
    ],
)
def test_cores_that_threads_get_at_once_are_those_they_would_have_where_nothing_else_runs(
    tries, cores
):
    assert cores_of(tries, 2) == pytest.approx(cores, abs=1e-4)


def test_two_threads_that_read_get_a_core_at_least_and_no_more_than_there_are(
    tmp_path, monkeypatch
):
    write_tokens(tmp_path / "web" / "0.parquet", [np.arange(9, dtype=np.int32)] * 600)
    mix = a_mix(sources=("web",))
    monkeypatch.setattr(reading, "_THREADS_S", 1e-3)
    monkeypatch.setattr(reading.os, "sched_getaffinity", lambda _: {0, 1})

    found = measure_threads(PlaneSpec(mix=mix, base_dir=tmp_path, tree=ClientPlaceTree.of(dp=1)))

    assert 1 <= found <= 2
