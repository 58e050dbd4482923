"""Tables of simulations beside runs, and the clocks that runs are held to."""

import pytest

from benchmarks.loaders.simulated_jobs import Found, Pace, _rank
from benchmarks.loaders.simulated_tables import (
    Cell,
    Compared,
    rates_table,
    roles_table,
    waits_table,
)
from omniload.actors.plane import PlaneSpec
from omniload.plan.place_tree import ClientPlaceTree
from omniload.simulation.figures import Waits
from tests.support.plane.builders import a_mix

_CELL = Cell(kind="ray", ranks=2, rank_tokens=8_192, readers=0)


def _found(seconds, p99_s=0.0, **by_role_s):
    return Found(
        steps=10,
        seconds=seconds,
        tokens_per_s=1e6 / seconds,
        by_role_s=by_role_s or {"rank": 0.1},
        waits=Waits(mean_s=0.001, p50_s=0.001, p99_s=p99_s, longest_s=p99_s),
        cores=2.0,
    )


def test_speeds_are_compared_by_their_medians():
    runs = [[_found(seconds)] for seconds in (1.0, 2.0, 8.0)]
    simulated = [[_found(seconds)] for seconds in (0.5, 1.0, 4.0)]

    (row,) = rates_table({_CELL: Compared(runs, simulated)}).rows

    # Half a million tokens a second in the middle run, a million in the middle simulation.
    assert row[6] == "2.00 (0.25 to 16.00)"


def test_processor_time_is_compared_role_by_role():
    compared = Compared(
        [[_found(1.0, loader=0.02, rank=0.01)]], [[_found(1.0, loader=0.03, rank=0.005)]]
    )

    table = roles_table({_CELL: compared}, [Pace(step_s=0.0, steps=10)])

    assert table.columns[3:] == ("loader", "rank")
    assert [str(each).partition(" (")[0] for each in table.rows[0][3:]] == [
        "20.000: 1.50",
        "10.000: 0.50",
    ]


@pytest.mark.parametrize(
    ("simulated_ms", "meet"),
    [((4, 6), "yes"), ((5, 5), "yes"), ((1, 3), "no"), ((8, 9), "no")],
)
def test_longest_waits_agree_where_their_ranges_meet(simulated_ms, meet):
    runs = [[_found(1.0), _found(1.0, p99_s=ms / 1e3)] for ms in (5, 7)]
    simulated = [[_found(1.0), _found(1.0, p99_s=ms / 1e3)] for ms in simulated_ms]
    paces = [Pace(step_s=0.0, steps=10), Pace(step_s=0.05, steps=10)]

    (row,) = waits_table({_CELL: Compared(runs, simulated)}, paces).rows

    assert row[-2] == meet


def _nothing():
    """Wait for nobody."""


class _Client:
    """Gives batches, and notes when."""

    last_wait_s = 0.0

    def __init__(self, told):
        self._told = told

    def next_batch(self):
        self._told.append("take")
        return object()


def test_a_rank_ends_no_pace_before_the_clocks_are_looked_at(tmp_path):
    told = []
    spec = PlaneSpec(mix=a_mix(), base_dir=tmp_path, tree=ClientPlaceTree.of(dp=1))

    (waits_s,) = _rank(
        _Client(told), spec, [Pace(step_s=0.0, steps=3)], lambda: told.append("meet"), _nothing
    )

    counted = told[told.index("meet") :]
    assert counted == ["meet", "take", "take", "take", "meet", "meet"]
    assert len(waits_s) == 3
