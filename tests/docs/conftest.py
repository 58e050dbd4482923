"""A small corpus, and a working folder of a document's own."""

import shutil

import pytest

from omniload.source.sample_data.corpus import build_sample_corpus
from omniload.source.sample_data.images import build_sample_images

CORPUS_BYTES = 120_000


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Build the sample corpus, as ``omniload mix sample`` does, but smaller."""
    folder = tmp_path_factory.mktemp("docs") / "corpus"
    build_sample_corpus(folder, size=CORPUS_BYTES, vocab_size=512)
    return folder


@pytest.fixture(scope="session")
def drawn(tmp_path_factory):
    """Draw images, as ``omniload mix sample drawn --images`` does."""
    return build_sample_images(tmp_path_factory.mktemp("docs") / "drawn")


@pytest.fixture
def work(corpus, drawn, tmp_path, monkeypatch):
    """Enter a folder that holds the corpus and the drawn images, and nothing of the user's."""
    folder = tmp_path / "work"
    folder.mkdir()
    shutil.copytree(corpus, folder / "corpus")
    shutil.copytree(drawn, folder / "drawn")
    monkeypatch.chdir(folder)
    # More threads than free cores spin against each other, and the tests of the machine with them.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder
