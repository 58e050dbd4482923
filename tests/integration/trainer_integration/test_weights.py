"""Runs that begin with the weights of a Mixtral: the same model on any mesh, and from then on a run as any other."""

import json
import shutil

import numpy as np
import pytest
import torch

from omniload.base.cli import main
from omniload.base.errors import ConfigError
from tests.support.plane.corpora import a_corpus
from tests.support.trainer import moe_cases
from tests.support.trainer.moe_builders import a_model
from tests.support.trainer.moe_cases import ALONE
from tests.support.trainer.run_lines import write_mix
from trainer_integration.export.from_run import model_of_run
from trainer_integration.mixtral.folder import write_mixtral
from trainer_integration.run.launch_plan import read_plan
from trainer_integration.run.run_log import StepLine, read_log

pytestmark = pytest.mark.slow

SHAPE = {"dim": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "hidden": 16}
SHAPE |= {"num_experts": 2, "top_k": 2}


def written(folder, **changes):
    """Write a model of other weights than a run draws by its seed."""
    model = a_model(seed=7, **changes)
    write_mixtral(model, folder, longest=32)
    return model


@pytest.mark.parametrize(("dp", "sp", "fsdp"), [(1, 2, False), (2, 1, True), (2, 2, True)])
def test_ranks_begin_with_their_parts_of_the_weights(ranks, tmp_path, dp, sp, fsdp):
    written(tmp_path / "mixtral", num_kv_heads=4)
    given = {"weights": tmp_path / "mixtral"}
    expected, _, norm = moe_cases.gradients(ALONE, **given)
    drawn, _, _ = moe_cases.gradients(ALONE)
    assert any(not np.allclose(expected[name], drawn[name]) for name in drawn)

    answers = ranks.run(moe_cases.gradients, dp=dp, sp=sp, fsdp=fsdp, **given)

    for found, _, found_norm in answers:
        assert max(np.abs(found[name] - expected[name]).max() for name in expected) <= 1e-10
        assert found_norm == pytest.approx(norm, rel=1e-12)


def a_job(folder, **changes):
    write_mix(folder / "mix.yaml", a_corpus(folder, records=80, shards=1))
    content = {"version": 1, "mix": "mix.yaml", "steps": 2, "model": SHAPE, "vocab_size": 5000}
    content |= {"optimizer": {"warmup_steps": 1}, "weights": "mixtral"} | changes
    path = folder / "train.yaml"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def losses(folder):
    return [line.loss for line in read_log(folder / "run") if isinstance(line, StepLine)]


@pytest.fixture(autouse=True)
def ranks_start_warm(warm_python, monkeypatch):
    for name, value in warm_python.for_launchers.items():
        monkeypatch.setenv(name, value)


def run(config, *options):
    with pytest.raises(SystemExit) as ended:
        main(["train", "run", str(config), *options])
    return ended.value.code


def test_a_run_begins_with_them_and_resumes_from_its_own_without_the_folder(tmp_path):
    """The oracle is a run that draws the weights: they are exported, and another run takes them from there."""
    drawn, taken = tmp_path / "drawn", tmp_path / "taken"
    for folder in (drawn, taken):
        folder.mkdir()
    never = {"optimizer": {"warmup_steps": 2, "lr": 1e-30, "weight_decay": 0}, "steps": 2}
    config = a_job(drawn, **never)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"weights": None}))
    assert run(config) == 0
    unmoved = model_of_run(drawn / "run", str(drawn / "run" / "checkpoints")).model
    write_mixtral(unmoved, taken / "mixtral", longest=32)
    config = a_job(taken, **never, seed=5)

    assert run(config) == 0

    assert losses(taken) == pytest.approx(losses(drawn), abs=1e-6)
    shutil.rmtree(taken / "mixtral")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"steps": 3}))
    assert run(config, "--resume", "latest") == 0
    assert len(losses(taken)) == 3
    found = model_of_run(taken / "run", str(taken / "run" / "checkpoints")).model
    for name, tensor in unmoved.state_dict().items():
        assert torch.allclose(found.state_dict()[name], tensor, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"weights": "nonesuch"}, r"train\.yaml:1: weights: .*nonesuch has no config\.json; give"),
        ({"model": SHAPE | {"top_k": 1}}, r"weights: .*top_k 2 \(the run has 1\)"),
    ],
)
def test_what_a_run_cannot_begin_with_is_refused_before_a_rank_starts(tmp_path, changes, says):
    written(tmp_path / "mixtral", vocab_size=5000, **SHAPE)
    config = a_job(tmp_path, **changes)

    plan = read_plan(config)

    with pytest.raises(ConfigError, match=says):
        plan.start_of(0)
