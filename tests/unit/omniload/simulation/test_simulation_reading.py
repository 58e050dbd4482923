"""What reading takes is measured by reads that decode what they are said to decode."""

import numpy as np
import pytest

import omniload.source.block as reading_source
from omniload.actors.plane import PlaneSpec
from omniload.base.errors import ConfigError
from omniload.plan.place_tree import ClientPlaceTree
from omniload.simulation import reading
from omniload.simulation.reading import measure_sources
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
