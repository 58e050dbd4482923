"""The baseline of ``torchdata.nodes``: its threads poll, so it runs outside the unit tests."""

import itertools

from benchmarks.loaders.baseline_loaders import Rows, torchdata_nodes
from benchmarks.loaders.mixed_sources import MixedSources, build_sources


def test_torchdata_nodes_give_whole_batches_for_ever(tmp_path):
    corpus = MixedSources(sources=2, shards=2, documents=12, group_rows=5)
    build_sources(tmp_path, corpus)
    stream = torchdata_nodes(Rows(folder=tmp_path, corpus=corpus, length=64, rows=2))

    assert list(itertools.islice(stream, 400)) == [2 * 64] * 400

    stream.close()
