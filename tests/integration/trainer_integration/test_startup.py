"""The included trainer writes the stages of its start-up, and the report reads them."""

import json

import pytest
from click.testing import CliRunner

from snapshot.commands.startup import startup_command
from snapshot.startup.events import LOG_VARIABLE
from tests.integration.trainer_integration.test_launch import a_job, a_training_file, launched

pytestmark = [pytest.mark.slow, pytest.mark.ray]


def report_of(*arguments):
    result = CliRunner().invoke(
        startup_command, [*map(str, arguments), "--json"], catch_exceptions=False
    )
    document = json.loads(result.stdout)
    return document, {stage["stage"]: stage["nodes"][0] for stage in document["stages"]}


def test_two_starts_of_a_training_are_reported_stage_by_stage(tmp_path, monkeypatch):
    log = tmp_path / "log" / "n1.jsonl"
    log.parent.mkdir()
    monkeypatch.setenv(LOG_VARIABLE, str(log))
    monkeypatch.setenv("OMNILOAD_NODE", "n1")
    monkeypatch.setenv("OMNILOAD_JOB", "tiny")
    config = a_job(tmp_path, ranks=2, steps=2, every=2)
    with launched(config) as job:
        assert job.end() == 0, job.output
    a_training_file(tmp_path, ranks=1, steps=3, every=3)
    monkeypatch.setenv("OMNILOAD_ATTEMPT", "1")
    with launched(config, "--resume", "latest") as job:
        assert job.end() == 0, job.output

    first, nodes = report_of(log.parent, "--attempt", 0)
    again, resumed = report_of(log, "--against", log, "--against-attempt", 0)

    # Of two ranks; the launcher opens the data plane, each rank its client and its first batch.
    assert {name: node["runs"] for name, node in nodes.items()} == {
        "process_start": 2,
        "data_plane": 5,
        "process_group": 2,
        "model_build": 2,
        "first_step": 2,
    }
    assert {name: node["runs"] for name, node in resumed.items()} == {
        "process_start": 1,
        "data_plane": 2,
        "model_build": 1,
        "checkpoint_load": 1,
        "first_step": 1,
    }
    assert first["reached"]
    assert again["reached"]
    assert (first["job"], first["nodes"]) == ("tiny", ["n1"])
    assert (first["torn"], first["strays"]) == (0, 0)
    assert resumed["checkpoint_load"]["bytes"]["disk"] > 1000
    assert again["attempts"] == [0, 1]
    assert again["against"]["seconds"] == pytest.approx(again["seconds"] - first["seconds"])
