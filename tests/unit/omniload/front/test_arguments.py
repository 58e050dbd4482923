"""Warnings to a caller before a loader is opened."""

import pytest

from omniload.front.arguments import warn_of_own_environment, warn_of_rank_behind
from omniload.mix.runtime import RuntimeConfig


def a_runtime(**settings):
    return RuntimeConfig.model_validate({"kind": "ray", "address": "auto"} | settings)


def test_a_loader_in_the_process_of_rank_0_warns_once_of_variables_that_are_not_there(caplog):
    runtime = a_runtime(env={"set": {"AWS_REGION": "eu-1", "TZ": "UTC", "OMP_NUM_THREADS": "1"}})
    environment = {"AWS_REGION": "us-1", "OMP_NUM_THREADS": "1", "HOME": "/root"}

    for _ in range(2):
        warn_of_own_environment(runtime, environment)

    (record,) = caplog.records
    assert "has not ['AWS_REGION', 'TZ'], or with another value: set them where" in record.message
    assert "runtime.place" not in record.message
    assert "eu-1" not in record.message


def test_a_loader_in_the_process_of_rank_0_warns_that_its_sources_are_read_there(caplog):
    warn_of_own_environment(a_runtime(place={"loaders": {"without_gpu": True}}), {})

    (record,) = caplog.records
    assert "reads in the process of rank 0; runtime.place.loaders does not hold" in record.message


@pytest.mark.parametrize(
    "settings", [{}, {"env": {"set": {"TZ": "UTC"}}}, {"place": {"planner": {"cpus": 1}}}]
)
def test_a_process_that_has_all_of_it_warns_of_nothing(caplog, settings):
    warn_of_own_environment(a_runtime(**settings), {"TZ": "UTC"})

    assert not caplog.records


def test_a_rank_whose_loader_is_open_still_is_named_as_the_plane_ends(caplog):
    warn_of_rank_behind(3)

    (record,) = caplog.records
    assert "rank 3 has not in the ten seconds since: the data plane ends" in record.message
