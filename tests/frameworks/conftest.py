"""Tests inside real frameworks, run by the environment that ``make setup`` makes for them.

    .venv-frameworks/bin/python -m pytest tests/frameworks

``tests/integration/test_frameworks.py`` runs each module of this folder so.
"""

from importlib.util import find_spec

import pytest

from omniload.source.sample_data.corpus import build_sample_corpus

if find_spec("accelerate") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_configure(config):
    """Let frameworks warn of each other; a warning in our own modules stays an error."""
    for rule in ("default", "error:::omniload", "error:::trainer_integration"):
        config.addinivalue_line("filterwarnings", rule)


MIX = """
version: 1
seed: 17
tokenizer: {type: bpe, path: corpus/tokenizer.json, end_of_document: "<eos>"}
sources:
  modules: {type: parquet, path: "corpus/modules/*.parquet", text: text}
mix:
  stages:
    - {from_step: 0, weights: {modules: 1}}
pack: {length: 128}
batch: {tokens: 256, micro_tokens: 256}
"""


@pytest.fixture(scope="session")
def mix(tmp_path_factory):
    """Return the path of a small mix, with its corpus beside it."""
    folder = tmp_path_factory.mktemp("mix")
    build_sample_corpus(folder / "corpus", size=120_000, vocab_size=512)
    (folder / "mix.yaml").write_text(MIX, encoding="utf-8")
    return folder / "mix.yaml"
