"""Parts of files that pages show are parts of a file that is accepted: each is set in one, and that one is read."""

from pathlib import Path

import pytest
import yaml

from fusefs.config import FilesConfig
from omniload.base.config import load_yaml
from omniload.base.errors import ConfigError
from omniload.mix.config import MixConfig, load_mix
from tests.docs.snippets import ROOT, blocks_of, documents
from trainer_integration.config import TrainConfig

FRAGMENTS = [
    block for path in documents() for block in blocks_of(path) if block.info == ("yaml", "fragment")
]
OF_OTHERS = {"train_loader"}
"""First keys of files that are not ours: the importer reads those, in the tests of imports."""

MIX = {
    "version": 2,
    "seed": 1,
    "tokenizer": {"type": "bytes"},
    "pack": {"length": 4096},
    "batch": {"tokens": 262_144, "micro_tokens": 16_384},
}
TRAINING = {"version": 1, "mix": "mix.yaml", "steps": 1000, "run_dir": "run"}
FILES = {
    "common/sources.yaml": {
        "sources": {name: {"type": "jsonl", "path": f"{name}.jsonl"} for name in ("web", "code")}
    },
    "common/size.yaml": {key: MIX[key] for key in ("tokenizer", "pack", "batch")},
}
"""Files that fragments include."""


def names_of(weights):
    """Yield the sources that weights or amounts name, also within groups."""
    for name, weight in weights.items():
        if isinstance(weight, dict) and "of" in weight:
            yield from names_of(weight["of"])
        else:
            yield name


def mix_around(fragment):
    """Return a mix that says what a fragment says; what it does not say is of the simplest kind."""
    if "include" in fragment:
        return fragment
    if "mix" not in fragment:
        # Beside more of another: a source that is all of a mix keeps no cap below the whole.
        weights = {**dict.fromkeys(fragment.get("sources", ("web", "code")), 1), "another": 9}
        fragment = {**fragment, "mix": {"stages": [{"from_step": 0, "weights": weights}]}}
    mix = fragment["mix"]
    drawn = [*(stage["weights"] for stage in mix.get("stages", ())), mix.get("amounts", {})]
    named = {name for weights in drawn for name in names_of(weights)}
    others = {name: {"type": "jsonl", "path": f"{name}.jsonl"} for name in sorted(named)}
    return {**MIX, **fragment, "sources": {**others, **fragment.get("sources", {})}}


def read_in_a_whole_file(fragment):
    """Read the file that a fragment is a part of, as the program does."""
    of_a_mix, of_training = MixConfig.model_fields.keys(), TrainConfig.model_fields.keys()
    path = Path("whole.yaml")
    if fragment.keys() <= of_a_mix | {"include"}:
        path.write_text(yaml.safe_dump(mix_around(fragment), sort_keys=False))
        return load_mix(path)[0]
    if fragment.keys() <= of_training:
        path.write_text(yaml.safe_dump({**TRAINING, **fragment}))
        return load_yaml(path, TrainConfig)
    path.write_text(yaml.safe_dump(fragment))
    return load_yaml(path, FilesConfig)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATA", "data")
    for name, content in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(yaml.safe_dump({"version": 2, **content}))
    return tmp_path


@pytest.mark.parametrize("block", FRAGMENTS, ids=lambda b: f"{b.path.relative_to(ROOT)}:{b.line}")
def test_a_part_of_a_file_is_accepted_in_a_whole_one(block, folder):
    fragment = yaml.safe_load(block.text)
    if OF_OTHERS & fragment.keys():
        return
    try:
        read_in_a_whole_file(fragment)
    except ConfigError as error:
        pytest.fail(f"{block.where}: {error}")


@pytest.mark.parametrize(
    "wrong",
    [
        {"sources": {"web": {"type": "jsonl", "path": "web.jsonl", "txt": "body"}}},
        {"mix": {"stages": [{"from_step": 0, "weights": {"web": -1}}]}},
        {"checkpoint": {"evry_steps": 5}},
        {"striping": {"units": "1MiB"}},
    ],
    ids=["a source", "weights", "training", "a mount"],
)
def test_a_part_that_says_what_nobody_reads_is_refused(wrong, folder):
    with pytest.raises(ConfigError):
        read_in_a_whole_file(wrong)


def test_of_others_is_not_more_than_pages_show():
    shown = {key for block in FRAGMENTS for key in yaml.safe_load(block.text)}

    assert shown >= OF_OTHERS
