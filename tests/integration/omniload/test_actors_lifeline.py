"""The lifeline: a rank on another host learns that the opener has ended, however it ended."""

import os
import signal
import subprocess
import sys

import pytest

from omniload.actors.lifeline import Lifeline, LifelineEnd
from omniload.base.errors import UnavailableError

_OPENER = """
import signal
from omniload.actors.lifeline import Lifeline
print(Lifeline("127.0.0.1", 0).address, flush=True)
signal.pause()
"""


def ended(end):
    """Return what the end says once the kernel has brought the news, which takes it no time on loopback."""
    for _ in range(10_000):
        try:
            end.check()
        except UnavailableError as error:
            return str(error)
    return "lives"


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


def test_on_one_host_there_is_nothing_to_hold():
    end = LifelineEnd("")

    end.check()
    end.close()
