"""Tables of simulations beside runs, and the clocks that runs are held to."""

import pytest

from benchmarks.loaders import simulated_jobs
from benchmarks.loaders.simulated_jobs import Found, Pace, _rank, _Seen, _Taken
from benchmarks.loaders.simulated_tables import (
    Cell,
    Compared,
    rates_table,
    repeats_table,
    roles_table,
    waits_table,
)
from omniload.actors.plane import PlaneSpec
from omniload.plan.place_tree import ClientPlaceTree
from omniload.simulation.figures import Waits
from tests.support.plane.builders import a_mix

_CELL = Cell(kind="ray", ranks=2, rank_tokens=8_192, readers=0)


def _found(seconds, waits_ms=(1.0,), own_ms=(1.0,), **by_role_s):
    waits_s = tuple(ms / 1e3 for ms in waits_ms)
    return Found(
        steps=10,
        seconds=seconds,
        tokens_per_s=1e6 / seconds,
        by_role_s=by_role_s or {"rank": 0.1},
        waits=Waits.of(waits_s),
        cores=2.0,
        idle=0.0,
        waits_s=waits_s,
        own=Waits.of([ms / 1e3 for ms in own_ms]),
    )


def _column(table, name):
    """Return the cell of a table of one row."""
    (row,) = table.rows
    return dict(zip(table.columns, row, strict=True))[name]


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


_PACES = [Pace(step_s=0.0, steps=10), Pace(step_s=0.05, steps=200)]


def _waits(turns, simulated):
    """Return the table of waits of a job, of whose steps each turn and each simulation has these."""
    return waits_table(
        {
            _CELL: Compared(
                *([[_found(1.0), _found(1.0, ms)] for ms in each] for each in (turns, simulated))
            )
        },
        _PACES,
    )


def test_the_hundredth_is_of_the_steps_of_all_turns_together():
    # Six long ones in four hundred: of a turn that has them all they are what one step in a hundred waits at least,
    # of the other none is there.
    turns = [[1.0] * 194 + [9.0] * 6, [1.0] * 200]

    table = _waits(turns, [[1.0] * 394 + [9.0] * 6])

    assert _column(table, "p99, run") == "9.00"
    assert _column(table, "p99, simulated over run") == "1.00"
    assert _column(table, "p99, runs apart") == "9.00"


@pytest.mark.parametrize(
    ("turns_ms", "simulated_ms", "agrees"),
    [
        ((5.0, 5.0), 5.7, "within 15%"),
        ((5.0, 5.0), 4.4, "within 15%"),
        ((5.0, 5.0), 6.0, "no"),
        ((5.0, 5.0), 4.2, "no"),
        ((4.0, 6.0), 7.0, "as runs do"),
        ((4.0, 6.0), 8.0, "no"),
    ],
)
def test_a_simulation_agrees_within_a_share_or_as_runs_do_with_each_other(
    turns_ms, simulated_ms, agrees
):
    table = _waits([[ms] * 200 for ms in turns_ms], [[simulated_ms] * 400])

    assert _column(table, "mean, agrees") == agrees


def test_speeds_agree_by_the_same_measure():
    turns = [[_found(seconds)] for seconds in (1.0, 1.3)]

    found = [
        _column(rates_table({_CELL: Compared(turns, [[_found(seconds)]])}), "agrees")
        for seconds in (1.1, 0.9, 0.8)
    ]

    assert found == ["within 15%", "as runs do", "no"]


