"""The status of a plane: the last one is written at the end, whatever has ended by then."""

import logging
import threading

import pytest

from omniload.actors import status_file
from omniload.actors.heartbeat_board import Activity, MemoryBoard
from omniload.actors.status_file import STATUS_NAME, read_status, write_status
from omniload.base.concurrency import threads
from omniload.base.errors import StateError


def a_board():
    board = MemoryBoard()
    return board, board.add(Activity("rank dp=0"))


def test_the_last_status_is_of_the_moment_in_which_the_plane_was_closed(tmp_path):
    board, rank = a_board()
    rank.rest("has step 3")
    end = write_status(tmp_path, board)
    rank.rest("has step 4")

    end()

    status = read_status(tmp_path)
    assert (status.has_ended, [role.state for role in status.roles]) == (True, ["has step 4"])


@pytest.mark.parametrize(
    ("cut", "said"),
    [
        (lambda content: content[: len(content) // 2], "is damaged .*; .* look again"),
        (lambda content: b"", "is damaged"),
        (
            lambda content: content.replace(b'"version":1', b'"version":2'),
            r"is not of this release \(version: .*\); watch with the release that the run uses",
        ),
        (lambda content: content.replace(b'"pid"', b'"pids"'), "is not of this release"),
    ],
)
def test_a_status_that_is_damaged_is_told_from_one_of_another_release(tmp_path, cut, said):
    board, _ = a_board()
    write_status(tmp_path, board)()
    place = tmp_path / STATUS_NAME
    place.write_bytes(cut(place.read_bytes()))

    with pytest.raises(StateError, match=f"{STATUS_NAME} {said}"):
        read_status(tmp_path)


def test_roles_that_are_gone_as_the_plane_ends_stay_in_its_last_status(tmp_path, monkeypatch):
    board, rank = a_board()
    rank.rest("has step 4")

    looks = [board.read()]
    monkeypatch.setattr(board, "read", lambda: looks.pop() if looks else {})

    write_status(tmp_path, board)()

    status = read_status(tmp_path)
    assert (status.has_ended, [role.name for role in status.roles]) == (True, ["rank dp=0"])


def test_a_status_is_there_once_the_plane_is_open_however_late_its_thread_comes(
    tmp_path, monkeypatch
):
    board, _ = a_board()
    monkeypatch.setattr(threading.Thread, "start", lambda _thread: None)

    write_status(tmp_path, board)

    status = read_status(tmp_path)
    assert (status.has_ended, [role.name for role in status.roles]) == (False, ["rank dp=0"])


def test_the_last_status_is_there_once_the_plane_is_closed_however_late_its_thread_comes(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(status_file, "_EVERY_S", 0.001)
    board, _ = a_board()
    read, is_closed = board.read, threading.Event()

    def late():
        if is_closed.is_set():
            threading.Event().wait(0.1)
        return read()

    end = write_status(tmp_path, board)
    monkeypatch.setattr(board, "read", late)
    is_closed.set()

    end()

    assert read_status(tmp_path).has_ended


def test_a_plane_that_waits_for_its_last_status_to_be_written_says_where(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(threads, "_SILENT_S", 0.0)
    board, _ = a_board()
    read, is_said = board.read, threading.Event()
    end = write_status(tmp_path, board)

    def hanging():
        is_said.wait()
        return read()

    class Hearing(logging.Handler):
        def emit(self, _record):
            is_said.set()

    monkeypatch.setattr(board, "read", hanging)
    monkeypatch.setattr(logging.getLogger(threads.__name__), "handlers", [Hearing()])

    end()

    assert caplog.messages == [
        f"closing waits up to 30 s more for the last status in {tmp_path / 'status.json'}"
    ]
    assert read_status(tmp_path).has_ended
