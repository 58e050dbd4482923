"""The lifeline: a rank on another host learns that the opener has ended, for any cause of the end."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from omniload.actors import lifeline
from omniload.actors.lifeline import Lifeline, LifelineEnd
from omniload.base.errors import UnavailableError

_OPENER = """
import signal
from omniload.actors.lifeline import Lifeline
print(Lifeline("127.0.0.1", 0).address, flush=True)
signal.pause()
"""


def ended(end):
    """Return the end's state once the kernel has delivered the news, which may take a while on a busy machine."""
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:
        try:
            end.check()
        except UnavailableError as error:
            return str(error)
        threading.Event().wait(0.001)
    return "lives"


def lives(end):
    """Return whether the end reports nothing, even a moment later."""
    for _ in range(10_000):
        end.check()
    return True


@pytest.mark.scripts_start_warm
def test_an_opener_that_is_killed_is_noticed_without_being_asked():
    opener = subprocess.Popen([sys.executable, "-c", _OPENER], stdout=subprocess.PIPE, text=True)
    end = LifelineEnd(opener.stdout.readline().strip())
    end.check()

    os.kill(opener.pid, signal.SIGKILL)
    opener.communicate()

    assert "has ended; start again from the last checkpoint" in ended(end)
    end.close()


def test_an_opener_that_closes_lets_go_of_all_and_answers_nobody():
    line = Lifeline("127.0.0.1", 0)
    ends = [LifelineEnd(line.address), LifelineEnd(line.address)]
    for end in ends:
        end.check()

    line.close()

    assert all("has ended" in ended(end) for end in ends)
    with pytest.raises(UnavailableError, match=r"does not answer at 127\.0\.0\.1"):
        LifelineEnd(line.address)
    for end in ends:
        end.close()


def test_ends_that_have_gone_leave_room_for_others(monkeypatch):
    monkeypatch.setattr(lifeline, "_MOST_HELD", 2)
    line = Lifeline("127.0.0.1", 0)
    for _ in range(5):
        LifelineEnd(line.address).close()

    end = LifelineEnd(line.address)

    assert lives(end)
    end.close()
    line.close()


class Aborting(socket.socket):
    """A listener to which the kernel reports once that a connection ended before it was accepted."""

    aborts = 1

    def accept(self):
        if self.aborts:
            self.aborts -= 1
            raise ConnectionAbortedError
        return super().accept()


def test_a_connection_that_cannot_be_taken_ends_no_other(monkeypatch):
    made = socket.create_server
    monkeypatch.setattr(  # the kernel itself keeps two until they are accepted
        lifeline.socket, "create_server", lambda at: Aborting(fileno=made(at, backlog=1).detach())
    )
    line = Lifeline("127.0.0.1", 0)

    ends = [LifelineEnd(line.address) for _ in range(5)]

    assert all(map(lives, ends))
    for end in (*ends, line):
        end.close()


class Noting(socket.socket):
    """A port that records the existing threads when it is closed."""

    threads = None

    def close(self):
        self.threads = set(threading.enumerate())
        super().close()


def test_the_port_is_let_go_of_behind_the_thread_that_waits_at_it(monkeypatch):
    ports, made = [], socket.create_server

    def noting(at):
        ports.append(Noting(fileno=made(at).detach()))
        return ports[0]

    monkeypatch.setattr(lifeline.socket, "create_server", noting)
    before = set(threading.enumerate())
    line = Lifeline("127.0.0.1", 0)
    (waiting,) = set(threading.enumerate()) - before

    line.close()

    # Earlier, the number could belong to another file, for which the thread would wait, and the close for the thread.
    assert waiting not in ports[0].threads


def test_on_one_host_there_is_nothing_to_hold():
    end = LifelineEnd("")

    end.check()
    end.close()
