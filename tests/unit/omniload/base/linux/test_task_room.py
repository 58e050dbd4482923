"""Which limit of processes and threads leaves the fewest, of those that a process is under."""

import os
import resource

import pytest

from omniload.base.linux import task_room as module
from omniload.base.linux.task_room import TaskRoom, task_room


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
        monkeypatch.setattr(module, "groups_of", lambda _: iter([(folder, False)]))
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
