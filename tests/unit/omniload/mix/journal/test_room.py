"""A full disk: the waits for space, the messages, and the errors that are not waited for."""

import errno
import os

import pytest

from omniload.mix.journal.room import GIVE_UP_S, Room


class Pauses:
    """A clock that waits advance; ``ends`` after a number of them."""

    def __init__(self, ends=None):
        self.now_s, self.waits, self.ends = 0.0, [], ends

    def __call__(self, wait_s):
        self.now_s += wait_s
        self.waits.append(wait_s)
        return len(self.waits) == self.ends


def a_room(ends=None):
    pauses = Pauses(ends)
    return Room(pauses, lambda: pauses.now_s), pauses


def full(times, code=errno.ENOSPC):
    """Return a function that finds no space ``times`` times, and its number of calls."""
    calls = []

    def attempt():
        calls.append(len(calls))
        if len(calls) <= times:
            raise OSError(code, os.strerror(code))

    return attempt, calls


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_what_finds_room_later_is_written_and_told_twice(code, tmp_path, caplog):
    room, pauses = a_room()
    attempt, calls = full(3, code)
    said = []
    room.says = said.append

    room.write(attempt, "the journal", tmp_path)

    assert len(calls) == 4
    assert pauses.waits == [0.1, 0.2, 0.4]
    first, last = (record.getMessage() for record in caplog.records)
    assert f"the journal: {os.strerror(code)}, " in first
    assert "are free there; waiting up to 60 s for room" in first
    assert "remove files there, or raise the quota" in first
    assert last == "the journal: there is room again, after 0.7 s: going on"
    assert said[0].startswith("waits for room for the journal: ")
    assert said[0].endswith("are free there")
    assert said[-1] == ""


def test_the_wait_ends_at_its_limit_and_says_so(tmp_path):
    room, pauses = a_room()
    attempt, calls = full(1000)

    with pytest.raises(
        OSError, match=r"No space left .* for 60 s of the 60 s that room is waited for"
    ):
        room.write(attempt, "the journal", tmp_path)

    assert sum(pauses.waits) == pytest.approx(GIVE_UP_S)
    assert len(calls) == len(pauses.waits) + 1


def test_a_process_that_is_stopped_as_it_waits_has_the_rest_of_its_limit_yet(tmp_path):
    pauses = Pauses()
    attempt, _ = full(1000)
    stopped_s = iter([0.0, 3_600.0])

    def pause(wait_s):
        pauses.now_s += next(stopped_s, 0.0)
        return pauses(wait_s)

    room = Room(pause, lambda: pauses.now_s)

    with pytest.raises(OSError, match=r"for 60 s of the 60 s that room is waited for"):
        room.write(attempt, "the journal", tmp_path)
    assert sum(pauses.waits) == pytest.approx(GIVE_UP_S)


def test_what_is_closed_waits_no_more(tmp_path):
    room, pauses = a_room(ends=2)

    with pytest.raises(OSError, match="No space left"):
        room.write(full(1000)[0], "the journal", tmp_path)

    assert len(pauses.waits) == 2
    room = Room()
    room.wait_no_more()
    with pytest.raises(OSError, match="No space left"):
        room.write(full(1000)[0], "the journal", tmp_path)


@pytest.mark.parametrize("code", [errno.EFBIG, errno.EIO, errno.EROFS])
def test_what_no_room_mends_is_not_waited_for(code, tmp_path):
    room, pauses = a_room()

    with pytest.raises(OSError, match=os.strerror(code)):
        room.write(full(1, code)[0], "the journal", tmp_path)

    assert pauses.waits == []


def test_what_is_free_is_not_known_of_another_machine(tmp_path, caplog):
    room, _ = a_room()
    room.write(full(1)[0], "s3://runs/a", None)
    room.write(full(1)[0], "the journal", tmp_path / "gone")

    assert "what is free there cannot be seen from here" in caplog.records[0].getMessage()
    assert "its folder cannot be looked at" in caplog.records[2].getMessage()
