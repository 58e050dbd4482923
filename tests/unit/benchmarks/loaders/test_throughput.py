"""The throughput benchmark on a corpus of a few documents, without processes of its own."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from benchmarks.loaders import throughput as bench
from benchmarks.loaders.baseline_loaders import (
    MixedRows,
    Rows,
    arrays_of,
    dataloader,
    lists_of,
    packed,
)
from benchmarks.loaders.mixed_sources import MixedSources, build_sources

CORPUS = MixedSources(sources=2, shards=2, documents=12, group_rows=5)
TOKENS_OF_A_BATCH = 2 * 64


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    build_sources(folder, CORPUS)
    return Rows(folder=folder, corpus=CORPUS, length=64, rows=2)


def test_the_corpus_is_built_once_and_anew_when_another_is_wanted(tmp_path):
    build_sources(tmp_path, CORPUS)
    first = (tmp_path / "s001" / "00001.parquet").stat().st_mtime_ns
    build_sources(tmp_path, CORPUS)
    assert (tmp_path / "s001" / "00001.parquet").stat().st_mtime_ns == first

    build_sources(tmp_path, MixedSources(sources=1, shards=1, documents=3))

    assert sorted(p.name for p in tmp_path.iterdir()) == ["corpus.json", "s000"]


def test_weights_rise_with_the_number_of_the_source_and_sum_to_one():
    assert MixedSources(sources=3).weights == pytest.approx((1 / 6, 2 / 6, 3 / 6))


def test_lists_and_views_hold_the_same_documents(work):
    files = work.files("s000")

    lists = list(itertools.islice(lists_of(files, 5), 30))
    arrays = list(itertools.islice(arrays_of(files, 5), 30))

    assert [array.tolist() for array in arrays] == lists
    assert lists[24:] == lists[:6]  # 24 documents, then again


def test_packing_keeps_every_token_in_order():
    documents = [np.arange(a, b, dtype=np.int32) for a, b in [(0, 5), (5, 6), (6, 21)]]

    rows = list(packed(iter(documents), 4))

    assert torch.cat(rows).tolist() == list(range(20))
    assert all(len(row) == 4 for row in rows)


@pytest.mark.parametrize("style", ["lists", "arrays"])
def test_both_styles_of_the_data_set_give_the_same_rows(work, style):
    rows = list(itertools.islice(MixedRows(work, style), 6))

    expected = list(itertools.islice(MixedRows(work, "lists"), 6))
    assert [row.tolist() for row in rows] == [row.tolist() for row in expected]


@pytest.mark.parametrize(
    "stream",
    [
        lambda work: dataloader(work, "lists", 0),
        lambda work: dataloader(work, "arrays", 0),
    ],
)
def test_a_baseline_gives_whole_batches(work, stream):
    opened = stream(work)

    assert list(itertools.islice(opened, 5)) == [TOKENS_OF_A_BATCH] * 5

    opened.close()


def test_the_data_plane_gives_steps_with_hardly_any_padding(work):
    opened = bench.omniload(replace(work, step_rows=64))

    tokens = list(itertools.islice(opened, 3))

    opened.close()
    assert all(0.9 * 64 * 64 < found <= 64 * 64 for found in tokens)


def test_a_rate_counts_what_came_after_the_warm_up():
    stream = iter([1_000_000, 10, 10, 10])

    assert 0 < bench.rate_of(stream, warm_up_s=0.0, measure_s=0.0) < float("inf")
    assert next(stream) == 10


def test_the_report_gives_medians_and_ratios(monkeypatch, tmp_path):
    rates = {
        bench.OURS: [9e6, 8e6, 10e6],
        bench.LISTS: [1e6, 2e6, 3e6],
        bench.ARRAYS: [3e6] * 3,
        bench.NODES: [6e6] * 3,
    }
    monkeypatch.setattr(bench, "rounds_of", lambda *_: rates)
    monkeypatch.setattr("benchmarks.report.REPORTS", tmp_path / "reports")
    arguments = ["--documents", "2", "--folder", str(tmp_path / "corpus")]

    CliRunner().invoke(bench.main, arguments, catch_exceptions=False)

    (path,) = (tmp_path / "reports/loaders").iterdir()
    text = path.read_text()
    assert f"| {bench.LISTS} | 2.0 | 1.0 | 3.0 | 4.50 |" in text
    assert "gives 4.5 times" in text
    assert "1.50 times those of `torchdata.nodes`" in text
