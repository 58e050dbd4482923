"""The whole start-up benchmark's arithmetic: parts that sum to a start, ratios by round, jobs of a size."""

import os
import shutil
from dataclasses import replace
from importlib.metadata import distribution

import click
import pytest

from benchmarks.startup import whole as whole_startup
from benchmarks.startup.whole import Round, check_machine, tables_of
from benchmarks.startup.whole_job import FETCH, PROGRAM, REQUIREMENTS, FirstStep, Job, first_step_of
from benchmarks.startup.whole_place import CheckpointStore, closure_of, s3_url
from benchmarks.startup.whole_ways import Places, Start, ours, plain
from omniload.base.extras import DISTRIBUTION
from snapshot.startup.attempts import attempts_of
from tests.support.snapshot.startup_builders import a_pair
from tests.support.trainer.run_lines import a_memory, a_step, an_event
from trainer_integration.moe.config import MoEShape

FIRST = FirstStep(8.5, 1.5, "ab")


def a_round(*stages, wall_s):
    """Return a start whose stages follow each other, each with its seconds."""
    events, at_s = [], 0.0
    for name, seconds in stages:
        events += a_pair(name, "n1", at_s, at_s + seconds)
        at_s += seconds
    (attempt,) = attempts_of(events)
    start = Start(wall_s=wall_s, cpu_s=wall_s / 2, wire_bytes=1_000_000, first=FIRST)
    return Round(start=start, attempt=attempt)


def test_the_parts_of_a_start_sum_to_what_it_took():
    found = a_round(("image", 4.0), ("environment", 3.0), ("first_step", 1.0), wall_s=9.5)

    assert found.parts == pytest.approx(
        {
            "(before the first stage)": 1.5,
            "image": 4.0,
            "environment": 3.0,
            "first_step": 1.0,
            "(between stages)": 0.0,
        }
    )


def two_ways():
    """Return two rounds: ours takes a half and then a quarter, most of plain's is its checkpoint."""
    plain_rounds = [
        a_round(("checkpoint_load", 12.0), ("first_step", 4.0), wall_s=16.0),
        a_round(("checkpoint_load", 10.0), ("first_step", 4.0), wall_s=16.0),
    ]
    our_rounds = [
        a_round(("checkpoint_load", 4.0), ("first_step", 4.0), wall_s=8.0),
        a_round(("checkpoint_load", 1.0), ("first_step", 3.0), wall_s=4.0),
    ]
    return {"plain": plain_rounds, "ours": our_rounds}


def test_ratios_are_taken_within_a_round():
    ratios = tables_of(two_ways())[2]

    assert ratios.rows[0][:3] == ("whole start", "0.50 / 0.25", "0.38")
    assert ratios.rows[1][:3] == ("without the checkpoint stage", "1.00 / 0.50", "0.75")
    assert ratios.rows[0][3] == "<= 0.5, target 0.3"


def test_stages_stand_in_order_with_medians_and_a_total():
    stages = tables_of(two_ways())[0]

    assert [row[0] for row in stages.rows] == [
        "(before the first stage)",
        "checkpoint_load",
        "first_step",
        "(between stages)",
        "total",
    ]
    assert stages.rows[1][1:] == ("11.00", "2.50", "0.23")
    assert stages.rows[-1][1:] == ("16.00", "6.00", "0.38")
    assert stages.rows[-2][3] == "-"


def test_a_stage_that_one_way_lacks_counts_nothing_there():
    rounds = {
        "plain": [a_round(("environment", 5.0), ("first_step", 1.0), wall_s=6.0)],
        "ours": [a_round(("first_step", 1.0), wall_s=1.0)],
    }

    rows = {row[0]: row[1:] for row in tables_of(rounds)[0].rows}

    assert rows["environment"] == ("5.00", "0.00", "0.00")


@pytest.mark.parametrize("mib", [8, 32, 64, 200, 512, 1024])
def test_a_job_s_checkpoint_has_about_the_size_asked_for(tmp_path, mib):
    shape = MoEShape(**Job(tmp_path, mib).model)
    expert = 3 * shape.dim * shape.hidden
    parameters = shape.num_layers * shape.num_experts * expert + 2 * 5000 * shape.dim

    assert 0.6 <= 12 * parameters / (mib << 20) <= 1.4


def test_the_programs_of_a_job_are_python():
    for name, text in (("job.py", PROGRAM), ("fetch.py", FETCH)):
        compile(text, name, "exec")


def test_a_job_s_folder_holds_all_but_the_checkpoint(tmp_path):
    job = Job(tmp_path / "job", 16)

    job.write()
    file = job.training_file("ours", "omnifs://ckpt::s3://b")

    names = {path.name for path in job.folder.iterdir()}
    assert names == {"web", "mix.yaml", "job.py", "fetch.py", "requirements.txt", file.name}
    assert (job.folder / "requirements.txt").read_text().split() == list(REQUIREMENTS)
    assert "omnifs://ckpt::s3://b" in file.read_text()


