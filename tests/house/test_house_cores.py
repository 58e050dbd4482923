"""Cores are counted in one place, which knows the quotas of cgroups."""

from pathlib import Path

from tests.house.modules import ROOT, faults, source_files

COUNTS = ("cpu_count", "sched_getaffinity")
ONE_PLACE = Path("omniload/base/linux/cores.py")
MACHINES = {
    Path("omniload/actors/ray/cluster.py"),
    Path("omniload/actors/ray/head_watch.py"),
    Path("trainer_integration/run/launch_record.py"),
}
"""Calls that report the load or the cores of the whole machine."""


def test_who_wants_to_know_how_many_cores_it_may_use_asks_in_one_place():
    def counts(path):
        text = (ROOT / path).read_text(encoding="utf-8")
        return [name for name in COUNTS if name in text]

    assert faults(set(source_files()) - MACHINES - {ONE_PLACE}, counts) == {}
    assert all(map(counts, MACHINES))
