"""Jobs as they are launched from a terminal: killed, stopped, resumed, and nothing left behind."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

from omniload.actors.reaper_process import MARKS, marks_of
from omniload.base.cli import main
from omniload.commands.edits.asking import change_mix
from omniload.mix.edits.edit import SetWeights, SkipShard
from omniload.mix.journal.times import times_since
from omniload.mix.run_record import read_run_record
from tests.support.disks import a_tmpfs
from tests.support.every_process import every_process
from tests.support.plane.builders import a_mix
from tests.support.plane.corpora import a_corpus, write_tokens
from tests.support.plane.edits.mix_commands import json_of
from tests.support.trainer.run_lines import write_mix
from trainer_integration.checkpoint.folder import steps_in
from trainer_integration.report.proof import prove
from trainer_integration.report.run_summary import attempts_of
from trainer_integration.run.run_lock import RunLock
from trainer_integration.run.run_log import EventLine, last_of_each_step, read_log

pytestmark = pytest.mark.slow

_COMMAND = (sys.executable, "-c", "from omniload.base.cli import main; main()", "train", "run")
_LONG_S = 120
_MODEL = {
    "dim": 16,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "hidden": 16,
    "num_experts": 2,
    "top_k": 1,
}


def a_job(folder: Path, *, ranks: int, steps: int, every: int, **changes: object) -> Path:
    """Write a small corpus, its mix and a training file; return the latter."""
    mix = a_corpus(folder, **({"records": 80, "shards": 1} | changes))
    write_mix(folder / "mix.yaml", mix)
    return a_training_file(folder, ranks=ranks, steps=steps, every=every)


def a_training_file(folder: Path, *, ranks: int = 1, steps: int, every: int) -> Path:
    content = {
        "version": 1,
        "mix": "mix.yaml",
        "steps": steps,
        "parallel": {"dp": ranks},
        "model": _MODEL,
        "vocab_size": 5000,
        "optimizer": {"warmup_steps": 1},
        "checkpoint": {"every_steps": every},
    }
    path = folder / "train.yaml"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


class Job:
    """A launcher in a process of its own."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.output: list[str] = []

    def reach(self, step: int) -> None:
        """Read what it prints until it shows ``step`` or a later one."""
        for line in self.process.stdout:
            self.output.append(line)
            shown = re.match(r"\s+(\d+)\s+\d+\.\d{3}\s", line)
            if shown and int(shown[1]) >= step:
                return
        pytest.fail(f"the job ended before step {step}:\n{''.join(self.output)}")

    def started(self, mark: str) -> list[psutil.Process]:
        """Return all processes of the job: by their parents too, as titles of Ray's agents overwrite their marks."""
        return [*{*marked(mark), *psutil.Process(self.process.pid).children(recursive=True)}]

    def ranks(self) -> list[psutil.Process]:
        """Return the processes of the ranks."""
        children = psutil.Process(self.process.pid).children()
        return [child for child in children if "trainer_integration.run.rank" in child.cmdline()]

    def end(self) -> int:
        """Read the rest; return the exit code."""
        rest, _ = self.process.communicate(timeout=_LONG_S)
        self.output.append(rest)
        return self.process.returncode


