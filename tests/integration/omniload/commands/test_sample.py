"""``omniload mix sample``: a generated corpus, and the mix that comes with it."""

import shutil
from pathlib import Path

import pytest

import omniload
from omniload.base.errors import ConfigError
from omniload.commands.corpus.sample import MIX_NAME
from omniload.mix.config import load_mix
from tests.support.plane.edits.mix_commands import json_of, run_mix

QUICKSTART = Path(__file__).parents[4] / "examples" / "quickstart.yaml"
SIZE = ("--size", "128KiB")
SCHEMA = "mix.schema.json"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sample") / "corpus"
    return folder, run_mix("sample", folder, *SIZE)


def test_a_corpus_is_shown_by_source_and_by_length(corpus):
    _, result = corpus

    assert result.exit_code == 0
    for shown in ("modules", "functions", "docstrings", "lengths, in powers of two", "█"):
        assert shown in result.stdout
    assert "corpus built" in result.stdout


def test_a_corpus_that_is_there_is_shown_again_and_not_built(corpus):
    folder, first = corpus

    again = run_mix("sample", folder, *SIZE)

    assert "corpus there already" in again.stdout
    assert again.stdout.splitlines()[:-1] == first.stdout.splitlines()[:-1]


def test_the_mix_beside_the_corpus_can_be_planned(corpus, tmp_path):
    folder, _ = corpus
    cache = ("--cache-dir", tmp_path)

    assert run_mix("check", folder / MIX_NAME, *cache).exit_code == 0
    planned = json_of("plan", folder / MIX_NAME, "--steps", 3, "--rehearse", 2, *cache)

    assert planned["steps"] == 3


def test_the_quickstart_is_the_mix_of_the_corpus_but_for_its_folder(corpus):
    mix, _ = load_mix(corpus[0] / MIX_NAME)
    quickstart, _ = load_mix(QUICKSTART)

    for part in ("seed", "mix", "pack", "batch", "balance"):
        assert getattr(mix, part) == getattr(quickstart, part)
    found = {name: (s.type, s.paths) for name, s in mix.sources.items()}
    declared = {
        name: (s.type, tuple(path.removeprefix("../demo/corpus/") for path in s.paths))
        for name, s in quickstart.sources.items()
    }
    assert declared == found


def test_a_mix_file_that_was_changed_is_left_alone(corpus):
    folder, _ = corpus
    path = folder / MIX_NAME
    text = path.read_text(encoding="utf-8")
    path.write_text(text + "# mine\n", encoding="utf-8")

    run_mix("sample", folder, *SIZE)

    assert path.read_text(encoding="utf-8").endswith("# mine\n")
    path.write_text(text, encoding="utf-8")


def test_a_corpus_that_was_cut_off_before_its_schema_gets_it_at_the_next_call(
    corpus, tmp_path, monkeypatch
):
    folder = shutil.copytree(corpus[0], tmp_path / "corpus")
    for name in (MIX_NAME, SCHEMA):
        (folder / name).unlink()
    with monkeypatch.context() as patched:
        patched.setattr("omniload.commands.corpus.sample.mix_schema", lambda: {}["cut off"])
        assert isinstance(run_mix("sample", folder, *SIZE).exception, KeyError)

    run_mix("sample", folder, *SIZE)

    assert (folder / MIX_NAME).exists()
    assert (folder / SCHEMA).exists()


def test_json_holds_every_source(corpus):
    folder, _ = corpus

    shown = json_of("sample", folder, *SIZE)

    assert shown["built"] is False
    assert shown["mix"] == str(folder / MIX_NAME)
    assert all(sum(s["lengths_log2"]) == s["records"] for s in shown["sources"])


def test_a_folder_that_holds_something_else_is_refused(tmp_path):
    (tmp_path / "mine.txt").write_text("", encoding="utf-8")

    result = run_mix("sample", tmp_path)

    assert isinstance(result.exception, ConfigError)
    assert "choose another folder" in str(result.exception)


def test_a_corpus_too_small_for_its_sources_is_refused_and_nothing_is_written(tmp_path):
    result = run_mix("sample", tmp_path / "corpus", "--size", "16383")

    assert isinstance(result.exception, ConfigError)
    assert "--size of 16,383 bytes leaves sources without a document; give 16 KiB or more" in str(
        result.exception
    )
    assert not (tmp_path / "corpus").exists()


def test_a_size_without_meaning_is_refused(tmp_path):
    result = run_mix("sample", tmp_path / "corpus", "--size", "12 parsecs")

    assert result.exit_code == 2
    assert "not a quantity" in result.output
    assert not (tmp_path / "corpus").exists()


def test_images_are_drawn_once_with_a_mix_that_can_be_read(tmp_path):
    folder = tmp_path / "drawn"

    first = run_mix("sample", folder, "--images")
    again = json_of("sample", folder, "--images")

    assert f"images drawn: {folder}, sources captions and pages" in first.stdout
    assert (again["built"], again["sources"]) == (False, ["captions", "pages"])
    with omniload.open(again["mix"], steps=1) as loader:
        assert len(loader.next_batch().images) > 0


def test_drawing_that_was_cut_off_is_begun_again(tmp_path):
    run_mix("sample", tmp_path, "--images")
    drawn = (tmp_path / "captions-0.tar").read_bytes()
    (tmp_path / MIX_NAME).unlink()
    (tmp_path / "captions-0.tar").write_bytes(drawn[:100])

    assert json_of("sample", tmp_path, "--images")["built"] is True
    assert len((tmp_path / "captions-0.tar").read_bytes()) == len(drawn)


def test_images_are_not_drawn_beside_something_else_nor_of_a_size(tmp_path):
    (tmp_path / "mine.txt").write_text("", encoding="utf-8")

    beside = run_mix("sample", tmp_path, "--images")
    sized = run_mix("sample", tmp_path / "drawn", "--images", *SIZE)

    assert isinstance(beside.exception, ConfigError)
    assert "holds 'mine.txt'; choose another folder" in str(beside.exception)
    assert "--size is of text, and --images draws" in str(sized.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
