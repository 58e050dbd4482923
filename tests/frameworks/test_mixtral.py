"""The included model and Hugging Face's Mixtral: the same logits from the same files, both ways."""

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from tests.support.trainer.moe_builders import a_microbatch, a_model, documents_of
from trainer_integration.export.files import read_mixtral, write_mixtral
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
