"""Jobs that torchrun or Slurm starts, on two hosts: network namespaces with an address each."""

import json
import os
import re
import shlex
import signal
import subprocess
from contextlib import contextmanager, suppress

import psutil
import pytest

from omniload.mix.run_record import read_run_record
from tests.docs.snippets import blocks_of
from tests.house.modules import ROOT
from tests.support.namespaces import inside
from tests.support.plane.corpora import a_corpus
from tests.support.plane.two_hosts import ADDRESSES, on, processes_on
from tests.support.trainer.run_lines import write_mix
from trainer_integration.checkpoint.folder import steps_in
from trainer_integration.report.proof import prove
from trainer_integration.report.run_summary import attempts_of
from trainer_integration.run.run_log import EventLine, last_of_each_step, read_log

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
]
LIMIT_S = 240
STEPS = 60
MODEL = {"dim": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "hidden": 16}
MODEL |= {"num_experts": 2, "top_k": 1}


@pytest.fixture
def config(tmp_path):
    mix = a_corpus(tmp_path, records=80, shards=1, runtime={"bind": "auto"})
    write_mix(tmp_path / "mix.yaml", mix)
    content = {
        "version": 1,
        "mix": "mix.yaml",
        "steps": STEPS,
        "parallel": {"dp": 2},
        "model": MODEL,
        "vocab_size": 5000,
        "optimizer": {"warmup_steps": 1},
        "checkpoint": {"every_steps": 10, "asynchronous": True},
    }
    path = tmp_path / "train.yaml"
    path.write_text(json.dumps(content))
    return path


def environment(**more):
    foreign = ("RAY_", "SLURM_", "GLOO_", "MASTER_")
    mine = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    return mine | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | more


