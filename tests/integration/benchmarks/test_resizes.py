"""A change of ranks is timed from batch to batch, and its steps are those of an unbroken run."""

from itertools import pairwise

import pytest

from benchmarks.faults.chaos import unbroken
from benchmarks.faults.resizes import Changes, change, table_of
from omniload.actors.local.plane import LocalPlane
from tests.support.plane.corpora import a_corpus
from tests.support.plane.local_runs import a_spec


@pytest.mark.parametrize("sizes", [(4, 3), (2, 1, 4)])
def test_ranks_come_and_go_and_every_change_is_timed(tmp_path, sizes):
    mix = a_corpus(tmp_path, rows=12, micro_rows=1, runtime={"elastic": True})
    with LocalPlane(a_spec(tmp_path, mix, dp=sizes[0])) as plane:
        found = change(plane, sizes, 2, step_s=0.0)

    turns = [*sizes, *sizes, sizes[0]]
    named = {f"{a} to {b}" for a, b in pairwise(turns)}
    assert set(found.gaps_s) == named
    assert sum(map(len, found.gaps_s.values())) == 2 * len(sizes)
    assert len(found.digests) == 1 + len(found.steps_s) + 2 * len(sizes)
    assert found.digests == unbroken(a_spec(tmp_path, mix), len(found.digests))


def test_the_longest_time_is_told_and_whether_samples_were_others():
    found = Changes(digests=[1, 2], gaps_s={"4 to 3": [0.2, 0.4, 0.9]}, steps_s=[0.001])

    table = table_of(found, same=False)

    assert table.rows == (("none", 1, "1", "1"), ("4 to 3", 3, "400", "900"))
    assert "OTHER SAMPLES THAN" in table.caption