def test_runs_are_compared_with_each_other_pair_by_pair_over_all_turns_of_a_pace():
    paces = [Pace(step_s=0.0, steps=10), *[Pace(step_s=0.05, steps=200)] * 2]
    turns = [((4.0, 1.0), (8.0, 1.1)), ((2.0, 1.0), (4.0, 0.9))]
    runs = [[_found(1.0), *(_found(1.0, [ms], [own]) for ms, own in turn)] for turn in turns]
    simulated = [[_found(1.0), *[_found(1.0, [2.0], [1.0])] * 2]]

    mean, *others = repeats_table({_CELL: Compared(runs, simulated)}, paces).rows

    assert [row[3] for row in others] == ["p50", "p99"]
    assert mean[4] == 4
    # Of 2, 4, 4 and 8 ms: three pairs are twice apart, one four times.
    assert mean[5:8] == ("4.00 (2.00 to 8.00)", "2.00 (1.00 to 4.00)", "0.50")
    assert mean[8:-1] == ("1.00 (0.90 to 1.10)", "1.11 (1.00 to 1.22)", "1.00")


def test_time_in_which_a_rank_is_kept_from_a_core_is_no_part_of_its_own_wait(tmp_path, monkeypatch):
    spec = PlaneSpec(mix=a_mix(), base_dir=tmp_path, tree=ClientPlaceTree.of(dp=1))
    filling = 2 * (spec.mix.steps_ahead + spec.mix.steps_at_once)
    kept_s = iter([0.0] * 2 * filling + [1.0, 1.25, 2.0, 9.0])
    monkeypatch.setattr(simulated_jobs, "kept_waiting_s", lambda: next(kept_s))
    monkeypatch.setattr(_Client, "last_wait_s", 0.5)

    (taken,) = _rank(_Client([]), spec, [Pace(step_s=0.0, steps=2)], _nothing, _nothing)

    assert taken.waits_s == (0.5, 0.5)
    assert taken.own_s == (0.25, 0.0)


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

    (taken,) = _rank(
        _Client(told), spec, [Pace(step_s=0.0, steps=3)], lambda: told.append("meet"), _nothing
    )

    counted = told[told.index("meet") :]
    assert counted == ["meet", "take", "take", "take", "meet", "meet"]
    assert len(taken.waits_s) == 3


def _run_found(tmp_path, *, whole_s, aside_s=0.0):
    """Return a run of two ranks in processes of their own: one second, 0.5 of a processor each, 0.25 of a planner."""
    spec = PlaneSpec(mix=a_mix(), base_dir=tmp_path, tree=ClientPlaceTree.of(dp=2))
    began = _Seen(at_s=10.0, ours_s={1: 0.0, 2: 1.0, 3: 2.0}, whole_s=100.0)
    ended = _Seen(at_s=11.0, ours_s={1: 0.25, 2: 1.5, 3: 2.5}, whole_s=100.0 + whole_s)
    taken = [
        _Taken([0.001, 0.004], [0.001, 0.001], aside_s),
        _Taken([0.003, 0.002], [0.0, 0.002], aside_s),
    ]
    roles = {1: "planner", 2: "rank", 3: "rank"}
    return simulated_jobs._found(spec, Pace(step_s=0.0, steps=2), (began, ended), 0.0, taken, roles)


def test_a_step_waits_as_long_as_its_last_rank_and_meeting_the_others_is_no_part_of_the_plane(
    tmp_path,
):
    found = _run_found(tmp_path, whole_s=1.25, aside_s=0.1)

    assert found.waits_s == (0.003, 0.004)
    assert found.own == Waits.of([0.001, 0.002])
    assert found.kept == pytest.approx(0.5)
    assert found.by_role_s["rank"] * 2 == pytest.approx(1.0 - 2 * 0.1)
    assert found.by_role_s["planner"] * 2 == pytest.approx(0.25)


@pytest.mark.parametrize(("whole_s", "left"), [(1.25, 2.0), (1.75, 1.5), (1.2, 2.0), (9.0, 0.1)])
def test_cores_left_to_a_job_are_no_more_than_there_are(tmp_path, monkeypatch, whole_s, left):
    monkeypatch.setattr(simulated_jobs.psutil, "cpu_count", lambda: 2)

    assert _run_found(tmp_path, whole_s=whole_s).cores == pytest.approx(left)