@contextmanager
def started(hosts, words_of, environment_of):
    """Start a command on each host; end what is left of it."""
    processes = [
        on(
            host,
            *words_of(number),
            env=environment_of(number),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for number, host in enumerate(hosts)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
                process.kill()
            process.communicate()


def reach(process, step):
    """Read what rank 0 prints until it shows ``step`` or a later one; return what was read."""
    said = []
    for line in process.stdout:
        said.append(line)
        shown = re.match(r"\s+(\d+)\s+\d+\.\d{3}\s", line)
        if shown and int(shown[1]) >= step:
            return said
    pytest.fail(f"the job ended before step {step}:\n{''.join(said)}")


def rank_on(host):
    """Return the process that stands for the one rank there."""
    found = []
    for process in processes_on(host):
        with suppress(psutil.Error):
            words = process.cmdline()
            # The agent that has started it has the same last word.
            if words[-2:] == ["-u", "train.py"]:
                found.append(process)
    (rank,) = found
    return rank


def events_in(run):
    return [line.what for line in read_log(run) if isinstance(line, EventLine)]


def slurm_in(folder, hosts, python):
    """Write what stands for Slurm and torchrun on two hosts into a folder of commands."""
    each = [
        # Torch asks for the address of the host's name, which nobody here knows: the address is the name.
        f"SLURM_PROCID={number} {shlex.join(inside(host))} unshare --uts sh -c "
        f"""'hostname {ADDRESSES[number]} && exec "$@"' sh "$@" & started+=($!)"""
        for number, host in enumerate(hosts)
    ]
    worst = 'worst=0; for each in "${started[@]}"; do wait $each || worst=$?; done; exit $worst'
    scripts = {
        "scontrol": 'test "$1 $2" = "show hostnames" && tr , "\\n" <<< "$3"',
        "srun": "\n".join(["export SLURM_STEP_ID=0 SLURM_NTASKS=2", *each, worst]),
        "torchrun": f'exec {shlex.quote(str(python))} -m torch.distributed.run "$@"',
    }
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)


TRAIN = """
import os, sys, threading
from pathlib import Path
from trainer_integration.run import trainer

train_step, was_killed = trainer.train_step, Path("was-killed")

def held(model, optimizer, batch, *more):
    # The rank that is to be killed waits for that, however late it comes.
    while os.environ["SLURM_PROCID"] == "1" and batch.step == 25 and not was_killed.exists():
        threading.Event().wait(0.01)
    return train_step(model, optimizer, batch, *more)

trainer.train_step = held
from omniload.__main__ import main
sys.argv[1:] = ["train", "run", "{config}"]
main()
"""


def test_the_pages_script_for_slurm_starts_all_again_after_a_kill_and_the_samples_are_the_same(
    warm_python, hosts, config, tmp_path, monkeypatch
):
    """With a rendezvous of c10d, whose store outlives a start, and a model of which each rank keeps a part."""
    content = json.loads(config.read_text())
    config.write_text(json.dumps(content | {"parallel": {"dp": 2, "fsdp": True}}))
    page = blocks_of(ROOT / "docs/how-to/running/several-hosts.md")
    (script,) = (block.text for block in page if block.text.startswith("#!/bin/bash"))
    (tmp_path / "train.sbatch").write_text(script)
    (tmp_path / "train.py").write_text(TRAIN.format(config=config.name))
    (commands := tmp_path / "bin").mkdir()
    slurm_in(commands, hosts, warm_python.path)
    monkeypatch.chdir(tmp_path)
    job = {"SLURM_JOB_ID": "4321", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "1"}
    job |= {"SLURM_JOB_NODELIST": ",".join(ADDRESSES), "PATH": f"{commands}:{os.environ['PATH']}"}
    # As options of torchrun that the script leaves at their defaults.
    job |= {"PET_MAX_RESTARTS": "1", "PET_MONITOR_INTERVAL": "0.2"}

    warm = environment(**warm_python.for_launchers, **job)
    with started([""], lambda _: ("bash", "train.sbatch"), lambda _: warm) as (batch,):
        said = reach(batch, 20)
        rank_on(hosts[1]).send_signal(signal.SIGKILL)
        (tmp_path / "was-killed").touch()
        said.append(batch.communicate(timeout=LIMIT_S)[0])

    assert batch.returncode == 0, "".join(said)
    run = config.parent / "run"
    before, after = attempts_of(read_log(run))
    # Rank 0 finds its peer gone, or is ended by its own agent, which counts no restart then.
    ended = "rank 0: UnavailableError: rank 0: another rank has ended"
    assert before.cause is None or before.cause.startswith(ended)
    assert after.resumed_from == after.steps[0].step >= 10
    assert prove(run).require().num_logged >= STEPS
    assert [line.step for line in last_of_each_step(read_log(run))] == list(range(STEPS))
    assert events_in(run)[-1] == "end"
    assert "report.html" in "".join(said)


def test_slurms_variables_are_enough_on_two_hosts_and_its_signal_saves_the_last_step(
    warm_python, hosts, config
):
    def slurm(number):
        step = {"SLURM_JOB_ID": "4321", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}
        step |= {"SLURM_STEP_NODELIST": ",".join(ADDRESSES), "SLURM_PROCID": str(number)}
        return environment(**step)

    content = json.loads(config.read_text())
    config.write_text(json.dumps(content | {"steps": 1_000_000}))
    words = (warm_python.path, "-m", "omniload", "train", "run", config)
    with started(hosts, lambda _: words, slurm) as (first, second):
        said = reach(first, 0)
        second.send_signal(signal.SIGUSR1)
        said += [first.communicate(timeout=LIMIT_S)[0], second.communicate(timeout=LIMIT_S)[0]]

    assert (first.returncode, second.returncode) == (130, 130), "".join(said)
    run = config.parent / "run"
    last = last_of_each_step(read_log(run))[-1].step
    assert steps_in(run / "checkpoints")[-1] == last + 1
    assert events_in(run)[-2:] == ["checkpoint", "end"]
    assert [life.from_step for life in read_run_record(run).lives] == [0]
    assert prove(run).require().num_logged == last + 1


def test_another_number_of_ranks_than_the_file_names_is_refused_on_all_of_them(
    warm_python, hosts, config
):
    content = json.loads(config.read_text())
    config.write_text(json.dumps(content | {"parallel": {"dp": 3}}))
    job = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29523", "WORLD_SIZE": "2"}
    words = (warm_python.path, "-m", "omniload", "train", "run", config)
    with started(hosts[:1], lambda _: words, lambda _: environment(**job, RANK="0")) as (first,):
        # Rank 0 has decided, and hosts the store that the other, which comes later, is to find.
        heard = first.stdout.readline()
        while heard and "stays up to 60 s for ranks [1]" not in heard:
            heard = first.stdout.readline()
        assert heard, "rank 0 has gone before the other came"
        second = started(hosts[1:], lambda _: words, lambda _: environment(**job, RANK="1"))
        with second as (late,):
            both = [first, late]
            said = [process.communicate(timeout=LIMIT_S)[0] for process in both]

    assert [process.returncode for process in both] == [2, 2], said
    assert all("dp 3 times sp 1 is 3, but 2 ranks were started" in text for text in said)
    assert not (config.parent / "run").exists()
