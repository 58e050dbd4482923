"""The profile of the Ray runtime: messages between processes, measured for real."""

import pytest

from omniload.actors.plane import PlaneSpec
from omniload.plan.place_tree import ClientPlaceTree
from omniload.simulation.measuring import measure_builds, measure_messages
from tests.support.plane.corpora import a_corpus

pytest.importorskip("ray")

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.usefixtures("leaves_nothing_behind"),
]


def test_a_message_between_processes_costs_both_ends_and_its_bytes(tmp_path):
    mix = a_corpus(tmp_path, rows=64, length=512, micro_rows=16)
    spec = PlaneSpec(mix=mix, base_dir=tmp_path, tree=ClientPlaceTree.of(dp=2))
    builds, batches = measure_builds(spec, "ray", ranks=2, tokens=mix.batch.tokens)

    costs = measure_messages("ray", batches)

    assert builds.rows_s + builds.rows_token_s > 0
    # Between a hundredth of a millisecond and a tenth of a second, on any machine.
    assert 1e-5 < costs.end_s < 0.1
    assert costs.latencies_s[0] < costs.latencies_s[-1]
    # An actor that has loaded what roles load; Ray's raylet and its store of facts.
    assert costs.process_bytes > 20 << 20
    assert costs.node_bytes > 10 << 20
