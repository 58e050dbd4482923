"""The included trainer writes the stages of its start-up, and the report reads them."""

import pytest
from click.testing import CliRunner

from snapshot.commands.startup import startup_command
from snapshot.startup.attempts import attempts_of, difference_of
from snapshot.startup.events import LOG_VARIABLE
from snapshot.startup.reading import read_events
from tests.integration.trainer_integration.test_launch import a_job, a_training_file, launched

pytestmark = [pytest.mark.slow, pytest.mark.ray]


def nodes_of(attempt):
    """Return the one node of each stage."""
    return {stage.name: stage.nodes[0] for stage in attempt.stages}


def test_two_starts_of_a_training_are_reported_stage_by_stage(warm_python, tmp_path, monkeypatch):
    log = tmp_path / "log" / "n1.jsonl"
    log.parent.mkdir()
    monkeypatch.setenv(LOG_VARIABLE, str(log))
    monkeypatch.setenv("OMNILOAD_NODE", "n1")
    monkeypatch.setenv("OMNILOAD_JOB", "tiny")
    config = a_job(tmp_path, ranks=2, steps=2, every=2)
    with launched(config, **warm_python.for_launchers) as job:
        assert job.end() == 0, job.output
    a_training_file(tmp_path, ranks=1, steps=3, every=3)
    monkeypatch.setenv("OMNILOAD_ATTEMPT", "1")
    with launched(config, "--resume", "latest", **warm_python.for_launchers) as job:
        assert job.end() == 0, job.output

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
