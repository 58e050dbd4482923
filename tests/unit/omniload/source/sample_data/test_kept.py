"""A corpus that is kept: the contents that its marker needs before a folder is accepted as one."""

import json

import pytest

from omniload.base.errors import ConfigError
from omniload.source.sample_data.kept import SampleCorpus, existing, marker_of, put_in_place

SIZE = 200_000


def test_a_marker_comes_back_as_the_corpus_that_it_is_of(tmp_path):
    corpus = SampleCorpus(folder=tmp_path / "c", sources=(), vocab_size=300, built=False)
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "corpus.json").write_text(marker_of(corpus, SIZE))

    assert existing(corpus.folder, SIZE) is None
    assert put_in_place(tmp_path / "made", corpus.folder, SIZE) is None
    assert existing(corpus.folder, SIZE) == corpus


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")

    with pytest.raises(ConfigError, match=r"is not empty and holds no corpus\.json"):
        existing(tmp_path, SIZE)

    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    ("marker", "reason"),
    [
        (json.dumps({"version": 99, "size": SIZE}), "'version': 99.* choose another folder"),
        (json.dumps({"version": 1, "size": 5}), "'size': 5.* choose another folder"),
        (json.dumps({"version": 1, "size": SIZE}), "does not say what the corpus holds.*'sources'"),
        (
            json.dumps({"version": 1, "size": SIZE, "sources": [{"lengths_log2": []}]}),
            "does not say what the corpus holds.*missing",
        ),
        ("[]", "None"),
        ("cut sho", "is not JSON.*; choose another folder"),
    ],
)
def test_a_corpus_of_another_kind_is_not_taken_for_this_one(tmp_path, marker, reason):
    (tmp_path / "corpus.json").write_text(marker)

    with pytest.raises(ConfigError, match=reason):
        existing(tmp_path, SIZE)
