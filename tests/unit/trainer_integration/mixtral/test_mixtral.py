import json
import sys
from importlib import import_module

import pytest
import torch

from omniload.base.errors import ConfigError, IntegrityError, StateError
from tests.support.trainer.moe_builders import a_config, a_model
from trainer_integration.mixtral.config import (
    mixtral_config,
    model_config,
    require_shape,
    require_weights,
)
from trainer_integration.mixtral.folder import from_mixtral, read_mixtral, to_mixtral, write_mixtral


@pytest.mark.parametrize("tied", [False, True])
def test_weights_come_back_as_they_went(tied):
    model = a_model(tied_embeddings=tied)

    back = dict(from_mixtral(to_mixtral(model.state_dict(), model.config), model.config))

    assert back.keys() == model.state_dict().keys()
    assert all(torch.equal(back[name], held) for name, held in model.state_dict().items())


def test_models_are_read_and_written_without_tiktoken(monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    for name in ("omniload.source.byte_pairs.encoder", "omniload.source.byte_pairs.encodings"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delitem(sys.modules, "trainer_integration.mixtral.folder")

    assert import_module("trainer_integration.mixtral.folder").read_mixtral is not read_mixtral


def test_a_configuration_comes_back_as_it_went():
    config = a_config(rope_theta=5000.0, top_k=3)

    assert model_config(mixtral_config(config, longest=32)) == config


def test_a_folder_is_written_once_and_read_back(tmp_path):
    model = a_model()
    write_mixtral(model, tmp_path / "out", longest=32)

    found = read_mixtral(tmp_path / "out")

    assert all(torch.equal(found.state_dict()[n], t) for n, t in model.state_dict().items())
    with pytest.raises(StateError, match="give a new folder"):
        write_mixtral(model, tmp_path / "out", longest=32)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"top_k": 1}, "top_k is 1"),
        ({"bias_rate": 0.1}, "neither a bias"),
        ({"capacity_factor": 1.0}, "dropped"),
    ],
)
def test_what_mixtral_cannot_compute_is_not_exported(changes, says):
    with pytest.raises(ConfigError, match=says):
        mixtral_config(a_config(**changes), longest=32)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"sliding_window": 128}, "sliding_window is 128"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type is 'yarn'"),
    ],
)
def test_what_the_model_has_not_is_not_imported(changes, says):
    with pytest.raises(ConfigError, match=says):
        model_config(mixtral_config(a_config(), longest=32) | changes)


def test_a_missing_and_a_misshapen_weight_are_named():
    model = a_model()
    tensors = to_mixtral(model.state_dict(), model.config)
    spoilt = tensors | {"lm_head.weight": torch.zeros(3, 3)}

    with pytest.raises(StateError, match=r"lm_head.weight has shape \(3, 3\)"):
        list(from_mixtral(spoilt, model.config))
    del tensors["model.norm.weight"]
    with pytest.raises(StateError, match=r"no weight model\.norm\.weight"):
        list(from_mixtral(tensors, model.config))


def test_what_begins_and_ends_a_document_is_told_by_its_number():
    unsaid, said = (
        mixtral_config(a_config(), longest=32, **around)
        for around in ({}, {"begin_of_document": 5, "end_of_document": 6})
    )

    assert (unsaid["bos_token_id"], unsaid["eos_token_id"]) == (None, None)
    assert (said["bos_token_id"], said["eos_token_id"]) == (5, 6)


def test_weights_of_another_shape_are_refused_with_every_value_that_differs():
    content = mixtral_config(a_config(rope_theta=5000.0, top_k=3), longest=32)

    with pytest.raises(ConfigError) as caught:
        require_shape(a_config(top_k=2, tied_embeddings=True), content)

    assert "top_k 3 (the run has 2)" in str(caught.value)
    assert "rope_theta 5000.0 (the run has 10000.0)" in str(caught.value)
    assert "tied_embeddings false (the run has true)" in str(caught.value)
    assert "dim" not in str(caught.value)
    # What trains a model is not what it computes.
    require_shape(a_config(rope_theta=5000.0, top_k=3, z_weight=0.1, init_std=0.5), content)


def test_a_file_that_is_missing_or_damaged_is_named_before_a_run_begins(tmp_path):
    write_mixtral(a_model(), tmp_path / "out", longest=32)
    weights = tmp_path / "out" / "model.safetensors"
    require_weights(tmp_path / "out", a_config())
    weights.write_bytes(b"x" * 100)
    for reader in (read_mixtral, lambda folder: require_weights(folder, a_config())):
        with pytest.raises(IntegrityError, match=r"model\.safetensors is no safetensors file"):
            reader(tmp_path / "out")
    write_mixtral(a_model(), tmp_path / "cut", longest=32)
    cut = tmp_path / "cut" / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-9])
    with pytest.raises(IntegrityError, match="no safetensors file"):
        require_weights(tmp_path / "cut", a_config())
    weights.unlink()

    for reader in (
        lambda: read_mixtral(tmp_path / "out"),
        lambda: require_weights(tmp_path / "out", a_config()),
    ):
        with pytest.raises(
            StateError, match=r"has no model\.safetensors; give the folder of a whole"
        ):
            reader()
    with pytest.raises(StateError, match=r"has no config\.json; give the folder of a model"):
        require_weights(tmp_path, a_config())


@pytest.mark.parametrize(
    "changes", [{"vocab_size": "x"}, {"num_hidden_layers": None}, {"rms_norm_eps": 5}]
)
def test_a_number_that_is_none_is_told_with_its_file(changes):
    with pytest.raises(ConfigError, match=r"config\.json: (vocab_size|num_layers|norm_epsilon): "):
        model_config(mixtral_config(a_config(), longest=32) | changes)


def test_a_description_that_is_nested_without_end_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text("[" * 200_000)

    with pytest.raises(IntegrityError, match=r"config\.json is no JSON"):
        read_mixtral(tmp_path)


@pytest.mark.parametrize("name", ["../secret.safetensors", "..", "", "model.bin", 3])
def test_an_index_may_not_name_files_elsewhere(tmp_path, name):
    write_mixtral(a_model(), tmp_path / "out", longest=32)
    index = {"weight_map": {"lm_head.weight": name}}
    (tmp_path / "out" / "model.safetensors.index.json").write_text(json.dumps(index))

    with pytest.raises(IntegrityError, match="does not name files of this folder"):
        read_mixtral(tmp_path / "out")
