"""Two ranks over gloo, each a process: equal to one rank, and able to continue one another's runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]


def launch(folder, name, world_size, **job):
    """Run all ranks of a job to their end and return their answers."""
    defaults = {
        "first": 0,
        "last": 4,
        "load": False,
        "save_at": None,
        "short_last": False,
        "world_size": world_size,
    }
    jobs = [
        defaults
        | job
        | {
            "rank": rank,
            "rendezvous": str(folder / f"{name}.rendezvous"),
            "results": str(folder / f"{name}.{rank}.json"),
        }
        for rank in range(world_size)
    ]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                "-W",
                "error",
                "-m",
                "tests.support.trainer.moe_rank",
                json.dumps(each),
            ],
            cwd=ROOT,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for each in jobs
    ]
    try:
        errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert [rank.returncode for rank in ranks] == [0] * world_size, errors
    return [json.loads(Path(each["results"]).read_text()) for each in jobs]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Four steps on two ranks, saved after two of them."""
    folder = tmp_path_factory.mktemp("two_ranks")
    answers = launch(folder, "first", 2, checkpoints=str(folder / "checkpoints"), save_at=2)
    return folder, answers


def losses(answer):
    return [result["loss"] for result in answer["results"]]


def test_both_ranks_report_the_same_and_hold_the_same_model(two_ranks):
    _, (first, second) = two_ranks

    assert losses(first) == losses(second)
    assert first["weights"] == second["weights"]
    assert first["results"][0]["tokens"] == 32 + 19 + 32 + 28


def test_one_rank_trains_like_two(two_ranks, tmp_path):
    (alone,) = launch(tmp_path, "alone", 1, checkpoints=str(tmp_path / "checkpoints"))

    assert losses(alone) == pytest.approx(losses(two_ranks[1][0]), rel=1e-4)
    assert alone["weights"] == pytest.approx(two_ranks[1][0]["weights"], rel=1e-4)


def test_a_last_step_of_one_row_is_trained_alike_by_one_rank_and_by_two(tmp_path):
    two = launch(
        tmp_path, "two", 2, checkpoints=str(tmp_path / "checkpoints"), last=2, short_last=True
    )
    (alone,) = launch(
        tmp_path, "alone", 1, checkpoints=str(tmp_path / "checkpoints"), last=2, short_last=True
    )

    for rank in two:
        assert rank["results"][1]["tokens"] == 32
        assert losses(rank) == pytest.approx(losses(alone), rel=1e-5)
        assert rank["weights"] == pytest.approx(alone["weights"], rel=1e-4)
        assert rank["results"][1]["grad_norm"] == pytest.approx(
            alone["results"][1]["grad_norm"], rel=1e-4
        )


def test_two_ranks_together_report_how_evenly_the_experts_of_the_step_are_busy(two_ranks, tmp_path):
    (alone,) = launch(tmp_path, "alone", 1, checkpoints=str(tmp_path / "checkpoints"), last=1)

    (expected,) = [result["expert_imbalance"] for result in alone["results"]]
    for answer in two_ranks[1]:
        assert answer["results"][0]["expert_imbalance"] == expected > 1


def test_tensors_are_spread_over_the_files_of_both_ranks(two_ranks):
    files = sorted((two_ranks[0] / "checkpoints" / "step-00000002").glob("*.safetensors"))

    assert [file.name[:11] for file in files] == ["shard-00001", "shard-00002"]
    sizes = [file.stat().st_size for file in files]
    assert max(sizes) < 0.9 * sum(sizes)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_of_two_ranks_is_continued_by_any_number(two_ranks, tmp_path, world_size):
    folder, saved = two_ranks

    answers = launch(
        tmp_path,
        "resumed",
        world_size,
        checkpoints=str(folder / "checkpoints"),
        first=2,
        load=True,
    )

    for answer in answers:
        assert answer["restored"] == {"step": 2, "loader": {"version": 1, "next": 2}}
        if world_size == 2:
            assert losses(answer) == losses(saved[0])[2:]
            assert answer["weights"] == saved[0]["weights"]
        assert losses(answer) == pytest.approx(losses(saved[0])[2:], rel=1e-4)
        assert answer["weights"] == pytest.approx(saved[0]["weights"], rel=1e-4)


@pytest.mark.parametrize("shard", [0, 1])
def test_all_ranks_refuse_a_checkpoint_that_one_of_them_finds_spoilt(tmp_path, shard):
    checkpoints = tmp_path / "checkpoints"
    launch(tmp_path, "first", 2, checkpoints=str(checkpoints), last=1, save_at=1)
    file = sorted((checkpoints / "step-00000001").glob("*.safetensors"))[shard]
    data = bytearray(file.read_bytes())
    data[-5] ^= 0x10
    file.write_bytes(data)

    answers = launch(tmp_path, "second", 2, checkpoints=str(checkpoints), last=0, load=True)

    assert [answer["error"] for answer in answers] == ["IntegrityError"] * 2
    assert all(file.name in answer["message"] for answer in answers)
