"""The watch of a host's processes: a stopped process is reported after two looks, at once or with the next answer."""

import pytest

pytest.importorskip("ray")
from omniload.actors.heartbeat_board import FolderBoard
from omniload.actors.ray.hosts import watch as module
from omniload.actors.ray.hosts.watch import HostWatch
from omniload.actors.ray.processes import Process
from omniload.base.clock import FakeClock
from omniload.machine.progress import Progress
from omniload.machine.roster.members import MembersSeen
from omniload.machine.roster.roster import Roster

FIRST, OTHER = "constructor-1", "constructor-2"
NODE = "node-b"
LOOK_S = 0.25


def a_process(pid, node=NODE):
    return Process(pid, "another machine", node)


def a_beat(name, beat_s=1.0):
    return Progress(name=name, pid=7, beat_s=beat_s, tasks=())


class Held:
    """A process that is stopped in some seconds of a clock; watched until it is released."""

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
        (NEVER, set(), set(), (0.5, 0.8)),
        ((100.2, 1e9), set(), {FIRST}, (0.2, 0.45)),
        # Two looks a tenth of a second apart: it runs in between.
        ((100.2, 100.3), set(), set(), (0.5, 0.8)),
        # The caller knows it already.
        (ALWAYS, {FIRST}, {FIRST}, (0.5, 0.8)),
        ((0.0, 100.2), {FIRST}, set(), (0.2, 0.45)),
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


class Beating(FakeClock):
    """A clock by which a member posts a heartbeat every few seconds, also while a caller sleeps."""

    def __init__(self, board, gap_s):
        super().__init__(100.0)
        self.board, self.gap_s, self.next_s = board, gap_s, 100.0

    def sleep(self, seconds):
        until_s = self.now_s() + seconds
        while self.next_s <= until_s:
            self.board.note(a_beat(FIRST, self.next_s))
            self.next_s += self.gap_s
        super().sleep(seconds)


@pytest.mark.parametrize(("gap_s", "is_replaced"), [(2.3, False), (3.6, True)])
def test_a_heartbeat_that_is_a_second_late_on_a_busy_host_elsewhere_costs_no_role(
    held, monkeypatch, tmp_path, gap_s, is_replaced
):
    """The least ``silent_after`` bears an answer of the watch too, and most of a second until the keeper has that."""
    clock = Beating(FolderBoard(tmp_path), gap_s)
    monkeypatch.setattr(held, "clock", clock)
    held.stopped_at.update({7: NEVER})
    watch, roster = HostWatch(clock), Roster(roles={FIRST: 0}, silent_s=3.0)
    looked_s, heard, ended = 100.0, (), ()
    while clock.now_s() < 300.0 and not ended:
        _, beats = watch.look({FIRST: a_process(7)}, frozenset(), tmp_path)
        # Until the keeper has the answer, and asks again, it sees the one before.
        while looked_s + LOOK_S <= clock.now_s() and not ended:
            looked_s += LOOK_S
            told = {each["name"]: Progress.from_json(each) for each in heard}
            ended = roster.handle(MembersSeen(now_s=looked_s, beats=told))
        clock.sleep(3 * LOOK_S)
        heard = beats

    assert bool(ended) == is_replaced
