"""``omniload.open`` in several processes: with any launcher, the samples of one process."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import yaml

import omniload
from omniload.actors.status_file import read_status
from omniload.base.errors import UnavailableError
from tests.support.plane.front_ranks import RANK, a_mix_file, environment, results_of, samples
from tests.support.ports import free_port
from tests.support.programs import finished

pytestmark = pytest.mark.ray
COLD_PYTHON = SimpleNamespace(path=sys.executable, for_launchers={})
LIMIT_S = 240
MEETING_S = 120
"""Limit of waits that end by themselves: a busy machine starts the second process late."""


@pytest.fixture(scope="module")
def mix(tmp_path_factory):
    return a_mix_file(tmp_path_factory.mktemp("corpus"))


def ranks(python, mix, variables, keywords):
    """Run a process with each set of variables; return what each printed."""
    processes = [
        subprocess.Popen(
            [python.path, RANK, mix, json.dumps(k)],
            env=environment(**v),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for v, k in zip(variables, keywords, strict=True)
    ]
    done = [process.communicate(timeout=LIMIT_S) for process in processes]
    results = [result for out, _ in done for result in results_of(out)]
    assert len(results) == len(processes), [err[-2000:] for _, err in done]
    return results


def torchrun(python, mix, num=2, *, rendezvous="static", **keywords):
    words = ["-m", "torch.distributed.run", "--nproc-per-node", num]
    if rendezvous == "c10d":
        words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    else:
        words += ["--master-port", free_port()]
    done = finished(
        [python.path, *map(str, words), str(RANK), str(mix), json.dumps(keywords)],
        limit_s=LIMIT_S,
        env=environment(**python.for_launchers),
    )
    results = results_of(done.stdout)
    assert len(results) == num, done.stderr[-3000:]
    return results


@pytest.fixture(scope="module")
def alone(warm_python, mix):
    return samples(ranks(warm_python, mix, [{}], [{"steps": 4}]))


def two(port, **more):
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    return [place | {"RANK": str(rank)} | more for rank in range(2)]


# `make test` covers it over two hosts, and as a script of a page.
@pytest.mark.soak
@pytest.mark.started_for_real
def test_two_processes_of_torchrun_share_the_samples_of_one(mix, alone):
    """Ray and the process group exist before omniload is imported."""
    found = torchrun(COLD_PYTHON, mix, steps=4, plan="ray first, group first")

    assert samples(found) == alone
    assert all(result["seen"] for result in found)


def test_tensor_parallel_peers_are_handed_the_batches_and_states_of_the_rank_that_fetches(
    warm_python, mix, alone
):
    held_out = yaml.safe_load(mix.read_text()) | {"splits": {"eval": 0.3}}
    evaluates = mix.with_name("held_out.yaml")
    evaluates.write_text(yaml.safe_dump(held_out))

    found = torchrun(
        warm_python, mix, 4, steps=4, mesh={"dp": 2, "tp": 2}, evaluates=str(evaluates)
    )

    by_rank = {result["rank"]: result for result in found}
    assert samples([by_rank[0], by_rank[2]]) == alone
    for fetches, follows in ((0, 1), (2, 3)):
        assert by_rank[follows]["seen"] == by_rank[fetches]["seen"]
        # Before the training and during it: each place has its own rows, also after another that was left early.
        assert by_rank[follows]["held_out"] == by_rank[fetches]["held_out"]
    with omniload.open(evaluates, split="eval", rank=0, world_size=1, arrays="numpy") as loader:
        of_one = samples([{"seen": [[batch.step, batch.tokens.tolist()] for batch in loader]}])
    dealt = [{"seen": by_rank[rank]["held_out"]} for rank in (0, 2)]
    assert samples(dealt) == of_one
    assert len(of_one) > 1
    states = [result["states"] for result in found]
    assert [state["step"] for state in states[0]] == [1, 2, 3, 4]
    assert states.count(states[0]) == 4


def test_peers_that_all_train_on_the_same_rows_are_served_by_threads_of_the_first(
    warm_python, mix, alone
):
    found = torchrun(warm_python, mix, 2, rendezvous="c10d", steps=4, mesh={"dp": 1, "tp": 2})

    assert samples(found[:1]) == samples(found[1:]) == alone
    assert found[0]["states"] == found[1]["states"]
    assert [result["ray"] for result in found] == [False, False]


def test_ranks_that_a_process_group_alone_knows_share_the_samples_of_one(warm_python, mix, alone):
    """As with ``mp.spawn``: no variable shows that there are others."""
    place = f"tcp://127.0.0.1:{free_port()}"
    variables = [{"NUMBER": str(number), "PLACE": place} for number in range(2)]

    found = ranks(warm_python, mix, variables, [{"steps": 4, "plan": "group by hand"}] * 2)

    assert samples(found) == alone
    assert all(result["seen"] for result in found)


# `make test` covers ranks without an agent (below), and states that one process loads during a run.
@pytest.mark.soak
def test_two_processes_that_no_agent_started_are_taken_back_to_a_state_loaded_in_mid_run(
    warm_python, mix, alone
):
    """As Slurm and mpirun start them: rank 0 hosts the store, and a later process group shares it."""
    found = ranks(
        warm_python, mix, two(free_port()), [{"steps": 4, "plan": "back once, group last"}] * 2
    )

    assert [step for step, _ in found[0]["seen"]] == [0, 1, 2, 3, 2, 3]
    twice = samples(found)
    assert {step: sorted(set(rows)) for step, rows in twice.items()} == {
        step: sorted(set(rows)) for step, rows in alone.items()
    }
    assert [len(twice[step]) // len(alone[step]) for step in range(4)] == [1, 1, 2, 2]


# `make test` covers meetings in folders by threads of one process (tests/contract).
@pytest.mark.soak
def test_scripts_that_meet_in_a_folder_and_are_asked_to_end_answer_themselves(
    warm_python, mix, alone, tmp_path
):
    """Ray would abort the process, but scripts save a checkpoint when they are preempted."""
    variables = [{"RANK": str(rank), "WORLD_SIZE": "2"} for rank in range(2)]
    meeting = {"address": str(tmp_path / "meet"), "arrays": "torch"}

    found = ranks(
        warm_python, mix, variables, [{"steps": 4, "plan": "asked to end", **meeting}] * 2
    )

    assert [result["asked"] for result in found] == [1, 1]
    assert samples(found) == alone


def test_a_rank_that_never_joins_is_named(warm_python, mix):
    keywords = {"steps": 4, "timeout": 4}
    present, _ = two(free_port())

    (result,) = ranks(warm_python, mix, [present], [keywords])

    assert result["error"] == "UnavailableError"
    assert "ranks [1] have not joined" in result["message"]


_DIES = """
import os, signal, sys, omniload
rank = int(sys.argv[3])
with omniload.open(sys.argv[1], arrays="numpy", rank=rank, world_size=2, address=sys.argv[2]) as loader:
    for step, _ in enumerate(loader):
        if rank and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.scripts_start_warm