@contextmanager
def launched(config: Path, *options: str, **variables: str) -> Iterator[Job]:
    process = subprocess.Popen(
        [*_COMMAND, str(config), *options],
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield Job(process)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def marked(mark: str) -> list[psutil.Process]:
    """Return the processes of a job, whoever their parent is."""
    return [process for process in every_process() if mark in marks_of(process)]


def none_left_of(mark: str, started: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs({*started, *marked(mark)}, timeout=_LONG_S)
    return alive == [] and marked(mark) == []


def events_in(run: Path) -> list[str]:
    return [line.what for line in read_log(run) if isinstance(line, EventLine)]


@pytest.mark.ray
@pytest.mark.started_for_real
# Two starts of all processes, each of up to two minutes on a busy machine.
@pytest.mark.timeout(600)
def test_a_killed_rank_brings_the_job_back_with_the_same_samples_and_leaves_nothing(
    warm_python, tmp_path
):
    config = a_job(tmp_path, ranks=2, steps=120, every=20, shards=2)

    with launched(config, **warm_python.for_launchers) as job:
        job.reach(24)
        edited = change_mix(tmp_path / "run", SetWeights(weights={"web": 9.0}), None, 60.0).edit
        shard = SkipShard(file="1.parquet", source="web")
        skipped = change_mix(tmp_path / "run", shard, None, 60.0).edit
        job.reach(skipped.step + 2)
        victim = job.ranks()[-1]
        mark = victim.environ()[MARKS]
        started = job.started(mark)
        victim.send_signal(signal.SIGKILL)
        code = job.end()

    assert code == 0, "".join(job.output)
    first, second = attempts_of(read_log(tmp_path / "run"))
    assert re.fullmatch(r"rank [01]: signal SIGKILL", first.cause)
    assert second.resumed_from >= 20
    assert second.resumed_from == second.steps[0].step <= first.steps[-1].step + 1
    assert len(last_of_each_step(read_log(tmp_path / "run"))) == 120
    assert prove(tmp_path / "run").require().num_logged >= 120
    assert edited.step >= 24
    # What was drawn before may wait for a row.
    late = json_of("audit", tmp_path / "run", "--step", skipped.step + 3)["samples"]
    assert {Path(s["shard"]).name for s in late if s["source"] == "web"} == {"0.parquet"}
    since = last_of_each_step(read_log(tmp_path / "run"))[edited.step :]
    # Over all steps since the edit, each of four rows: a single document is a quarter of a step.
    tokens = sum((Counter(line.tokens_by_source) for line in since), Counter())
    assert tokens["web"] > 4 * tokens["code"]
    assert "report.html" in job.output[-1]
    assert none_left_of(mark, started)


# `make test` has the same of whoever opens a plane, whose reaper it is.
@pytest.mark.soak
@pytest.mark.ray
def test_a_launcher_that_is_killed_leaves_no_process(tmp_path):
    config = a_job(tmp_path, ranks=2, steps=1_000_000, every=1_000_000)

    with launched(config) as job:
        job.reach(0)
        mark = job.ranks()[0].environ()[MARKS]
        started = job.started(mark)
        job.process.kill()

    assert len(started) > 2
    assert none_left_of(mark, started)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A job of one rank that has trained four steps, evaluated, traced, and saved beside training."""
    folder = tmp_path_factory.mktemp("finished")
    config = a_job(folder, ranks=1, steps=4, every=2)
    held_out = a_corpus(
        folder / "held_out", ("law",), records=10, shards=1, mix={"stop": "each_once"}
    )
    write_mix(folder / "held_out" / "mix.yaml", held_out)
    more = {
        "checkpoint": {"every_steps": 2, "asynchronous": True},
        "evaluation": {"mix": "held_out/mix.yaml", "every_steps": 2},
        "spike_guard": {"action": "skip", "window": 10},
        "peak_tflops": 0.1,
    }
    config.write_text(json.dumps(json.loads(config.read_text()) | more))
    (folder / "sitecustomize.py").write_text(
        "import atexit\nprint('printed before', flush=True)\natexit.register(print, 'printed after')\n"
    )
    own = folder / "python"
    own.write_text(f'#!/bin/sh\necho "$@" > {folder}/asked\nexec {sys.executable} "$@"\n')
    own.chmod(0o755)
    variables = {"PYTHONPATH": str(folder), "PYTHON_EXEC": str(own)}
    with launched(config, "--profile", "1-2", **variables) as job:
        assert job.end() == 0, "".join(job.output)
    return folder


@pytest.fixture
def job_folder(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "job")


def test_a_run_tells_its_flops_its_evaluations_its_trace_and_how_long_saves_held_it_up(finished):
    run = finished / "run"
    steps = last_of_each_step(read_log(run))
    told = {line.what: line for line in read_log(run) if isinstance(line, EventLine)}

    assert [step.evaluation is not None for step in steps] == [False, True, False, True]
    assert steps[1].evaluation.keys() == {"law"}
    assert steps[3].evaluation["law"] == pytest.approx(np.log(5000), rel=0.1)
    for step in steps:
        assert step.model_flops > 0
        assert step.mfu == pytest.approx(step.model_flops / step.seconds / 0.1e12)
    assert told["checkpoint"].stall_s > 0
    assert told["checkpoint"].took_s > 0
    assert told["profile"].detail == str(run / "profile" / "rank-0-steps-1-2.json")
    trace = json.loads(Path(told["profile"].detail).read_text())["traceEvents"]
    assert {"step 1", "step 2"} <= {event.get("name") for event in trace}
    saved = json.loads((run / "checkpoints" / "step-00000004" / "meta.json").read_text())
    assert saved["progress"]["tokens"] == sum(step.tokens for step in steps)
    assert saved["progress"]["norms"] == [step.grad_norm for step in steps]


def test_ranks_are_started_by_the_python_that_is_named(finished):
    assert (finished / "asked").read_text() == "-m trainer_integration.run.rank\n"


def test_a_run_with_checkpoints_is_not_started_over_by_accident(job_folder, capsys):
    before = (job_folder / "run" / "log.jsonl").read_bytes()

    with pytest.raises(SystemExit) as ended:
        main(["train", "run", str(job_folder / "train.yaml")])

    assert ended.value.code == 4
    assert "holds step-00000004; pass --resume latest" in capsys.readouterr().err
    assert (job_folder / "run" / "log.jsonl").read_bytes() == before


def test_resuming_goes_on_from_the_newest_checkpoint(warm_python, job_folder):
    config = a_training_file(job_folder, steps=8, every=2)
    (first_log,) = (job_folder / "run" / "logs").glob("rank-*-attempt-*")
    said = first_log.read_bytes()

    with launched(config, "--resume", "latest", **warm_python.for_launchers) as job:
        code = job.end()

    assert code == 0, "".join(job.output)
    run = job_folder / "run"
    assert first_log.read_bytes() == said
    assert len(list((run / "logs").glob("rank-*-attempt-*"))) == 2
    assert [life.from_step for life in read_run_record(run).lives] == [0, 4]
    assert [line.step for line in last_of_each_step(read_log(run))] == list(range(8))
    assert events_in(run).count("start") == 2
    assert events_in(run).count("resume") == 1
    assert prove(run).require().num_logged == 8


def spoil(file):
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_a_checkpoint_that_ranks_find_damaged_is_set_aside_and_the_one_before_is_used(
    warm_python, job_folder
):
    run = job_folder / "run"
    (shard,) = (run / "checkpoints" / "step-00000004").glob("shard-*")
    spoil(shard)
    config = a_training_file(job_folder, steps=8, every=2)
    content = json.loads(config.read_text())
    config.write_text(json.dumps(content | {"max_restarts": 0}))

    with launched(config, "--resume", "latest", **warm_python.for_launchers) as job:
        code = job.end()

    shown = "".join(job.output)
    assert code == 0, shown
    assert re.search(r"set aside +step-00000004.aside-1: .*has checksum", shown)
    told = events_in(run)
    at = told.index("damaged")
    assert told[at - 2 : at + 3] == ["start", "resume", "damaged", "exit", "restart"]
    assert {"resume", "set_aside"} <= set(told[at + 3 : at + 6])
    assert [life.from_step for life in read_run_record(run).lives] == [0, 2]
    assert steps_in(run / "checkpoints") == (4, 6, 8)
    assert (run / "checkpoints" / "step-00000004.aside-1" / "meta.json").exists()
    assert prove(run).require().num_logged == 10


def test_a_run_is_resumed_from_the_step_that_is_asked_for(warm_python, job_folder):
    config = a_training_file(job_folder, steps=6, every=2)
    run = job_folder / "run"

    with launched(config, "--resume", "2", **warm_python.for_launchers) as job:
        code = job.end()

    assert code == 0, "".join(job.output)
    assert [life.from_step for life in read_run_record(run).lives] == [0, 2]
    assert steps_in(run / "checkpoints") == (2, 4, 6)
    assert (run / "checkpoints" / "step-00000004.aside-1").exists()
    assert prove(run).require().num_logged == 8


def test_a_finished_run_that_is_resumed_says_so_and_starts_nothing(job_folder, capsys):
    log = job_folder / "run" / "log.jsonl"
    before = log.read_bytes()

    with pytest.raises(SystemExit) as ended:
        main(["train", "run", str(job_folder / "train.yaml"), "--resume", "latest"])

    assert ended.value.code == 0
    assert (
        "step-00000004 is the end of the run: nothing is left to train" in capsys.readouterr().out
    )
    assert log.read_bytes() == before
    assert len(list((job_folder / "run" / "logs").glob("rank-*-attempt-*"))) == 1


def test_a_save_that_does_not_fit_ends_the_job_at_once_with_what_is_missing(warm_python, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    config = a_job(tmp_path, ranks=1, steps=8, every=2)
    content = json.loads(config.read_text())
    config.write_text(json.dumps(content | {"run_dir": "disk/run"}))

    with a_tmpfs(disk, "2M"), launched(config, **warm_python.for_launchers) as job:
        code = job.end()
        shown = "".join(job.output)
        assert code == 4, shown
        assert re.search(
            r"step-00000002 needs \d+ bytes .*, \d+ bytes .* are free; make room", shown
        )
        assert "Traceback" not in shown
        run = disk / "run"
        assert "restart" not in events_in(run)
        assert list((run / "checkpoints").iterdir()) == []
        (log,) = (run / "logs").glob("rank-*-attempt-*")
        assert "Traceback" not in log.read_text()


def test_resuming_with_another_mix_names_what_changed_and_is_not_tried_again(
    warm_python, job_folder
):
    mix = json.loads((job_folder / "mix.yaml").read_text())
    (job_folder / "mix.yaml").write_text(json.dumps(mix | {"seed": 8}))
    config = a_training_file(job_folder, steps=8, every=2)
    run = job_folder / "run"
    records = [run / "run.json", run / "train.json"]
    before = [path.read_bytes() for path in records]

    with launched(config, "--resume", "latest", **warm_python.for_launchers) as job:
        code = job.end()

    assert code == 4
    assert [path.read_bytes() for path in records] == before
    assert "seed: 7 saved, 8 now" in "".join(job.output)
    assert "restart" not in events_in(run)


def test_a_run_that_another_launcher_holds_is_refused_and_left_as_it_is(job_folder, capsys):
    config = a_training_file(job_folder, steps=8, every=2)
    before = (job_folder / "run" / "log.jsonl").read_bytes()

    with RunLock(job_folder / "run"), pytest.raises(SystemExit) as ended:
        main(["train", "run", str(config), "--resume", "latest"])

    assert ended.value.code == 4
    assert f"process {os.getpid()} on" in capsys.readouterr().err
    assert (job_folder / "run" / "log.jsonl").read_bytes() == before


def test_what_a_library_prints_in_a_rank_goes_to_its_log(finished):
    (log,) = (finished / "run" / "logs").glob("rank-*-attempt-*")

    assert {"printed before", "printed after"} <= set(log.read_text().splitlines())


def test_the_steps_before_the_end_of_the_data_are_saved_and_the_end_is_told(warm_python, tmp_path):
    config = a_job(
        tmp_path, ranks=1, steps=1000, every=1000, records=20, mix={"stop": "first_exhausted"}
    )

    with launched(config, **warm_python.for_launchers) as job:
        code = job.end()

    assert code == 0, "".join(job.output)
    run = tmp_path / "run"
    steps = last_of_each_step(read_log(run))[-1].step + 1
    assert 1 < steps < 1000
    assert events_in(run)[-4:] == ["data_end", "checkpoint", "exit", "end"]
    assert read_log(run)[-1].detail == f"done: the data ended at step {steps}"
    assert steps_in(run / "checkpoints") == (steps,)


@pytest.mark.ray
def test_two_ranks_over_actors_train_a_last_step_that_one_of_them_has_no_row_of(
    warm_python, tmp_path
):
    # A row a document, four of them a step: nine leave one row for the last.
    documents = [np.arange(32, dtype=np.int32) + at for at in range(9)]
    write_tokens(tmp_path / "web" / "0.parquet", documents)
    write_mix(tmp_path / "mix.yaml", a_mix(sources=("web",), mix={"stop": "each_once"}))
    config = a_training_file(tmp_path, ranks=2, steps=1000, every=1000)

    with launched(config, **warm_python.for_launchers) as job:
        code = job.end()

    assert code == 0, "".join(job.output)
    run = tmp_path / "run"
    steps = last_of_each_step(read_log(run))
    assert [step.tokens for step in steps] == [128, 128, 32]
    assert all(step.loss > 0 for step in steps)
    assert read_log(run)[-1].detail == "done: the data ended at step 3"
    assert steps_in(run / "checkpoints") == (3,)
    assert prove(run).require().num_logged == 3
    # What costs are fitted to, of both ranks: the tokens that the log counts.
    times = times_since(run, 0)
    assert set(times.ranks_M) == {0, 1}
    assert times.tokens_M.sum() == 128 + 128 + 32
