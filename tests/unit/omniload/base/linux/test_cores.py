"""The number of cores that a process may use, and of processes and threads that may still start."""

import os
import resource

import pytest

from omniload.base.linux import cores as module
from omniload.base.linux.cores import TaskRoom, cores_here, task_room

ALLOWED = 64
QUOTA, PERIOD = "cpu.cfs_quota_us", "cpu.cfs_period_us"


@pytest.fixture
def cores(tmp_path, monkeypatch):
    """Return the cores of a process with these lines of membership, among files of cgroups."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(ALLOWED)))

    def of(lines, files):
        for name, text in files.items():
            at = tmp_path / "groups" / name
            at.parent.mkdir(parents=True, exist_ok=True)
            at.write_text(text + "\n")
        (tmp_path / "cgroup").write_text("".join(f"{line}\n" for line in lines))
        return cores_here(tmp_path / "cgroup", tmp_path / "groups")

    return of


def test_a_process_without_a_quota_may_use_the_cores_that_it_may_run_on(cores):
    assert cores(["0::/"], {"cpu.max": "max 100000"}) == ALLOWED
    assert cores(["4:cpu:/"], {f"cpu/{QUOTA}": "-1", f"cpu/{PERIOD}": "100000"}) == ALLOWED


def test_a_container_that_sees_its_own_cgroup_as_the_root_has_its_quota(cores):
    assert cores(["0::/"], {"cpu.max": "400000 100000"}) == 4


def test_a_part_of_a_core_counts_as_one(cores):
    assert cores(["0::/"], {"cpu.max": "150000 100000"}) == 2
    assert cores(["0::/"], {"cpu.max": "5000 100000"}) == 1


def test_the_least_quota_counts_of_all_cgroups_that_a_process_is_in(cores):
    pod = {"pod/cpu.max": "800000 100000", "pod/main/cpu.max": "max 100000"}
    assert cores(["0::/pod/main"], pod) == 8


def test_the_controller_of_version_1_may_share_its_folder_with_another(cores):
    quota = {f"cpu,cpuacct/job/{QUOTA}": "300000", f"cpu,cpuacct/job/{PERIOD}": "100000"}
    assert cores(["5:memory:/job", "3:cpu,cpuacct:/job", "0::/job"], quota) == 3


def test_a_host_path_that_a_container_does_not_see_leads_to_its_own_root(cores):
    quota = {f"cpu/{QUOTA}": "200000", f"cpu/{PERIOD}": "100000"}
    assert cores(["3:cpu:/kubepods/pod7/c1"], quota) == 2


def test_a_machine_that_tells_nothing_of_cgroups_has_the_cores_of_the_affinity(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    assert cores_here(tmp_path / "none", tmp_path / "none") == 3


@pytest.mark.parametrize("said", ["", "many 100000", "400000", "400000 0"])
def test_a_quota_that_is_none_counts_for_nothing(cores, said):
    assert cores(["0::/"], {"cpu.max": said}) == ALLOWED


@pytest.fixture
def room(tmp_path, monkeypatch):
    """Return the room of user 1000 with this limit, among cgroups with these files."""
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    for pid, user, threads in ((7, 1000, 30), (8, 0, 500), (9, 1000, 12)):
        (tmp_path / f"{pid}").mkdir()
        status = f"Name:\tpython\nUid:\t{user}\t0\t0\t0\nThreads:\t{threads}\nSigQ:\t1/9\n"
        (tmp_path / f"{pid}" / "status").write_text(status)

    def of(limit, **files):
        folder = tmp_path / "group"
        folder.mkdir(exist_ok=True)
        for name, text in files.items():
            (folder / name.replace("_", ".")).write_text(f"{text}\n")
        monkeypatch.setattr(module, "_groups_of", lambda _: iter([(folder, False)]))
        monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
        return task_room(tmp_path)

    return of


def test_a_user_has_left_what_its_own_threads_leave_of_its_limit(room):
    assert room(200) == TaskRoom("ulimit -u of user 1000", 200, 158)
    assert room(40).left == 0


def test_no_limit_and_one_that_nobody_reaches_are_none(room, monkeypatch):
    assert room(resource.RLIM_INFINITY, pids_max="max", pids_current="5") is None
    assert room(96_000) is None
    monkeypatch.setattr(os, "getuid", lambda: 0)
    assert room(40) is None


def test_the_limit_that_leaves_the_fewest_is_told(room):
    assert room(200, pids_max="100", pids_current="60").left == 40
    assert room(60, pids_max="100", pids_current="60").left == 18
