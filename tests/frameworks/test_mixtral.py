"""The included model and Hugging Face's Mixtral: the same logits from the same files, both ways."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig, MixtralForCausalLM

from omniload.mix.schema.tokenizers import TiktokenTokenizer
from omniload.source.tokenize import open_tokenizer
from tests.frameworks.forks import omniload
from tests.support.plane.ranks import TEXTS, ranks_of, trained, write_ranks
from tests.support.trainer.moe_builders import a_microbatch, a_model, documents_of
from trainer_integration.export.from_run import continued, model_of_run
from trainer_integration.mixtral.folder import read_mixtral, write_mixtral, write_tokenizer
from trainer_integration.moe.inputs import ModelInputs

DOCUMENT = documents_of([24], seed=4)[0]


def our_logits(model):
    with torch.no_grad():
        return model.logits(ModelInputs.of(a_microbatch([[DOCUMENT]], 24)))


def their_logits(model):
    with torch.no_grad():
        return model.eval()(torch.from_numpy(DOCUMENT).long()[None]).logits[0]


@pytest.mark.parametrize("tied", [False, True])
def test_an_exported_model_has_the_same_logits_in_transformers(tmp_path, tied):
    model = a_model(tied_embeddings=tied, top_k=3, rope_theta=5000.0)

    write_mixtral(model, tmp_path / "out", longest=64)
    theirs = MixtralForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)

    assert (our_logits(model) - their_logits(theirs)).abs().max() <= 1e-5


@pytest.mark.parametrize("shard", ["1MB", "8KB"])
def test_a_model_of_transformers_has_the_same_logits_here(tmp_path, shard):
    torch.manual_seed(0)
    theirs = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=50,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            initializer_range=0.2,
            sliding_window=None,
        )
    )
    theirs.save_pretrained(tmp_path, max_shard_size=shard)

    ours = read_mixtral(tmp_path)

    assert (our_logits(ours) - their_logits(theirs)).abs().max() <= 1e-5


def test_a_run_goes_from_its_file_to_text_by_transformers(mix):
    """Trained on a mix with a tokenizer of its own, sampled from, exported, and both read back by their own classes."""
    folder = mix.parent
    shape = {"dim": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "hidden": 32}
    content = {"version": 1, "mix": mix.name, "steps": 3, "run_dir": "trained"}
    content |= {"model": shape | {"num_experts": 4}, "optimizer": {"warmup_steps": 1, "lr": 0.01}}
    config = folder / "train.yaml"
    config.write_text(json.dumps(content))

    omniload("train", "run", config)
    sampled = omniload("train", "sample", config, "--prompt", "def main(", "--tokens", 5)
    omniload("train", "export", config, folder / "model")

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    ids = tokenizer("def main(", return_tensors="pt").input_ids
    trained = model_of_run(folder / "trained", str(folder / "trained" / "checkpoints"))
    end = tokenizer.convert_tokens_to_ids("<eos>")
    assert sampled.startswith("def main(")
    assert tokenizer.eos_token == "<eos>"
    assert (model.config.bos_token_id, model.generation_config.eos_token_id) == (None, end)
    written = model.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False)[0]
    expected = continued(trained.model, ids[0].tolist(), 8, temperature=0)
    assert end not in expected
    assert written[ids.shape[1] :].tolist() == expected
    modes = {path.stat().st_mode for path in (folder / "model").iterdir()}
    assert len(modes) == 1, "some files are kept from who may read the others"


def test_a_file_of_ranks_becomes_a_tokenizer_of_transformers(tmp_path):
    write_ranks(tmp_path / "own.tiktoken", ranks_of(trained()))
    special = {"<|endoftext|>": 500, "<|im_start|>": 700}
    said = {"path": "own.tiktoken", "special_tokens": special, "end_of_document": "<|endoftext|>"}
    config = TiktokenTokenizer(type="tiktoken", encoding="cl100k_base", **said)
    (tmp_path / "model").mkdir()

    write_tokenizer(config, tmp_path, tmp_path / "model")

    theirs = AutoTokenizer.from_pretrained(tmp_path / "model")
    plain = [text for text in TEXTS if "<|endoftext|>" not in text]
    ours = open_tokenizer(config, tmp_path).encode(plain)
    assert [[*theirs(text).input_ids, 500] for text in plain] == [
        ours[i].tolist() for i in range(3)
    ]
    assert theirs("<|im_start|>a").input_ids[0] == 700
    assert (theirs.eos_token_id, theirs.decode(theirs(plain[1]).input_ids)) == (500, plain[1])
