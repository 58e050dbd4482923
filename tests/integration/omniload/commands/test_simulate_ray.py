"""The profile of the Ray runtime: messages between processes, measured for real."""

from contextlib import contextmanager
from multiprocessing import resource_tracker

import pytest

from omniload.actors.plane import PlaneSpec
from omniload.plan.place_tree import ClientPlaceTree
from omniload.simulation.job import Job
from omniload.simulation.plane import simulate
from omniload.simulation.preparing import with_runtime
from omniload.simulation.reading import measured_sources
from omniload.simulation.windows import with_planner
from tests.support.plane.corpora import a_corpus

pytest.importorskip("ray")

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    # Three planes at full speed; `make test` covers the use of their figures.
    pytest.mark.soak,
    pytest.mark.usefixtures("tracker_of_spawned_processes", "leaves_nothing_behind"),
]


@pytest.fixture
def tracker_of_spawned_processes():
    """Start Python's tracker, which comes with the first spawned process and lives as long as this process."""
    resource_tracker.ensure_running()


@contextmanager
def unseen(_what, _total):
    yield lambda _: None


def test_a_small_plane_tells_what_messages_take_at_each_role_and_a_job_is_simulated_with_it(
    tmp_path,
):
    mix = a_corpus(
        tmp_path, rows=64, length=512, micro_rows=16, mix={"stop": "never"}, runtime={"kind": "ray"}
    )
    spec = PlaneSpec(mix=mix, base_dir=tmp_path, tree=ClientPlaceTree.of(dp=2))
    job = Job(spec=spec, originals=mix.names, cores=2.0, steps=16)

    told = []

    @contextmanager
    def shown(what, total):
        done = []
        yield done.append
        told.append((what, total, sum(done)))

    profile = with_runtime(measured_sources(spec, unseen), spec, job, shown)

    # A measurement of minutes is reported in parts, each when it is done. If turns are long, fewer of them run at
    # full speed.
    assert [what for what, _, _ in told] == [
        "measuring what building takes",
        "measuring what small planes read",
        "opening small planes on Ray",
        "measuring them at full speed",
        "measuring one at rest",
        "measuring steps after pauses",
        "measuring what small planes read",
    ]
    assert {what for what, total, done in told if done != total} <= {"measuring them at full speed"}
    assert all(0 < done <= total for _, total, done in told)

    costs = profile.messages["ray"]
    # Between a hundredth of a millisecond and a tenth of a second, on any machine.
    for role in ("planner", "loader", "reader", "constructor", "rank"):
        assert 1e-5 < costs.roles[role].end_s < 0.1
        assert 0 <= costs.roles[role].clock < 1
        assert 0.25 <= costs.roles[role].rested <= 4
    # Ray uses processor time even when idle, and the keeper looks around.
    assert costs.roles["node"].clock > 0
    assert costs.latencies_s[0] < costs.latencies_s[-1]
    assert len(costs.takes_s) > 1
    for of_place in costs.takes_s:
        assert 1e-6 < of_place[0] <= of_place[-1] < 10
    # An actor that has loaded the modules of roles; Ray's raylet and its store of facts.
    assert costs.process_bytes > 20 << 20
    assert costs.node_bytes > 10 << 20
    assert simulate(job, with_planner(profile, job, unseen)).cpu_step_s > 0
