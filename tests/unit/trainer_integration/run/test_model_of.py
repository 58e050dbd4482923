import pytest

from omniload.base.errors import ConfigError
from omniload.mix.config import MixConfig
from trainer_integration.config import TrainConfig
from trainer_integration.moe.config import MoEConfig
from trainer_integration.moe.flops import cost_of
from trainer_integration.run.launch import Launcher
from trainer_integration.run.model_of import model_of, with_cost_of


def a_mix(**balance):
    return MixConfig.model_validate(
        {
            "version": 1,
            "seed": 0,
            "sources": {"web": {"type": "text", "path": "*.txt"}},
            "tokenizer": {"type": "bytes"},
            "mix": {"stages": [{"from_step": 0, "weights": {"web": 1}}]},
            "pack": {"length": 64},
            "batch": {"tokens": 128, "micro_tokens": 64},
            "balance": balance,
        }
    )


def a_train(**changes):
    return TrainConfig.model_validate({"version": 1, "mix": "mix.yaml", "steps": 20, **changes})


def test_the_vocabulary_is_the_tokenizers(tmp_path):
    assert model_of(a_train(), a_mix(), tmp_path).vocab_size == 257


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(tmp_path):
    with pytest.raises(ValueError, match="vocab_size is 100, less than the tokenizer's 257"):
        model_of(a_train(vocab_size=100), a_mix(), tmp_path)


def test_a_mix_that_names_no_cost_is_balanced_by_the_models():
    model = MoEConfig(vocab_size=257)

    mix = with_cost_of(model, a_mix(method="karmarkar_karp"))

    assert mix.balance.method == "karmarkar_karp"
    assert mix.balance.linear == cost_of(model)[0]
    assert mix.balance.quadratic > cost_of(model)[1]


def test_a_cost_in_the_file_is_kept():
    mix = a_mix(linear=5.0)

    assert with_cost_of(MoEConfig(vocab_size=257), mix) is mix


def test_threads_of_one_process_are_refused_for_several_ranks(tmp_path):
    (tmp_path / "mix.yaml").write_text(
        "{version: 1, seed: 0, sources: {web: {type: text, path: '*.txt'}}, tokenizer: {type: bytes},"
        " mix: {stages: [{from_step: 0, weights: {web: 1}}]}, pack: {length: 64},"
        " batch: {tokens: 128, micro_tokens: 64}, runtime: {kind: local}}"
    )
    config = tmp_path / "train.yaml"
    config.write_text("{version: 1, mix: mix.yaml, steps: 20, parallel: {dp: 2}}")

    with pytest.raises(ConfigError, match=r"runtime\.kind is local and parallel\.dp is 2"):
        Launcher(config)
