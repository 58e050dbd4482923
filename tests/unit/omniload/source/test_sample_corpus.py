"""The sample corpus, from a tiny installation."""

import json

import numpy as np
import pytest
from pydantic import TypeAdapter

from omniload.base.errors import ConfigError
from omniload.mix.config import SourceConfig
from omniload.source import sample_corpus
from omniload.source.sample_corpus import build_sample_corpus, this_installation
from omniload.source.sample_texts import Installation
from omniload.source.source import open_source

SIZE = 200_000


@pytest.fixture(scope="module")
def installation(tmp_path_factory):
    root = tmp_path_factory.mktemp("python")
    lib, packages = root / "lib", root / "lib" / "site-packages"
    for folder in (lib / "test", lib / "pydoc_data", packages / "a-1.dist-info"):
        folder.mkdir(parents=True)
    for i in range(12):
        body = "\n\n".join(
            f'def function_{k}(value):\n    """Add {k} to the value, which is a number of module {i}."""\n'
            f"    total = value + {k}\n    return total\n"
            for k in range(20)
        )
        (lib / f"module_{i}.py").write_text(body)
    for i in range(3):
        (lib / "test" / f"test_{i}.py").write_text(f"assert {i} == value\n" * 2000)
    (lib / "pydoc_data" / "topics.py").write_text(
        f"topics = {{'if': {'The if statement. ' * 20!r}}}"
    )
    (packages / "a-1.dist-info" / "METADATA").write_text("Name: a\nSummary: a package\n")
    return Installation(stdlib=lib, site_packages=packages)


@pytest.fixture(scope="module")
def corpus(installation, tmp_path_factory):
    return build_sample_corpus(
        tmp_path_factory.mktemp("corpora") / "c",
        size=SIZE,
        vocab_size=400,
        installation=installation,
    )


def files_of(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_sources_of_every_format_are_built(corpus):
    kinds = {
        source.name: (source.config["type"], source.config["path"]) for source in corpus.sources
    }

    assert kinds == {
        "modules": ("parquet", "modules/*.parquet"),
        "functions": ("jsonl", "functions/*.jsonl.zst"),
        "docstrings": ("jsonl", "docstrings/*.jsonl"),
        "long_modules": ("parquet", "long_modules/*.parquet"),
        "notices": ("text", "notices/*.txt"),
        "reference": ("jsonl", "reference/*.jsonl.gz"),
    }


@pytest.mark.parametrize(
    "name", ["modules", "functions", "docstrings", "long_modules", "notices", "reference"]
)
def test_every_source_opens_and_holds_what_the_report_says(corpus, name):
    (reported,) = [source for source in corpus.sources if source.name == name]
    config = TypeAdapter(SourceConfig).validate_python(reported.config)

    source = open_source(name, config, seed=1, tokenizer=corpus.tokenizer, base_dir=corpus.folder)
    lengths = source.read(0, source.positions_per_epoch).table.lengths_N

    assert source.positions_per_epoch == reported.records
    assert lengths.sum() == reported.tokens
    assert np.bincount(np.log2(lengths).astype(int)).tolist() == list(reported.lengths_log2)


def test_shards_are_several_where_there_are_records_for_them(corpus):
    assert len(list((corpus.folder / "modules").iterdir())) == 4
    assert len(list((corpus.folder / "functions").iterdir())) == 3
    assert len(list((corpus.folder / "docstrings").iterdir())) == 2


def test_a_second_call_returns_what_is_there(corpus, installation, monkeypatch):
    monkeypatch.setattr(sample_corpus, "_gather", lambda *_: pytest.fail("built again"))

    again = build_sample_corpus(corpus.folder, size=SIZE, installation=installation)

    assert (corpus.built, again.built) == (True, False)
    assert again.sources == corpus.sources
    assert again.vocab_size == corpus.vocab_size
    assert again.folder == corpus.folder


def test_building_twice_gives_the_same_bytes(corpus, installation, tmp_path):
    other = build_sample_corpus(
        tmp_path / "d", size=SIZE, vocab_size=400, installation=installation
    )

    assert files_of(other.folder) == files_of(corpus.folder)


def test_text_stays_near_the_size_asked_for(installation, tmp_path):
    small = build_sample_corpus(
        tmp_path / "s", size=20_000, vocab_size=300, installation=installation
    )

    largest_document = 40_000
    assert sum(source.text_bytes for source in small.sources) < 20_000 + 6 * largest_document
    assert small.vocab_size <= 300


def test_an_empty_folder_is_filled(installation, tmp_path):
    assert build_sample_corpus(
        tmp_path, size=20_000, vocab_size=300, installation=installation
    ).built
    assert (tmp_path / "corpus.json").is_file()


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")

    with pytest.raises(ConfigError, match=r"is not empty and holds no corpus\.json"):
        build_sample_corpus(tmp_path)

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
        build_sample_corpus(tmp_path, size=SIZE)


def test_a_build_that_fails_leaves_nothing_behind(installation, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(sample_corpus, "_write_source", fail)

    with pytest.raises(OSError, match="disk full"):
        build_sample_corpus(tmp_path / "c", size=20_000, vocab_size=300, installation=installation)

    assert list(tmp_path.iterdir()) == []


def test_the_first_of_two_builders_wins(installation, tmp_path, monkeypatch):
    target = tmp_path / "c"
    train = sample_corpus.train_tokenizer

    def build_meanwhile(*arguments):
        monkeypatch.setattr(sample_corpus, "train_tokenizer", train)
        build_sample_corpus(target, size=20_000, vocab_size=300, installation=installation)
        return train(*arguments)

    monkeypatch.setattr(sample_corpus, "train_tokenizer", build_meanwhile)
    second = build_sample_corpus(target, size=20_000, vocab_size=300, installation=installation)

    assert not second.built
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_progress_rises_to_the_end(installation, tmp_path):
    told = []

    build_sample_corpus(
        tmp_path / "c",
        size=20_000,
        vocab_size=300,
        installation=installation,
        progress=lambda stage, part: told.append((stage, part)),
    )

    parts = [part for _, part in told]
    assert parts == sorted(parts)
    assert told[-1] == ("done", 1.0)


def test_the_running_python_holds_every_kind_of_text():
    installation = this_installation()

    assert len(installation.modules()) > 50
    assert installation.reference()
    assert installation.long_modules()
