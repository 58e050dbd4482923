"""Functions in a job's ``runtime_env``: every role of its plane has them, on every host."""

import json

import pytest
import yaml

from tests.support.plane.given.given_ray import run_job

pytestmark = pytest.mark.ray
LAB = """
import os

import pyarrow.compute as pc


def loud(texts):
    return pc.utf8_upper(texts)


def cubic(lengths_N):
    assert os.environ["LAB"] == "of the job"
    return lengths_N.astype(float) ** 3
"""
ENTRY_POINTS = """
[omniload.transforms]
loud = lab:loud

[omniload.costs]
cubic = lab:cubic
"""


@pytest.fixture
def working_dir(tmp_path):
    """The folder for ``ray job submit --working-dir``: a module, and code that registers its functions."""
    folder = tmp_path / "code"
    registered = folder / "lab-1.0.dist-info"
    registered.mkdir(parents=True)
    (folder / "lab.py").write_text(LAB)
    (registered / "METADATA").write_text("Metadata-Version: 2.1\nName: lab\nVersion: 1.0\n")
    (registered / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder


# Environments are made for a job, its ranks and each role, which takes 20 s on an idle machine.
@pytest.mark.soak
@pytest.mark.parametrize("as_what", ["working_dir", "py_modules"])
def test_functions_in_the_working_dir_of_a_job_reach_loaders_and_planner_beside_variables_of_the_mix(
    given, tmp_path, working_dir, as_what
):
    lines = [json.dumps({"text": f"document {n} " * 9}) + "\n" for n in range(200)]
    (tmp_path / "docs.jsonl").write_text("".join(lines))
    loud = {"type": "map", "function": "loud"}
    source = {"type": "jsonl", "path": str(tmp_path / "docs.jsonl"), "transforms": [loud]}
    content = {"version": 1, "seed": 1, "tokenizer": {"type": "bytes"}, "sources": {"docs": source}}
    content["mix"] = {"stages": [{"from_step": 0, "weights": {"docs": 1}}]}
    content |= {"pack": {"length": 128}, "batch": {"tokens": 1024, "micro_tokens": 256}}
    content["balance"] = {"cost": "cubic"}
    # A variable of the mix is set in addition to those of the job.
    content["runtime"] = {"kind": "ray", "address": "auto", "env": {"set": {"TZ": "UTC"}}}
    (tmp_path / "mix.yaml").write_text(yaml.safe_dump(content))
    brought = str(working_dir) if as_what == "working_dir" else [str(working_dir)]
    runtime_env = {as_what: brought, "env_vars": {"LAB": "of the job"}}

    told = run_job(
        given, tmp_path / "mix.yaml", tmp_path / "meet", steps=2, runtime_env=runtime_env
    )

    assert [rank.get("message") for rank in told["ranks"]] == [None, None]
    for rank in told["ranks"]:
        tokens = {token for _, rows in rank["seen"] for row in rows for token in row}
        assert {ord("D"), ord("T")} <= tokens
        assert not tokens & set(b"dt")
