"""Two ranks over gloo, each a process: equal to one rank, and able to continue one another's runs."""

import pytest

from tests.support.trainer.moe_cases import ALONE
from tests.support.trainer.processes import moe_rank

pytestmark = pytest.mark.slow


def answers_of(ranks, world_size, **job):
    """Run a job on one rank or on two, and return their answers."""
    if world_size == 1:
        return [moe_rank.answer(ALONE, job=job)]
    return ranks.run(moe_rank.answer, dp=2, job=job)


@pytest.fixture(scope="module")
def two_ranks(ranks, tmp_path_factory):
    """Four steps on two ranks, saved after two of them."""
    folder = tmp_path_factory.mktemp("two_ranks")
    return folder, answers_of(ranks, 2, checkpoints=str(folder / "checkpoints"), save_at=2)


def losses(answer):
    return [result["loss"] for result in answer["results"]]


def test_both_ranks_report_the_same_and_hold_the_same_model(two_ranks):
    _, (first, second) = two_ranks

    assert losses(first) == losses(second)
    assert first["weights"] == second["weights"]
    assert first["results"][0]["tokens"] == 32 + 19 + 32 + 28


def test_one_rank_trains_like_two_and_reports_how_busy_experts_are_alike(two_ranks, tmp_path):
    (alone,) = answers_of(None, 1, checkpoints=str(tmp_path))

    for answer in two_ranks[1]:
        assert losses(alone) == pytest.approx(losses(answer), rel=1e-4)
        assert alone["weights"] == pytest.approx(answer["weights"], rel=1e-4)
        busy = [run["results"][0]["expert_imbalance"] for run in (answer, alone)]
        assert busy[0] == busy[1] > 1


def test_a_last_step_of_one_row_is_trained_alike_by_one_rank_and_by_two(ranks, tmp_path):
    job = {"checkpoints": str(tmp_path), "last": 2, "short_last": True}
    (alone,), two = answers_of(None, 1, **job), answers_of(ranks, 2, **job)

    for rank in two:
        assert rank["results"][1]["tokens"] == 32
        assert losses(rank) == pytest.approx(losses(alone), rel=1e-5)
        assert rank["weights"] == pytest.approx(alone["weights"], rel=1e-4)
        assert rank["results"][1]["grad_norm"] == pytest.approx(
            alone["results"][1]["grad_norm"], rel=1e-4
        )


def test_tensors_are_spread_over_the_files_of_both_ranks(two_ranks):
    files = sorted((two_ranks[0] / "checkpoints" / "step-00000002").glob("*.safetensors"))

    assert [file.name[:11] for file in files] == ["shard-00001", "shard-00002"]
    sizes = [file.stat().st_size for file in files]
    assert max(sizes) < 0.9 * sum(sizes)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_of_two_ranks_is_continued_by_any_number(ranks, two_ranks, world_size):
    folder, saved = two_ranks

    answers = answers_of(
        ranks, world_size, checkpoints=str(folder / "checkpoints"), first=2, load=True
    )

    for answer in answers:
        assert answer["restored"] == {"step": 2, "loader": {"version": 1, "next": 2}}
        if world_size == 2:
            assert losses(answer) == losses(saved[0])[2:]
            assert answer["weights"] == saved[0]["weights"]
        assert losses(answer) == pytest.approx(losses(saved[0])[2:], rel=1e-4)
        assert answer["weights"] == pytest.approx(saved[0]["weights"], rel=1e-4)


@pytest.mark.parametrize("shard", [0, 1])
def test_all_ranks_refuse_a_checkpoint_that_one_of_them_finds_spoilt(ranks, tmp_path, shard):
    answers_of(ranks, 2, checkpoints=str(tmp_path), last=1, save_at=1)
    file = sorted((tmp_path / "step-00000001").glob("*.safetensors"))[shard]
    data = bytearray(file.read_bytes())
    data[-5] ^= 0x10
    file.write_bytes(data)

    answers = answers_of(ranks, 2, checkpoints=str(tmp_path), last=0, load=True)

    assert [answer["error"] for answer in answers] == ["IntegrityError"] * 2
    assert all(file.name in answer["message"] for answer in answers)
