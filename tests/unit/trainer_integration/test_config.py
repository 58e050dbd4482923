import subprocess
import sys

import pytest
from pydantic import ValidationError

from omniload.base.errors import ConfigError
from trainer_integration.config import OptimizerConfig, TrainConfig, load_train

SMALLEST = "version: 1\nmix: mix.yaml\nsteps: 100\n"


def a_file(tmp_path, text):
    file = tmp_path / "train.yaml"
    file.write_text(text)
    return file


def test_three_lines_are_a_run(tmp_path):
    config, folder = load_train(a_file(tmp_path, SMALLEST))

    assert config.parallel.num_ranks == 1
    assert config.optimizer.warmup_steps <= config.steps
    assert config.digest
    assert folder == tmp_path


def test_relative_paths_start_at_the_folder_of_the_file(tmp_path):
    config, folder = load_train(a_file(tmp_path, SMALLEST + "run_dir: out\n"))

    assert config.mix_file(folder) == tmp_path / "mix.yaml"
    assert config.run_folder(folder) == tmp_path / "out"
    assert config.checkpoint_location(folder) == str(tmp_path / "out" / "checkpoints")


def test_checkpoints_may_live_elsewhere(tmp_path):
    text = SMALLEST + "checkpoint: {every_steps: 20, keep: 2, folder: /mnt/checkpoints}\n"

    config, folder = load_train(a_file(tmp_path, text))

    assert config.checkpoint_location(folder) == "/mnt/checkpoints"


def test_every_fault_is_reported_with_its_line(tmp_path):
    text = "version: 1\nmix: mix.yaml\nsteps: 0\nparallel: {dp: 0}\nmodle: {}\n"

    with pytest.raises(ConfigError) as caught:
        load_train(a_file(tmp_path, text))

    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert "train.yaml:3: steps" in lines[0]
    assert "train.yaml:4: parallel.dp" in lines[1]
    assert "train.yaml:5: modle" in lines[2]


def test_a_fault_of_the_model_names_its_key(tmp_path):
    text = SMALLEST + "model:\n  dim: 128\n  top_k: 9\n"

    with pytest.raises(ConfigError, match=r"train\.yaml:6: model.top_k: top_k is 9"):
        load_train(a_file(tmp_path, text))


def test_a_warm_up_longer_than_the_run_is_refused(tmp_path):
    text = SMALLEST.replace("100", "5") + "optimizer: {warmup_steps: 10}\n"

    with pytest.raises(
        ConfigError, match=r"yaml:4: .*warmup_steps is 10, more than steps 5; lower it"
    ):
        load_train(a_file(tmp_path, text))


def test_a_warm_up_that_nobody_wrote_is_not_blamed_as_if_it_were_in_the_file(tmp_path):
    text = SMALLEST.replace("100", "5") + "optimizer: {total_tokens: null}\n"

    with pytest.raises(
        ConfigError, match=r"yaml:3: steps: steps is 5, less than the 10 that .* give it, at most 5"
    ):
        load_train(a_file(tmp_path, text))


def test_a_beta_of_one_is_refused_because_it_forgets_nothing():
    with pytest.raises(ValidationError, match=r"betas\[1\] is 1\.0"):
        OptimizerConfig(betas=(0.9, 1.0))


def test_the_vocabulary_comes_from_the_tokenizer():
    config = TrainConfig(version=1, mix="mix.yaml", steps=100, model={"dim": 64})

    assert config.moe(300).vocab_size == 300
    assert config.moe(300).dim == 64


def test_a_given_vocabulary_may_be_larger_than_the_tokenizers_but_not_smaller():
    config = TrainConfig(version=1, mix="mix.yaml", steps=100, vocab_size=512)

    assert config.moe(300).vocab_size == 512
    with pytest.raises(ValueError, match="vocab_size is 512, less than the tokenizer's 600"):
        config.moe(600)


def test_no_vocabulary_at_all_is_an_error():
    with pytest.raises(ValueError, match="vocab_size is not given"):
        TrainConfig(version=1, mix="mix.yaml", steps=100).moe()


def test_reading_a_file_does_not_load_torch():
    code = "import sys, trainer_integration.config; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        ({"warmup_tokens": 5}, "warmup_tokens is 5, and total_tokens is not given"),
        ({"total_tokens": 5, "warmup_tokens": 6}, "warmup_tokens is 6, more than total_tokens 5"),
    ],
)
def test_tokens_of_a_schedule_need_a_total_that_holds_them(optimizer, said):
    with pytest.raises(ValueError, match=said):
        TrainConfig(version=1, mix="mix.yaml", steps=5, optimizer={"warmup_steps": 0} | optimizer)


def test_a_schedule_of_tokens_may_be_longer_in_steps_than_the_run():
    assert TrainConfig(version=1, mix="m", steps=5, optimizer={"total_tokens": 9}).steps == 5


def test_experts_that_two_axes_cut_must_come_out_even(tmp_path):
    text = SMALLEST + "parallel: {dp: 3, sp: 2,\n  fsdp: true}\nmodel: {hidden: 255}\n"

    with pytest.raises(
        ConfigError, match=r"train\.yaml:5: parallel\.fsdp: .* cuts dim .* 128 is not"
    ):
        load_train(a_file(tmp_path, text))


@pytest.mark.parametrize(
    ("parallel", "sharded"),
    [
        ({"dp": 3, "fsdp": True}, True),
        ({"dp": 2, "sp": 2, "fsdp": True}, True),
        ({"sp": 2, "fsdp": True}, False),
        ({"dp": 2}, False),
    ],
)
def test_a_model_is_sharded_where_there_is_somebody_to_shard_it_with(parallel, sharded):
    config = TrainConfig(version=1, mix="m", steps=100, parallel=parallel)

    assert config.parallel.is_sharded is sharded
