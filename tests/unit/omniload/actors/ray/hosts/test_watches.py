"""Members of other hosts: one call for each host; a host that does not answer reports no member as stopped."""

import itertools
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")
from omniload.actors.ray.hosts import watches as module
from omniload.actors.ray.hosts.watches import Watches
from omniload.actors.ray.processes import Process
from omniload.base.errors import UnavailableError
from omniload.machine.progress import Progress

FIRST, OTHER = "constructor-1", "constructor-2"
NODE = "node-b"


def a_process(pid, node=NODE):
    return Process(pid, "another machine", node)


def a_beat(name, beat_s=1.0):
    return Progress(name=name, pid=7, beat_s=beat_s, tasks=())


class Watch:
    """The actor of a host; it answers on command."""

    def __init__(self, node):
        self.node, self.asked, self.boards = node, [], []
        self.look = SimpleNamespace(remote=self.ask)

    def ask(self, members, known, board):
        self.boards.append(board)
        answer = Future()
        self.asked.append((set(members), set(known), answer))
        return SimpleNamespace(future=lambda: answer)

    def tells(self, *stopped, beats=()):
        self.asked[-1][2].set_result((frozenset(stopped), [beat.to_json() for beat in beats]))


class Hosts:
    """Watches by a clock of the test; records those that were started, and those that were ended."""

    def __init__(self, monkeypatch):
        self.s, self.begun, self.killed = 50.0, [], []
        monkeypatch.setattr(module.time, "monotonic", lambda: self.s)
        kill = lambda watch, **_: self.killed.append(watch)  # noqa: E731
        monkeypatch.setattr(module.ray, "kill", kill)
        self.watches = Watches(self.begin)

    def begin(self, node):
        self.begun.append(Watch(node))
        return self.begun[-1]

    def look(self, after_s=0.25, times=1):
        for _ in range(times):
            self.s += after_s
            self.watches.look(self.s, lambda call: call())

    @property
    def watch(self):
        return self.begun[-1]


@pytest.fixture
def hosts(monkeypatch):
    return Hosts(monkeypatch)


def test_a_host_has_one_watch_however_many_members_and_one_call_until_that_answers(hosts):
    hosts.watches.add(FIRST, a_process(7), None)
    hosts.watches.add(OTHER, a_process(8), None)
    hosts.watches.add("constructor-3", a_process(9, "node-c"), None)
    hosts.look(times=4)

    assert [each.node for each in hosts.begun] == [NODE, "node-c"]
    assert [asked[:2] for asked in hosts.begun[0].asked] == [({FIRST, OTHER}, set())]


def test_heartbeats_are_read_in_the_folder_of_those_who_stay_also_where_others_came_before_and_after(
    hosts, tmp_path
):
    for name, board in ((OTHER, None), (FIRST, tmp_path), ("loader-0+1", None)):
        hosts.watches.add(name, a_process(7), board)
        hosts.look()
        hosts.watch.tells()

    assert hosts.watch.boards == [None, tmp_path, tmp_path]


def test_who_is_stopped_is_known_until_the_host_tells_otherwise(hosts):
    hosts.watches.add(FIRST, a_process(7), None)
    hosts.look()
    hosts.watch.tells(FIRST)
    assert hosts.watches.stopped() == {FIRST}

    hosts.look(times=8)
    assert hosts.watches.stopped() == {FIRST}
    assert hosts.watch.asked[-1][:2] == ({FIRST}, {FIRST})

    hosts.watch.tells()
    assert hosts.watches.stopped() == set()


def test_a_member_that_has_ended_is_neither_told_of_nor_looked_at(hosts):
    hosts.watches.add(FIRST, a_process(7), None)
    hosts.watches.add(OTHER, a_process(8), None)
    hosts.look()
    hosts.watch.tells(FIRST, OTHER, beats=[a_beat(FIRST), a_beat(OTHER)])

    hosts.watches.forget(FIRST)
    hosts.look()

    assert hosts.watches.stopped() == {OTHER}
    assert list(hosts.watches.beats(hosts.s)) == [OTHER]
    assert hosts.watch.asked[-1][0] == {OTHER}


def test_heartbeats_of_a_host_that_does_not_answer_are_not_those_of_now(hosts):
    """Else all its members would be silent, be it that only the way to the host is cut."""
    hosts.watches.add(FIRST, a_process(7), None)
    hosts.look()
    hosts.watch.tells(beats=[a_beat(FIRST)])
    hosts.look(times=8)
    assert hosts.watches.beats(hosts.s) == {FIRST: a_beat(FIRST)}

    hosts.look(times=8)
    assert hosts.watches.beats(hosts.s) == {}

    hosts.watch.tells(beats=[a_beat(FIRST, 2.0)])
    assert hosts.watches.beats(hosts.s) == {FIRST: a_beat(FIRST, 2.0)}


