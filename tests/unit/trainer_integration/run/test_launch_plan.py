"""What is launched is read once: ranks are told all of it, and edits of the files change nothing."""

import json
import math
import os

import pytest

from omniload.actors.address import PlaneAddress
from omniload.base.cli import main
from omniload.base.errors import ConfigError, StateError
from omniload.front.launch import launch_of
from omniload.mix.run_record import read_run_record
from tests.support.trainer.run_lines import an_event
from trainer_integration.moe.flops import cost_of
from trainer_integration.moe.parallel.crossover_table import Crossover, Measured
from trainer_integration.run.launch_plan import next_log_number, read_plan
from trainer_integration.run.launch_record import read_launch_record
from trainer_integration.run.rank_spec import RankSpec
from trainer_integration.run.run_log import RunLog
from trainer_integration.vision.config import VisionConfig
from trainer_integration.vision.flops import encoder_cost_of

_MIX = {
    "version": 1,
    "seed": 5,
    "sources": {"web": {"type": "text", "path": "*.txt"}},
    "tokenizer": {"type": "bytes"},
    "mix": {"stages": [{"from_step": 0, "weights": {"web": 1}}]},
    "pack": {"length": 64},
    "batch": {"tokens": 128, "micro_tokens": 64},
}
_TRAIN = {"version": 1, "mix": "mixes/mix.yaml", "steps": 20, "parallel": {"dp": 2}}


def write(folder, *, mix=(), train=()):
    """Write a mix and a training file; return the latter."""
    (folder / "mixes").mkdir(exist_ok=True)
    (folder / "mixes" / "mix.yaml").write_text(json.dumps(_MIX | dict(mix)))
    path = folder / "train.yaml"
    path.write_text(json.dumps(_TRAIN | dict(train)))
    return path


def a_checkpoint(folder, step):
    (folder / "run" / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)


def test_a_mix_without_a_cost_is_launched_with_the_models(tmp_path):
    plan = read_plan(write(tmp_path))

    assert plan.mix.balance.linear == cost_of(plan.model)[0]
    assert plan.plane_spec(None).mix == plan.mix
    assert plan.rank_spec(0, plan.start_of(0), None).mix == plan.mix


def images_of(**changes):
    transform = {"type": "images", "placeholder": 1, "patch": 4} | changes
    return {"type": "webdataset", "path": "*.tar", "images": ["png"], "transforms": [transform]}


def test_a_mix_with_images_is_launched_with_an_encoder_of_its_patches_and_its_cost(tmp_path):
    mix = {"sources": {"web": images_of(merge=2)}}
    plan = read_plan(write(tmp_path, mix=mix, train={"vision": {"dim": 32}}))

    assert plan.vision == VisionConfig(patch=4, merge=2, dim=32)
    assert plan.rank_spec(0, plan.start_of(0), None).vision == plan.vision
    found = (plan.mix.balance.encoder_linear, plan.mix.balance.encoder_quadratic)
    assert found[0] == encoder_cost_of(plan.vision, plan.model.dim)[0]
    assert found[1] == pytest.approx(1.3 * 3 * 4 * 32 * plan.vision.num_layers)


def test_an_encoder_costs_what_the_mix_file_says(tmp_path):
    mix = {"sources": {"web": images_of()}, "balance": {"encoder_linear": 5}}

    plan = read_plan(write(tmp_path, mix=mix))

    assert (plan.mix.balance.encoder_linear, plan.mix.balance.encoder_quadratic) == (5, 1)
    assert plan.mix.balance.linear == cost_of(plan.model)[0]


def test_images_are_refused_where_ranks_share_rows(tmp_path):
    train = {"parallel": {"dp": 1, "sp": 2}}

    with pytest.raises(ConfigError, match=r"train.yaml:1: parallel.sp: is 2, but .* has images"):
        read_plan(write(tmp_path, mix={"sources": {"web": images_of()}}, train=train))


def test_images_of_other_patches_are_no_evaluation(tmp_path):
    evaluation = _MIX | {"sources": {"web": images_of()}}
    (tmp_path / "other.yaml").write_text(json.dumps(evaluation))
    train = {"evaluation": {"mix": "other.yaml"}}

    with pytest.raises(ConfigError, match=r"patch 4 and merge 1, and mixes/mix.yaml has none"):
        read_plan(write(tmp_path, train=train))


