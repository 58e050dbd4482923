"""Heartbeats: a role's reports about itself, and how others read them without asking."""

import os
import threading

import pytest

from omniload.actors import heartbeat_board
from omniload.actors.heartbeat_board import Activity, FolderBoard, MemoryBoard
from omniload.base.concurrency.calls_under_way import under_way


def test_a_role_says_its_oldest_task_and_what_it_waits_for_without_one():
    role = Activity("constructor-0")
    idle = role.progress()
    role.rest("has built every step", ("planner",))
    resting = role.progress()
    with role.doing("fetches step 1", ("loader-0",)), role.doing("builds step 2"):
        busy = role.progress()

    assert idle.tasks == ()
    assert [(t.doing, t.waits_for) for t in resting.tasks] == [
        ("has built every step", ("planner",))
    ]
    assert [t.doing for t in busy.tasks] == ["fetches step 1", "builds step 2"]
    assert [t.doing for t in role.progress().tasks] == ["has built every step"]


def test_a_task_may_be_said_in_other_words_until_it_ends():
    role = Activity("planner")
    with role.doing("writes the journal", ("loader-0",)) as says:
        (first,) = role.progress().tasks
        says("waits for room")
        (now,) = role.progress().tasks
        says("")
        (again,) = role.progress().tasks
    says("waits for more")

    assert (now.doing, now.since_s) == ("waits for room", first.since_s)
    assert now.waits_for == ("loader-0",)
    assert again == first
    assert role.progress().tasks == ()


def test_calls_to_stores_are_those_of_the_role_that_reads():
    with under_way("reads x"):
        reader, other = Activity("loader-0", reads=True).progress(), Activity("planner").progress()

    assert "reads x" in [call.doing for call in reader.calls]
    assert other.calls == ()


def test_roles_of_one_process_are_read_as_they_are_now():
    board = MemoryBoard()
    role = board.add(Activity("rank dp=0"))
    role.rest("has step 3")

    (found,) = board.read().values()

    assert (found.name, found.pid, found.tasks[0].doing) == ("rank dp=0", os.getpid(), "has step 3")


def test_a_role_of_another_process_is_read_from_its_file(tmp_path):
    role = Activity("rank dp=1 cp=0")
    role.rest("has asked for no batch")
    end = FolderBoard(tmp_path).post(role)

    found = FolderBoard(tmp_path).read()["rank dp=1 cp=0"]
    end()

    assert found.tasks == role.progress().tasks
    assert found.beat_s <= role.progress().beat_s


def test_what_a_role_counted_until_its_end_is_in_its_last_heartbeat(tmp_path):
    role, board = Activity("rank dp=0"), FolderBoard(tmp_path)
    end = board.post(role)
    role.figures.count("taken_steps_total", 200)
    end()

    assert board.read()["rank dp=0"].figures == {"taken_steps_total": 200}


def test_ranks_that_died_are_off_the_board_once_there_are_fewer(tmp_path):
    board, names = FolderBoard(tmp_path), ["planner", "rank dp=1 cp=0", "rank dp=2", "rank dp=10"]
    for name in names:
        board.note(Activity(name).progress())

    board.forget_ranks(2)

    assert sorted(board.read()) == names[:2]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"name": 1, "tasks": 3}', b"\xff"])
def test_a_file_that_is_no_heartbeat_is_none(tmp_path, content):
    (tmp_path / "planner.json").write_bytes(content)

    assert FolderBoard(tmp_path).read() == {}


def test_a_plane_that_is_closed_stops_hearts_silently(tmp_path):
    end = FolderBoard(tmp_path / "gone").post(Activity("planner"))
    end()

    assert FolderBoard(tmp_path / "gone").read() == {}


def test_no_heartbeat_comes_behind_the_end_however_late_its_thread(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat_board, "_BEAT_S", 0.001)
    role, board, beating = Activity("rank dp=0"), FolderBoard(tmp_path), threading.Event()
    before = set(threading.enumerate())
    end, note = board.post(role), board.note
    (thread,) = {t for t in threading.enumerate() if t.name == "omniload-heartbeat"} - before

    def late(progress):
        beating.set()
        threading.Event().wait(0.1)
        note(progress)

    monkeypatch.setattr(board, "note", late)
    assert beating.wait(60)

    end()
    board.forget("rank dp=0")

    assert not thread.is_alive()
    assert board.read() == {}
