"""The packing benchmark on a handful of documents."""

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.planner import packing as bench
from benchmarks.planner.planned_steps import Lengths
from omniload.source.sample_data.corpus import SampleCorpus
from tests.support.plane.builders import pieces_of

LENGTHS = {
    "short": Lengths(np.array([900, 40, 1_300, 77, 2_048], np.int32)),
    "long": Lengths(np.array([9_000, 300, 6_000], np.int32)),
}


def test_first_fit_fills_the_rows_of_a_batch_and_then_begins_another():
    assert bench.first_fit([6, 5, 4, 4, 7, 2], 2, 10) == [[6, 5, 4, 4], [7, 2]]


def test_next_fit_never_goes_back_to_an_earlier_row():
    assert bench.next_fit([6, 5, 4, 4], 2, 10) == [[6], [5, 4], [4]]


@pytest.mark.parametrize(
    ("name", "padding"),
    [
        (bench.FIRST_FIT, 1 - 19 / 20),  # the second batch is not whole and does not count
        (bench.NEXT_FIT, 1 - 28 / 40),
        (bench.PAD, 1 - 28 / 60),
    ],
)
def test_waste_is_what_the_rows_hold_no_token_in(name, padding):
    waste = bench.waste_of(name, [6, 5, 4, 4, 7, 2], 2, 10)

    assert waste.padding == pytest.approx(padding)


def test_only_documents_that_fit_a_row_count_as_cut():
    whole, part = (0, 0, 0, 0, 90, 90), (0, 1, 0, 0, 50, 80)
    overlong = (1, 0, 0, 0, 8_192, 9_000)

    assert bench.cut_part([pieces_of(whole, part), pieces_of(overlong)]) == pytest.approx(0.5)


def test_best_fit_cuts_nothing_and_splitting_pads_nothing():
    found = bench.measured(LENGTHS, rows=4, num_rows=16)

    assert found[bench.BEST_FIT].cut == 0
    assert found[bench.SPLIT].padding == pytest.approx(0)
    assert found[bench.SPLIT].cut > 0
    assert found[bench.BEST_FIT].padding < found[bench.NEXT_FIT].padding < found[bench.PAD].padding


def test_the_report_tells_the_waste_of_every_batch_size(monkeypatch, tmp_path):
    corpus = SampleCorpus(folder=tmp_path, sources=(), vocab_size=0, built=True)
    monkeypatch.setattr(bench, "build_sample_corpus", lambda *_args, **_kwargs: corpus)
    monkeypatch.setattr(bench, "lengths_of", lambda _corpus: LENGTHS)
    monkeypatch.setattr("benchmarks.report.REPORTS", tmp_path / "reports")

    CliRunner().invoke(bench.main, ["--num-rows", "8"], catch_exceptions=False)

    (path,) = (tmp_path / "reports/planner").iterdir()
    text = path.read_text()
    assert "\n| 4 | " in text
    assert "\n| 8 | " in text
    assert "8 documents, 0.0 million tokens, the longest of 9,000" in text