def test_a_rank_reads_back_all_it_is_told(tmp_path):
    plan = read_plan(write(tmp_path, train={"optimizer": {"clip_norm": math.inf}}))
    plane = PlaneAddress(
        cluster="127.0.0.2:1",
        namespace="n",
        dp_ranks_of={"constructor-0": (0, 1)},
        board=tmp_path,
        batch_timeout_s=60.0,
    )

    spec = plan.rank_spec(1, plan.start_of(3), plane)

    assert RankSpec.model_validate_json(spec.to_json()) == spec
    assert spec.train.optimizer.clip_norm == math.inf
    assert (spec.rank, spec.attempt, spec.launcher_pid) == (1, 3, os.getpid())


def test_what_was_read_stays_when_the_files_are_edited(tmp_path):
    plan = read_plan(write(tmp_path))

    write(tmp_path, mix={"seed": 6}, train={"steps": 99})

    spec = plan.rank_spec(0, plan.start_of(1), None)
    assert (spec.mix.seed, spec.train.steps) == (5, 20)
    plan.note(0)
    assert read_run_record(plan.run_dir).last.mix() == plan.mix
    assert read_launch_record(plan.run_dir).train.steps == 20


def test_a_launch_record_keeps_a_gradient_that_is_never_clipped(tmp_path):
    plan = read_plan(write(tmp_path, train={"optimizer": {"clip_norm": math.inf}}))

    plan.note(0)

    assert read_launch_record(plan.run_dir).train == plan.train


def test_folders_start_at_the_files_that_name_them(tmp_path, monkeypatch):
    write(tmp_path)
    monkeypatch.chdir(tmp_path)

    plan = read_plan((tmp_path / "train.yaml").relative_to(tmp_path))

    assert plan.folder == tmp_path
    assert plan.base_dir == tmp_path / "mixes"
    assert plan.run_dir == tmp_path / "run"


def test_the_plane_keeps_its_indexes_where_the_commands_look_for_them(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    plan = read_plan(write(tmp_path))

    folder = plan.plane_spec(None).cache_dir

    assert folder.is_relative_to(tmp_path / "cache" / "omniload" / "index")
    assert plan.rank_spec(0, plan.start_of(0), None).cache_dir == folder


@pytest.mark.parametrize("step", [1, 20])
def test_a_checkpoint_within_the_run_is_resumed_from(tmp_path, step):
    plan = read_plan(write(tmp_path))
    a_checkpoint(tmp_path, step)

    assert plan.first_step("latest") == step


def test_a_checkpoint_beyond_the_last_step_is_refused_with_both_numbers(tmp_path):
    plan = read_plan(write(tmp_path))
    a_checkpoint(tmp_path, 21)

    with pytest.raises(StateError, match="steps is 20, but the newest checkpoint is of step 21"):
        plan.first_step("latest")
    with pytest.raises(StateError, match="steps is 20, but the checkpoint is of step 21"):
        plan.first_step(21)


def test_the_step_that_is_resumed_from_must_be_there(tmp_path):
    plan = read_plan(write(tmp_path))
    with pytest.raises(StateError, match="no checkpoint of step 4; it has none"):
        plan.first_step(4)
    a_checkpoint(tmp_path, 4)
    a_checkpoint(tmp_path, 8)

    assert plan.first_step(4) == 4
    with pytest.raises(StateError, match=r"no checkpoint of step 5; it has \[4, 8\]"):
        plan.first_step(5)


def test_a_run_is_finished_at_its_last_step_or_where_the_same_mix_ended(tmp_path):
    plan = read_plan(write(tmp_path))
    assert not plan.is_finished(20), "nothing ran here yet"
    plan.note(0)
    with RunLog(plan.run_dir) as log:
        log.write(an_event("data_end", step=7))

    assert plan.is_finished(20)
    assert plan.is_finished(7)
    assert not plan.is_finished(6)
    assert not plan.is_finished(None)
    write(tmp_path, mix={"seed": 6})
    assert not read_plan(tmp_path / "train.yaml").is_finished(7)


def test_a_checkpoint_is_not_started_over_by_accident(tmp_path):
    plan = read_plan(write(tmp_path))
    a_checkpoint(tmp_path, 4)

    with pytest.raises(StateError, match="holds step-00000004; pass --resume latest"):
        plan.first_step("never")


def test_a_run_without_checkpoints_starts_at_its_beginning(tmp_path):
    plan = read_plan(write(tmp_path))

    assert plan.first_step("never") == plan.first_step("latest") == 0
    start = plan.start_of(0)
    assert (start.step, start.state) == (None, None)


def test_a_training_file_that_does_not_fit_its_mix_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="does not fit its mix: vocab_size is 9"):
        read_plan(write(tmp_path, train={"vocab_size": 9}))


