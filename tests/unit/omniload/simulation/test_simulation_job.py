"""A job that is simulated has the data constructors that it would be opened with."""

import pytest

pytest.importorskip("ray")

from omniload.actors.ray.layout import constructors_by_host, dp_ranks_of_constructors
from omniload.simulation.job import constructors_of, hosts_of
from tests.support.plane.profiles import a_job


@pytest.mark.parametrize("cores", [1.88, 2.0, 8.0])
def test_on_one_host_constructors_are_those_of_a_run_on_so_many_cores(cores):
    job = a_job(ranks=32, cores=cores)

    found = constructors_of(job)

    of_a_run = dp_ranks_of_constructors(job.spec, round(cores))
    assert found == [(hosts_of(32, 1)[0], ranks) for ranks in of_a_run.values()]


def test_on_several_hosts_each_has_those_of_its_ranks():
    job = a_job(ranks=32, hosts=2)

    found = constructors_of(job)

    assert found == list(constructors_by_host(job.spec, hosts_of(32, 2)).values())
    assert len(found) == 4
