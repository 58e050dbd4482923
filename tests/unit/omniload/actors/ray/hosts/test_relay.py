"""Heartbeats of members on other hosts: on the board of this one, by its clock, and old where a member falls silent."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")
from omniload.actors.heartbeat_board import FolderBoard
from omniload.actors.ray.hosts import relay as module
from omniload.actors.ray.hosts.relay import BEATS, Relay
from omniload.machine.progress import Progress, Task

AWAY = "loader-0+1"


class Loader:
    """An actor on another host, whose clock is 1000 seconds behind; it answers on command."""

    def __init__(self):
        self.asked = []
        self.heartbeats = SimpleNamespace(options=self.options)

    def options(self, *, concurrency_group):
        assert concurrency_group == BEATS
        return SimpleNamespace(remote=self.ask)

    def ask(self):
        answer = Future()
        self.asked.append(answer)
        return SimpleNamespace(future=lambda: answer)

    def tells(self, beat_s, *, calls=()):
        role = Progress(name=AWAY, pid=7, beat_s=beat_s, tasks=(), calls=calls, host="10.0.0.2")
        self.asked[-1].set_result((beat_s, [role.to_json()]))


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(s=50.0)
    monkeypatch.setattr(module.time, "monotonic", lambda: now.s)
    return now


@pytest.fixture
def relay(tmp_path):
    board = FolderBoard(tmp_path)
    made = Relay(board, lambda call: call())
    made.board = board
    return made


def test_a_heartbeat_is_on_the_board_of_this_host_by_its_clock(relay, clock):
    loader = Loader()
    relay.ask({AWAY: loader}, clock.s)

    loader.tells(-950.0)

    found = relay.board.read()[AWAY]
    assert (found.beat_s, found.host) == (50.0, "10.0.0.2")


def test_a_member_that_has_not_answered_is_not_asked_again_and_its_heartbeat_grows_old(
    relay, clock
):
    loader = Loader()
    relay.ask({AWAY: loader}, clock.s)
    loader.tells(-950.0)
    before = relay.board.read()

    for _ in range(10):
        clock.s += 1
        relay.ask({AWAY: loader}, clock.s)

    assert len(loader.asked) == 2
    assert relay.board.read() == before


def test_it_is_asked_once_a_second(relay, clock):
    loader = Loader()
    for _ in range(8):
        relay.ask({AWAY: loader}, clock.s)
        if not loader.asked[-1].done():
            loader.tells(clock.s - 1000)
        clock.s += 0.25

    assert len(loader.asked) == 2


def test_a_call_that_goes_on_began_at_one_time_though_answers_come_late(relay, clock):
    """The roster looks for calls that are the same as before, because they are stuck."""
    loader, call, begun = Loader(), Task(doing="reads a", since_s=-960.0), []
    for late_s in (0.0, 0.3, 0.7):
        relay.ask({AWAY: loader}, clock.s)
        clock.s += late_s
        loader.tells(clock.s - 1000 - late_s, calls=(call,))
        begun.append(relay.board.read()[AWAY].calls)
        clock.s += 1

    assert begun == [(Task(doing="reads a", since_s=40.0),)] * 3


def test_what_a_member_says_after_its_end_is_not_put_back_on_the_board(relay, clock):
    loader = Loader()
    relay.ask({AWAY: loader}, clock.s)

    relay.forget(AWAY)
    loader.tells(-950.0)

    assert relay.board.read() == {}


def test_a_call_that_fails_says_nothing(relay, clock):
    loader = Loader()
    relay.ask({AWAY: loader}, clock.s)

    loader.asked[-1].set_exception(ConnectionError("lost"))

    assert relay.board.read() == {}