def test_a_watch_that_does_not_answer_is_followed_by_another_each_time_later(hosts):
    hosts.watches.add(FIRST, a_process(7), None)
    hosts.look()
    hosts.watch.tells()
    began = []
    for _ in range(3):
        count = len(hosts.begun)
        while len(hosts.begun) == count:
            hosts.look()
        began.append(hosts.s)
        # The present answer of the previous watch counts for nothing.
        hosts.begun[-2].asked[-1][2].set_result((frozenset({FIRST}), []))
        assert hosts.watches.stopped() == set()

    # At once, because it may be stopped together with a member.
    assert began[0] - 50.25 == pytest.approx(2.0, abs=0.6)
    # Those that were started since have as long as a process may take to start.
    assert [b - a for a, b in itertools.pairwise(began)] == [
        pytest.approx(120.0 + rest_s, abs=0.6) for rest_s in (2.0, 4.0)
    ]
    assert hosts.killed == hosts.begun[:-1]


def test_a_watch_that_has_ended_is_followed_by_another_and_one_that_answers_begins_anew(
    hosts, caplog
):
    hosts.watches.add(FIRST, a_process(7), None)
    hosts.look()
    for _ in range(3):
        hosts.watch.asked[-1][2].set_exception(UnavailableError("killed"))
        hosts.look()
        hosts.look(after_s=5.0)
        assert hosts.watch.asked
    assert len(hosts.begun) == 4

    for _ in range(2):
        hosts.watch.tells()
        hosts.look()
    hosts.watch.asked[-1][2].set_exception(UnavailableError("killed"))
    hosts.look(after_s=1.0)

    assert len(hosts.begun) == 5
    warned = [line for line in caplog.messages if "no process looks for stopped processes" in line]
    # The first loss in a row is reported with those of the members if a host is gone.
    assert [line.partition(" starts in ")[2] for line in warned] == ["2 s: killed", "4 s: killed"]


def test_a_host_too_busy_for_its_watch_has_another_begun_ever_less_often(hosts, caplog):
    """Each answers once, as it begins, and no more in time."""
    hosts.watches.add(FIRST, a_process(7), None)
    began = []
    for _ in range(5):
        count = len(hosts.begun)
        while len(hosts.begun) == count:
            hosts.look()
        began.append(hosts.s)
        hosts.watch.tells()

    assert [b - a for a, b in itertools.pairwise(began)] == [
        pytest.approx(2.25 + rest_s, abs=0.6) for rest_s in (0.0, 2.0, 4.0, 8.0)
    ]
    # The first in a row is worth no line: the next one has answered before anybody could have been missed.
    assert [line.partition(" starts ")[2].partition(":")[0] for line in caplog.messages] == [
        "in 2 s",
        "in 4 s",
        "in 8 s",
    ]


def test_time_in_which_the_keeper_did_not_run_is_no_silence_of_a_watch(hosts, caplog):
    """Earlier, a job that was suspended and resumed started the watches of all its hosts again."""
    hosts.watches.add(FIRST, a_process(7), None)
    hosts.look()
    hosts.watch.tells()
    hosts.look()

    hosts.look(after_s=3600.0)
    hosts.look(times=4)
    hosts.watch.tells()
    hosts.look(times=4)

    assert hosts.begun == [hosts.watch]
    assert (hosts.killed, caplog.messages) == ([], [])


def test_a_host_that_is_gone_with_its_members_has_no_other_watch(hosts, caplog):
    """Earlier, others were started there for a minute, with a warning that no process watches the host's members."""
    hosts.watches.add(FIRST, a_process(7), None)
    hosts.look()
    hosts.watches.forget(FIRST)
    hosts.watch.asked[-1][2].set_exception(UnavailableError("its host is gone"))

    hosts.look(times=400)

    assert len(hosts.begun) == 1
    assert caplog.messages == []


def test_a_host_that_members_have_left_has_no_watch_after_a_minute(hosts):
    hosts.watches.add(FIRST, a_process(7), None)
    hosts.look()
    hosts.watch.tells()
    hosts.watches.forget(FIRST)

    hosts.look(after_s=59.0)
    hosts.watches.add(OTHER, a_process(8), None)
    hosts.look(after_s=30.0)
    assert len(hosts.begun) == 1
    hosts.watch.tells()

    hosts.watches.forget(OTHER)
    hosts.look(after_s=61.0)
    hosts.watches.add(FIRST, a_process(7), None)
    hosts.look()
    assert len(hosts.begun) == 2


def test_watches_of_many_hosts_are_begun_a_few_at_a_time(hosts):
    for number in range(20):
        hosts.watches.add(f"constructor-{number}", a_process(7, f"node-{number}"), None)

    counts = []
    for _ in range(4):
        hosts.look()
        counts.append(len(hosts.begun))

    assert counts == [8, 16, 20, 20]