def test_the_first_step_is_read_from_the_run_s_log_once_it_is_there(tmp_path):
    assert first_step_of(tmp_path) is None
    log = tmp_path / "log.jsonl"
    log.write_text("")
    assert first_step_of(tmp_path) is None
    lines = [an_event("start"), a_memory(1.0, rank_0=5), a_step(1), a_step(2)]
    log.write_text("".join(line.model_dump_json() + "\n" for line in lines))

    assert first_step_of(tmp_path) == FirstStep(8.9, 1.0, f"{1:016x}")


def test_what_a_distribution_needs_is_found_with_its_extras():
    bare, more = closure_of({DISTRIBUTION: ()}), closure_of({DISTRIBUTION: ("torch",)})

    assert {DISTRIBUTION, "numpy", "pydantic-core", "click"} <= set(bare)
    assert "torch" not in bare
    assert {"torch", "sympy"} <= set(more)
    assert bare["click"].version == distribution("click").version


def test_what_nobody_installed_is_left_out():
    assert closure_of({"no-such-distribution": ()}) == {}


def test_a_folder_of_a_store_keeps_the_query_of_its_url():
    store = CheckpointStore(kind="s3", url=s3_url(90, "b"), variables={}, hurried="hdfs://n:1?a=b")

    assert store.at("plain").startswith(
        "s3://b/plain?endpoint_override=http%3A%2F%2F127.0.0.1%3A90"
    )
    assert store.filled_at("striped") == "hdfs://n:1/striped?a=b"
    assert replace(store, hurried="").filled_at("x") == store.at("x")


def some_places(tmp_path, **changes):
    given = {
        "node": tmp_path / "node",
        "job": tmp_path / "job",
        "plain": "h/plain:v",
        "lazy": "h/lazy:v",
        "trace": tmp_path / "trace",
        "snapshots": "s3://environments",
        "checkpoint": "s3://checkpoints/plain",
        "variables": {"KEY": "value"},
        "binds": ("/etc/pip.conf:/etc/pip.conf:ro",),
    }
    return Places(**(given | changes))


def test_ours_is_one_command(tmp_path):
    command = ours(some_places(tmp_path), tmp_path / "log", "ours.yaml")
    line = " ".join(command.words)

    assert "image run h/lazy:v" in line
    assert f"--trace {tmp_path / 'trace'}" in line
    assert f"--bind {tmp_path / 'job'}:/job --bind {tmp_path / 'node'}:/node" in line
    assert "-- omniload env run --auto --install python -m pip install" in line
    assert line.endswith("-o s3://environments -- python /job/job.py /job/ours.yaml")
    assert command.unmounts


def test_both_ways_are_the_same_job_with_the_same_binds_and_variables(tmp_path):
    places, log = some_places(tmp_path), tmp_path / "log"
    found = [way(places, log, "x.yaml") for way in (plain, ours)]

    for name in ("OMNILOAD_JOB", "OMNILOAD_NODE", "OMNILOAD_ATTEMPT", "OMNILOAD_STARTUP_LOG"):
        assert found[0].variables[name] == found[1].variables[name]
    assert found[0].variables["BINDS"].split() == list(places.all_binds)
    assert all(bind in found[1].words for bind in places.all_binds)
    assert "KEY=value" in found[0].words
    assert "KEY=value" in found[1].words


def test_a_node_that_knows_nothing_is_given_no_trace(tmp_path):
    command = ours(some_places(tmp_path, trace=None), tmp_path / "log", "ours.yaml")

    assert "--trace" not in command.words


@pytest.fixture
def able(monkeypatch):
    """A machine that has everything."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: f"/usr/bin/{tool}")
    monkeypatch.setattr(whole_startup, "why_not", lambda: None)


def test_the_store_is_hdfs_where_it_can_be_had(able, monkeypatch):
    assert check_machine("auto") == "hdfs"
    assert check_machine("s3") == "s3"

    monkeypatch.setattr(whole_startup, "why_not", lambda: "no JDK 17")
    assert check_machine("auto") == "s3"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ((os, "geteuid", lambda: 1000), "user 1000 may not mount"),
        ((shutil, "which", lambda _: None), "skopeo, umoci, docker-registry"),
        ((whole_startup, "why_not", lambda: "no JDK 17"), "no JDK 17; or give --store s3"),
        ((whole_startup.importlib.util, "find_spec", lambda _: None), "moto is not installed"),
    ],
    ids=["user", "tools", "java", "moto"],
)
def test_what_is_missing_is_named_with_the_remedy(able, monkeypatch, change, said):
    monkeypatch.setattr(*change)

    with pytest.raises(click.ClickException, match=said):
        check_machine("hdfs")
