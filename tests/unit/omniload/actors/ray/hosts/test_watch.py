"""What looks at processes of its host: who is stopped is told at two looks, at once or with the next answer."""

import pytest

pytest.importorskip("ray")
from omniload.actors.heartbeat_board import FolderBoard
from omniload.actors.ray.hosts import watch as module
from omniload.actors.ray.hosts.watch import HostWatch
from omniload.actors.ray.processes import Process
from omniload.base.clock import FakeClock
from omniload.machine.progress import Progress

FIRST, OTHER = "constructor-1", "constructor-2"
NODE = "node-b"


def a_process(pid, node=NODE):
    return Process(pid, "another machine", node)


def a_beat(name, beat_s=1.0):
    return Progress(name=name, pid=7, beat_s=beat_s, tasks=())


class Held:
    """A process that is stopped in some seconds of a clock; held until it is let go of."""

    clock, stopped_at, open = None, {}, set()

    def __init__(self, process):
        if process.pid not in self.stopped_at:
            raise ProcessLookupError
        self.pid = process.pid
        self.open.add(self.pid)

    def is_stopped(self):
        since_s, until_s = self.stopped_at[self.pid]
        return since_s <= self.clock.now_s() < until_s

    def close(self):
        self.open.remove(self.pid)


@pytest.fixture
def held(monkeypatch):
    monkeypatch.setattr(module, "HeldProcess", Held)
    monkeypatch.setattr(Held, "clock", FakeClock(100.0))
    monkeypatch.setattr(Held, "stopped_at", {})
    return Held


NEVER, ALWAYS = (0.0, 0.0), (0.0, 1e9)


@pytest.mark.parametrize(
    ("stopped_at", "known", "found", "after_s"),
    [
        (NEVER, set(), set(), (1.0, 1.3)),
        ((100.3, 1e9), set(), {FIRST}, (0.3, 0.7)),
        # At two looks a tenth of a second apart: it goes on in between.
        ((100.2, 100.3), set(), set(), (1.0, 1.3)),
        # Whoever asks knows already.
        (ALWAYS, {FIRST}, {FIRST}, (1.0, 1.3)),
        ((0.0, 100.3), {FIRST}, set(), (0.3, 0.7)),
    ],
)
def test_a_watch_answers_once_others_are_stopped_than_is_known(
    held, stopped_at, known, found, after_s
):
    held.stopped_at.update({7: stopped_at, 8: NEVER})
    watch = HostWatch(held.clock)

    stopped, beats = watch.look({FIRST: a_process(7), OTHER: a_process(8)}, frozenset(known), None)

    assert (set(stopped), beats) == (found, [])
    assert after_s[0] <= held.clock.now_s() - 100.0 <= after_s[1]
    assert not held.open


def test_a_process_that_has_ended_is_none_that_is_stopped_also_where_it_was(held):
    stopped, _ = HostWatch(held.clock).look({FIRST: a_process(7)}, frozenset({FIRST}), None)

    assert stopped == frozenset()


def test_a_watch_tells_the_heartbeats_of_the_members_it_is_asked_for(held, tmp_path):
    board = FolderBoard(tmp_path)
    for name in (FIRST, OTHER, "rank dp=1"):
        board.note(a_beat(name))

    _, beats = HostWatch(held.clock).look({FIRST: a_process(7)}, frozenset(), tmp_path)

    assert [Progress.from_json(beat) for beat in beats] == [a_beat(FIRST)]