@pytest.mark.parametrize(
    ("names", "number"),
    [
        ((), 0),
        (("rank-0-attempt-0.log",), 1),
        (("rank-0-attempt-9.log", "rank-1-attempt-10.log", "rank-0-attempt-2.log"), 11),
        (("rank-0-attempt-x.log", "other.log"), 0),
    ],
)
def test_logs_are_numbered_above_those_that_are_there(tmp_path, names, number):
    (tmp_path / "logs").mkdir()
    for name in names:
        (tmp_path / "logs" / name).touch()

    assert next_log_number(tmp_path) == number


def with_evaluation(folder, **changes):
    held_out = _MIX | {"mix": _MIX["mix"] | {"stop": "each_once"}} | changes
    train = {"evaluation": {"mix": "held-out.yaml"}, "parallel": {"dp": 1, "sp": 2}}
    config = write(folder, train=train)
    (folder / "held-out.yaml").write_text(json.dumps(held_out))
    return config


def test_ranks_are_told_the_mix_to_evaluate_on_and_the_steps_to_trace(tmp_path):
    plan = read_plan(with_evaluation(tmp_path), profile=(3, 4))

    spec = RankSpec.model_validate_json(plan.rank_spec(0, plan.start_of(0), None).to_json())

    assert spec.evaluation.mix.mix.stop == "each_once"
    assert spec.evaluation.base_dir == tmp_path.resolve()
    assert spec.evaluation.cache_dir != spec.cache_dir
    assert spec.profile == (3, 4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mix": _MIX["mix"]}, "mix.stop is never, and an evaluation takes every document once"),
        ({"pack": {"length": 2}}, r"pack.length is 2, not a multiple of 2 \* sp = 4"),
    ],
)
def test_a_mix_that_cannot_be_evaluated_on_is_refused(tmp_path, changes, said):
    with pytest.raises(ConfigError, match=said):
        read_plan(with_evaluation(tmp_path, **changes))


def test_a_split_of_the_training_mix_is_evaluated_on_and_not_trained_on(tmp_path):
    wanted = {"split": "eval", "every_steps": 5, "steps": 7}

    plan = read_plan(write(tmp_path, mix={"splits": {"eval": 0.1}}, train={"evaluation": wanted}))
    spec = RankSpec.model_validate_json(plan.rank_spec(0, plan.start_of(0), None).to_json())

    assert spec.evaluation.mix.mix.stop == "each_once"
    assert spec.evaluation.mix.sources["web"].split == "eval"
    assert spec.mix.sources["web"].split == "train"
    assert spec.evaluation.num_steps == 7
    with pytest.raises(
        ConfigError, match=r"mix.yaml: split is 'eval', and the mix holds out nothing"
    ):
        read_plan(write(tmp_path, train={"evaluation": wanted}))
    with pytest.raises(ConfigError, match="evaluation: mix and split are not given; name a split"):
        read_plan(write(tmp_path, train={"evaluation": {}}))


def test_a_measured_crossover_reaches_ranks_as_its_number(tmp_path):
    rows = [
        Measured(top_k=k, seconds={"a2a": k, "ag_rs": 3}, sent_bytes={"a2a": 1, "ag_rs": 1})
        for k in (1, 2, 3, 4)
    ]
    table = Crossover(sp=2, tokens=8, dim=8, hidden=8, num_experts=8, rows=rows)
    (tmp_path / "crossover.json").write_text(table.model_dump_json())
    parallel = {"dp": 1, "sp": 2, "crossover": "crossover.json"}

    plan = read_plan(write(tmp_path, train={"parallel": parallel}))

    assert plan.rank_spec(0, plan.start_of(0), None).train.parallel.crossover == 3


def test_a_rank_of_torchrun_starts_no_others(tmp_path, monkeypatch, capsys):
    """It did, silently: as the launcher of all ranks, on the host of one."""
    config = write(tmp_path)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")

    with pytest.raises(SystemExit) as ended:
        main(["train", "run", str(config)])

    assert ended.value.code == ConfigError.exit_code
    said = capsys.readouterr().err
    assert "dp 2 times sp 1 is 2, but 1 rank was started, by the variables RANK" in said
    assert "--nproc-per-node" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "variables", [{}, {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}]
)
def test_a_process_that_no_launcher_gave_peers_starts_all_ranks(tmp_path, variables):
    read_plan(write(tmp_path)).require_ranks(launch_of(variables))