def test_a_rank_that_nobody_launched_with_the_other_is_told_that_it_was_killed(mix, tmp_path):
    """It is reported half an hour before ``runtime.batch_timeout``, because no launcher ends the remaining rank."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _DIES, str(mix), str(tmp_path / "meet"), str(rank)],
            env=environment(),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]

    said = [process.communicate(timeout=LIMIT_S)[1] for process in processes]

    assert [process.returncode for process in processes] == [1, -9]
    assert "which does not come: constructor-0" in said[0]
    assert f"rank dp=1 (process {processes[1].pid}, last heartbeat" in said[0]


def test_ranks_that_do_not_agree_are_refused_on_all_sides_and_open_the_next_loader(
    warm_python, mix, tmp_path
):
    text = yaml.safe_load(mix.read_text())
    text["sources"]["ids"]["path"] = "nowhere/*.parquet"
    (tmp_path / "mix.yaml").write_text(yaml.safe_dump(text))
    attempts = [
        ({"mix": str(tmp_path / "mix.yaml")}, {"mix": str(tmp_path / "mix.yaml")}),
        ({}, {"seed": 5}),
        ({"rank": 0, "world_size": 2}, {"rank": 1, "world_size": 3}),
        ({}, {"state": {"version": 1, "step": 2}}),
        ({}, {}),
    ]
    says = [
        "nowhere",
        "opens another mix than rank 0, or with other settings: seed is 5, on rank 0 ",
        "counts dp 3 and cp 1, rank 0 dp 2",
        "rank 1 was given the state before step 2, and rank 0 begins at step 0",
        "rank=0 and world_size=1",
    ]
    keywords = [
        {"steps": 4, "timeout": MEETING_S, "attempts": each} for each in zip(*attempts, strict=True)
    ]

    found = ranks(warm_python, mix, two(free_port()), keywords)

    for result in found:
        kinds, messages = zip(*result["refused"], strict=True)
        assert kinds == ("ConfigError",) * 3 + ("StateError",) * 2
        assert all(map(str.__contains__, messages, says)), messages


def test_a_loop_may_go_to_another_folder_than_its_run_and_its_meeting_are_named_from(
    mix, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    loader = omniload.open(mix, run_dir="run", steps=2, arrays="numpy")
    late = omniload.open(mix, rank=1, world_size=2, address="meeting", timeout=0.1, arrays="numpy")

    monkeypatch.chdir(tmp_path / "elsewhere")
    with loader:
        list(loader)
    with late, pytest.raises(UnavailableError, match="rank 1: rank 0 has not"):
        late.next_batch()

    assert read_status(tmp_path / "run").has_ended
    assert list((tmp_path / "meeting").iterdir())
    assert not list((tmp_path / "elsewhere").iterdir())
