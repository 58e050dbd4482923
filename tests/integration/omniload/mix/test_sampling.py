"""Dynamic sampling over a real data plane: one process, and two that agree through torch's collectives."""

import json
import os

import numpy as np
import pytest

import omniload
from tests.house.modules import ROOT
from tests.support.plane.edits.mix_commands import json_of, run_mix
from tests.support.plane.processes.sampling_rank import rollout, told_of
from tests.support.plane.sampling import as_told, expected_batches, kept_of
from tests.support.programs import finished

RANK = ROOT / "tests" / "support" / "plane" / "processes" / "sampling_rank.py"
LIMIT_S = 240
MIX = """
version: 1
seed: 3
tokenizer: {type: bytes}
sources:
  easy: {type: jsonl, path: easy.jsonl}
  hard: {type: jsonl, path: hard.jsonl}
mix: {stages: [{from_step: 0, weights: {easy: 2, hard: 1}}], stop: each_once}
pack: {length: 32, method: none, overlong: drop}
batch: {tokens: 384, micro_tokens: 32}
"""


@pytest.fixture
def mix(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("easy", "hard"):
        lines = [json.dumps({"text": f"{name} {i} " + "x" * (i % 9)}) for i in range(90)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    (tmp_path / "mix.yaml").write_text(MIX)
    return tmp_path / "mix.yaml"


def rewards_of(key):
    return [[1, 1], [0, 0], [1, 0]][key[1] % 3]


def steps_of(mix):
    """Return the prompts of every step of a mix."""
    with omniload.open(mix, arrays="numpy") as loader:
        return [[(piece.key, piece.tokens) for piece in batch.pieces()] for batch in loader]


@pytest.mark.parametrize("surplus", ["carry", "drop"])
def test_batches_are_those_of_a_plain_loop_over_the_mix_and_replay(mix, tmp_path, surplus):
    steps, run = steps_of(mix), tmp_path / "run"
    with omniload.open(mix, arrays="numpy", run_dir=run) as loader:
        sampler = omniload.DynamicSampler(loader, groups=7, surplus=surplus)
        states, found = [], []
        while (batch := sampler.next_batch(rollout)) is not None:
            found.append(batch)
            states.append(json.loads(json.dumps(sampler.state_dict())))
            told = sampler.counts
        counts = sampler.counts
    shown, said = json_of("show", run)["groups"], run_mix("show", run).stdout
    with omniload.open(mix, arrays="numpy", run_dir=run) as loader:
        replayed = list(omniload.DynamicSampler(loader, groups=7, surplus=surplus).batches())
    with omniload.open(mix, arrays="numpy", run_dir=run) as loader:
        sampler = omniload.DynamicSampler(loader, groups=7, surplus=surplus)
        sampler.load_state_dict(states[2])
        resumed = list(sampler.batches(rollout))

    assert (shown["batches"], shown["groups"]) == (len(found), 7 * len(found))
    assert {
        name: (each["drawn"], each["all_right"], each["all_wrong"], each["answers"], each["right"])
        for name, each in shown["sources"].items()
    } == {
        name: (each.drawn, each.all_right, each.all_wrong, each.answers, each.right_answers)
        for name, each in told.items()
    }
    assert f"{len(found)} batches, {7 * len(found)} groups in all, drawn in" in said
    assert "groups that differ wait or were left over" in said
    assert sum(map(len, steps)) == 180
    wanted, left = expected_batches(steps, rewards_of, 7, surplus)
    assert [batch.rounds for batch in found] == [rounds for rounds, _ in wanted]
    worth = set().union(*(kept_of(step, rewards_of) for step in steps))
    tokens_of = {key[:3]: tokens for step in steps for key, tokens in step}
    trained = [group.prompt for batch in found for group in batch.groups]
    assert len({prompt.key for prompt in trained}) == len(trained) == 7 * len(wanted) > 20
    assert {prompt.key for prompt in trained} <= worth
    assert all(np.array_equal(prompt.tokens, tokens_of[prompt.key]) for prompt in trained)
    assert [as_told([b]) for b in replayed] == [as_told([b]) for b in found]
    assert [b.digest for b in replayed] == [b.digest for b in found]
    assert [told_of(b) for b in resumed] == [told_of(b) for b in found[3:]]
    assert counts["easy"].drawn == counts["hard"].drawn == 90
    assert sum(each.waiting for each in counts.values()) == len(left)
    assert all(each.is_whole() for each in counts.values())


def test_a_folder_begun_from_a_state_shows_no_groups_that_were_drawn_before_as_left(mix, tmp_path):
    with omniload.open(mix, arrays="numpy") as loader:
        sampler = omniload.DynamicSampler(loader, groups=1)
        sampler.next_batch(rollout)
        state = sampler.state_dict()
    with omniload.open(mix, arrays="numpy", run_dir=tmp_path / "run") as loader:
        sampler = omniload.DynamicSampler(loader, groups=1)
        sampler.load_state_dict(state)
        sampler.next_batch(rollout)

    said = run_mix("show", tmp_path / "run").stdout
    assert "1 batch, 1 group in all, drawn in 0 rounds; decisions from batch 1 on" in said


def test_a_policy_moves_the_mix_of_a_run_that_samples_and_its_replay_alike(mix, tmp_path):
    run, file = tmp_path / "run", tmp_path / "steer.yaml"
    file.write_text("{version: 1, every: 5, policy: {type: reward}}")

    def of_hard_alone(prompts):
        return [[1, int(prompt.source == "easy")] for prompt in prompts]

    with omniload.open(mix, arrays="numpy", run_dir=run, prefetch_steps=2) as loader:
        sampler = omniload.DynamicSampler(loader, groups=4)
        found = [sampler.next_batch(of_hard_alone)]
        said = json_of("steer", run, file, "--once")
        found += list(sampler.batches(of_hard_alone))
    with omniload.open(mix, arrays="numpy", run_dir=run, prefetch_steps=2) as loader:
        replayed = list(omniload.DynamicSampler(loader, groups=4).batches())

    assert said["useful"] == {"easy": 0, "hard": 1}
    assert said["after"]["hard"] > 0.9
    assert 0 < said["step"] < 10
    assert [batch.digest for batch in replayed] == [batch.digest for batch in found]


def test_a_loader_of_prompts_that_are_cut_is_refused(mix):
    with omniload.open(
        mix, arrays="numpy", pack_length=8, pack_overlong="split", batch_micro_tokens=8
    ) as loader:
        sampler = omniload.DynamicSampler(loader, groups=2, max_rounds=50)
        with pytest.raises(omniload.ConfigError, match=r"a prompt of (easy|hard) was cut"):
            list(sampler.batches(rollout))


def ranks_that_sample(warm_python, world, *arguments):
    """Run the ranks of a job; return the report and the process of each."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "SLURM_"))}
    done = finished(
        [warm_python.path, *command, RANK, *arguments],
        limit_s=LIMIT_S,
        env=kept | warm_python.for_launchers,
    )
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return sorted(told, key=lambda each: each["rank"]), done


def joined(parts):
    """Return the groups of all ranks in a batch, in one order."""
    assert len({(part["digest"], part["rounds"]) for part in parts}) == 1
    groups = sorted(group for part in parts for group in part["groups"])
    return parts[0]["digest"], parts[0]["rounds"], groups


@pytest.mark.ray
@pytest.mark.parametrize(
    ("world", "shares", "absent"),
    [(2, [3, 2], "1 rank of the job did not come: [1]"), (4, [2, 1, 1, 1], "3 ranks of the job")],
)
def test_ranks_have_the_batches_of_one(warm_python, mix, world, shares, absent):
    pytest.importorskip("torch")
    told, done = ranks_that_sample(warm_python, world, mix, "5", "4")
    assert len(told) == world, done.stderr[-3000:]
    with omniload.open(mix, arrays="numpy") as loader:
        alone = omniload.DynamicSampler(loader, groups=5)
        wanted = [told_of(alone.next_batch(rollout)) for _ in range(4)]

    assert all(each["left"][0] == [3 + rank for rank in range(world)] for each in told)
    assert f"waited up to 3 s for the others' rollouts: {absent}" in told[0]["left"][1]
    assert all(each["state"] == told[0]["state"] for each in told)
    for number, whole in enumerate(json.loads(json.dumps(wanted))):
        parts = [each["batches"][number] for each in told]
        assert [len(part["groups"]) for part in parts] == shares
        assert joined(parts) == joined([whole])


def test_ranks_along_tp_train_on_the_answers_of_the_first(warm_python, mix):
    pytest.importorskip("torch")
    told, done = ranks_that_sample(warm_python, 2, mix, "5", "3", "--tp")
    assert len(told) == 2, done.stderr[-3000:]
    with omniload.open(mix, arrays="numpy") as loader:
        alone = omniload.DynamicSampler(loader, groups=5)
        wanted = [told_of(alone.next_batch(rollout)) for _ in range(3)]

    assert [each["batches"] for each in told] == [json.loads(json.dumps(wanted))] * 2
    assert told[0]["state"] == told[1]["state"]


@pytest.mark.ray
def test_a_job_killed_within_a_batch_goes_on_from_its_state_on_other_ranks(
    warm_python, mix, tmp_path
):
    pytest.importorskip("torch")
    with omniload.open(mix, arrays="numpy") as loader:
        alone = omniload.DynamicSampler(loader, groups=5)
        wanted = [told_of(alone.next_batch(rollout)) for _ in range(6)]

    rounds = [each["rounds"] for each in wanted]
    # In its second round, when all ranks are within the batch and have kept the state before it.
    at = next(batch for batch in range(1, 6) if rounds[batch] > 1)
    last = str(sum(rounds[:at]) + 2)
    _, killed = ranks_that_sample(warm_python, 4, mix, "5", "6", "--killed-in", last)
    states = [(tmp_path / f"state-{rank}.json").read_text() for rank in range(4)]
    told, done = ranks_that_sample(warm_python, 2, mix, "5", str(6 - at), "--from-state")

    assert killed.returncode != 0
    assert "Signal 9 (SIGKILL)" in killed.stderr
    assert len(set(states)) == 1
    assert json.loads(states[0])["batch"] == at
    assert len(told) == 2, done.stderr[-3000:]
    found = [joined(parts) for parts in zip(*(each["batches"] for each in told), strict=True)]
    assert found == [joined([whole]) for whole in json.loads(json.dumps(wanted[at:]))]
    assert json_of("show", f"{mix}.run")["groups"]["batches"] == 6
