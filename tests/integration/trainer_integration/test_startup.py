"""A job that is told to end, and its next start: nothing is lost or left over; both starts are reported by stage."""

import signal
from pathlib import Path

import pytest
from click.testing import CliRunner

from omniload.actors.reaper_process import MARKS
from snapshot.commands.startup import startup_command
from snapshot.startup.attempts import attempts_of, difference_of
from snapshot.startup.events import LOG_VARIABLE
from snapshot.startup.reading import read_events
from tests.integration.trainer_integration.test_launch import (
    a_job,
    a_training_file,
    events_in,
    launched,
    none_left_of,
)
from trainer_integration.checkpoint.folder import steps_in
from trainer_integration.run.run_log import last_of_each_step, read_log

pytestmark = [pytest.mark.slow, pytest.mark.ray]


@pytest.fixture(scope="module")
def variables(warm_python, tmp_path_factory):
    """What a job is started with that writes the stages of its starts."""
    log = tmp_path_factory.mktemp("log") / "n1.jsonl"
    names = {LOG_VARIABLE: str(log), "OMNILOAD_NODE": "n1", "OMNILOAD_JOB": "tiny"}
    return names | warm_python.for_launchers


@pytest.fixture(scope="module")
def told_to_end(variables, tmp_path_factory):
    """A job of two ranks that was told to end in its first steps; its mark and the processes that it had."""
    folder = tmp_path_factory.mktemp("job")
    config = a_job(folder, ranks=2, steps=1_000_000, every=1_000_000)
    with launched(config, **variables) as job:
        job.reach(0)
        mark = job.ranks()[0].environ()[MARKS]
        started = job.started(mark)
        job.process.send_signal(signal.SIGTERM)
        job.end()
    return folder, job, mark, started


def test_a_launcher_that_is_told_to_end_saves_the_last_step_ends_every_process_and_exits_with_130(
    told_to_end,
):
    folder, job, mark, started = told_to_end

    assert job.process.returncode == 130, "".join(job.output)
    assert len(started) > 2
    assert none_left_of(mark, started)
    run = folder / "run"
    assert events_in(run)[-4:] == ["checkpoint", "exit", "exit", "end"]
    assert read_log(run)[-1].detail == "interrupted"
    assert steps_in(run / "checkpoints") == (last_of_each_step(read_log(run))[-1].step + 1,)


def nodes_of(attempt):
    """Return the one node of each stage."""
    return {stage.name: stage.nodes[0] for stage in attempt.stages}


def test_two_starts_of_a_training_are_reported_stage_by_stage(told_to_end, variables):
    folder, *_ = told_to_end
    (saved,) = steps_in(folder / "run" / "checkpoints")
    config = a_training_file(folder, ranks=1, steps=saved + 1, every=1)
    with launched(config, "--resume", "latest", **variables, OMNILOAD_ATTEMPT="1") as job:
        assert job.end() == 0, job.output

    log = Path(variables[LOG_VARIABLE])
    written = read_events([log.parent])
    first, again = attempts_of(written.events)
    nodes, resumed = nodes_of(first), nodes_of(again)

    # Of two ranks; the launcher opens the data plane, each rank its client and its first batch.
    assert {name: len(node.runs) for name, node in nodes.items()} == {
        "data_plane": 5,
        "process_group": 2,
        "model_build": 2,
        "first_step": 2,
    }
    assert {name: len(node.runs) for name, node in resumed.items()} == {
        "data_plane": 2,
        "model_build": 1,
        "checkpoint_load": 1,
        "first_step": 1,
    }
    assert first.reached
    assert again.reached
    assert [(attempt.job, attempt.number) for attempt in (first, again)] == [
        ("tiny", 0),
        ("tiny", 1),
    ]
    assert {node.node for node in nodes.values()} == {"n1"}
    assert (written.torn, first.strays) == (0, 0)
    (loading,) = resumed["checkpoint_load"].runs
    assert loading.bytes["disk"] > 1000
    assert difference_of(first, again).seconds == pytest.approx(again.seconds - first.seconds)
    shown = CliRunner().invoke(
        startup_command, [str(log), "--against", str(log), "--against-attempt", "0"]
    )
    assert "critical path, before and after" in shown.output
