"""Ranks of several hosts meet: who starts a node where, and what each is told that goes wrong."""

import dataclasses
import threading
from functools import partial
from pathlib import Path

import pytest

from omniload.actors.address import Head, HostPlace
from omniload.base.clock import Deadline, FakeClock
from omniload.base.errors import ConfigError, UnavailableError
from omniload.front import meeting as meetings
from omniload.front.launch import Launch, Place
from omniload.front.meeting import (
    Arrival,
    HostAssignment,
    Invitation,
    Joined,
    Meeting,
    NodeUp,
    wait_for_ranks,
)
from omniload.front.mix_values import MixValues
from omniload.front.rendezvous import FolderRendezvous

LONG_S = 30.0
HEAD = Head(cluster="10.0.0.1:1", namespace="n", token="secret")


@pytest.fixture
def rank(tmp_path, monkeypatch):
    """One side of a meeting of four ranks, by rank; rank 0 is on host A."""
    monkeypatch.setattr(meetings, "host_id", lambda: "A")

    def side(number, timeout_s=LONG_S):
        launch = Launch(rank=number, world_size=4, attempt="", found_in="the test")
        place = Place(dp_rank=number, dp_size=4)
        return Meeting(FolderRendezvous(tmp_path), "omniload/1", launch, place, timeout_s)

    return side


def arrive(rank, number, host):
    note = Arrival(host=host, name=f"name-of-{host}", dp_rank=number)
    assert rank(number).post(f"here/{number}", note.model_dump_json())


def node_of(host):
    return HostPlace(node=host, address="10.0.0.2", board=Path(f"/tmp/{host}"))


def test_the_first_rank_of_each_other_host_starts_its_node(rank):
    for number, host in ((1, "A"), (2, "B"), (3, "B")):
        arrive(rank, number, host)
    rank(2).post("node/2", NodeUp(place=node_of("B")).model_dump_json())

    hosts = rank(0).gather(HEAD)

    assert hosts.host_of_R == ["A", "A", "B", "B"]
    assert hosts.elsewhere == {"B": node_of("B")}
    posted = rank(3).rendezvous.read("omniload/1/hosts", LONG_S)
    assert HostAssignment.model_validate_json(posted) == HostAssignment(
        head=HEAD, first_of={"B": 2}
    )


def test_threads_of_rank_0_need_no_node_wherever_its_peers_are(rank):
    for number, host in ((1, "A"), (2, "B"), (3, "C")):
        arrive(rank, number, host)

    assert rank(0).gather(None).elsewhere == {}

    posted = rank(3).rendezvous.read("omniload/1/hosts", LONG_S)
    assert HostAssignment.model_validate_json(posted) == HostAssignment(head=None, first_of={})


def test_several_hosts_are_refused_where_the_plane_listens_on_loopback(rank):
    for number, host in ((1, "A"), (2, "B"), (3, "C")):
        arrive(rank, number, host)

    with pytest.raises(ConfigError, match=r"ranks \[2, 3\] .*name-of-B.* set runtime.bind in"):
        rank(0).gather(HEAD.model_copy(update={"cluster": "127.0.0.1:1"}))


def test_a_rank_that_does_not_come_is_named(rank):
    arrive(rank, 1, "A")

    with pytest.raises(UnavailableError, match=r"ranks \[2, 3\] have not joined rank 0 on"):
        rank(0, 0.2).gather(HEAD)


class LateNotes:
    """A rendezvous of a process that is stopped for an hour in its first read; notes of the ranks are there after."""

    def __init__(self, clock, notes=()):
        self._clock, self._notes, self._stops = clock, dict(notes), [3600.0]

    def read(self, key, timeout_s):
        if self._stops:
            self._clock.sleep(timeout_s + self._stops.pop())
            return None
        if key not in self._notes:
            self._clock.sleep(timeout_s)
        return self._notes.get(key)


def test_a_rank_that_was_stopped_as_it_waited_has_the_rest_of_its_time(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(meetings, "Deadline", partial(Deadline, now_s=clock.now_s))
    note = Joined(host="a", pid=7)
    keys = [(rank, f"joined/{rank}") for rank in (1, 2)]

    there = LateNotes(clock, {key: note.model_dump_json() for _, key in keys})
    assert wait_for_ranks(there, keys, 30.0, Joined) == {1: note, 2: note}
    assert clock.now_s() == 3607.5

    with pytest.raises(UnavailableError, match=r"ranks \[1, 2\] have not joined .* within 30 s"):
        wait_for_ranks(LateNotes(clock), keys, 30.0, Joined)
    assert clock.now_s() == 2 * 3600.0 + 7.5 + 30.0


def test_a_node_that_does_not_start_ends_the_meeting_with_its_reason(rank):
    for number, host in ((1, "A"), (2, "B"), (3, "B")):
        arrive(rank, number, host)
    rank(2).fail(UnavailableError("Ray did not start"))

    with pytest.raises(UnavailableError, match="rank 2: Ray did not start"):
        rank(0).gather(HEAD)


def test_what_rank_0_fails_with_reaches_ranks_that_wait_for_the_hosts_or_the_plane(rank):
    told = []

    def wait():
        try:
            rank(1).arrive()
        except ConfigError as error:
            told.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    rank(0).fail(ConfigError("no such source"))
    waiting.join(LONG_S)

    assert told == ["rank 0: no such source"]
    with pytest.raises(ConfigError, match="rank 0: no such source"):
        rank(2).invitation()


@pytest.mark.parametrize(("letters", "is_told"), [(9, True), (1 << 20, False)])
def test_values_of_a_mix_are_there_once_the_invitation_is_and_none_where_they_are_too_many(
    rank, monkeypatch, letters, is_told
):
    monkeypatch.setattr(meetings, "_THERE_S", 0.0)
    values = MixValues(values={"seed": "7" * letters})
    invitation = Invitation(plane=None, mix="digest", dp_size=4, cp_size=1, step=0)

    rank(0).invite(invitation, values)

    assert rank(2).invitation() == invitation
    assert rank(2).values_of_0() == (values if is_told else None)


def test_a_second_process_of_one_rank_is_refused(rank):
    arrive(rank, 1, "A")

    # So it is where a job is started again, and is given the folder of the start before.
    with pytest.raises(
        ConfigError, match=r"another process has joined as rank 1 .* each start of the job a folder"
    ):
        rank(1).arrive()


def test_the_first_rank_that_has_not_left_in_time_is_named_and_no_other_waited_for(
    rank, monkeypatch
):
    monkeypatch.setattr(meetings, "_LEAVE_S", 0.05)
    zero = rank(0)
    rank(1).leave()
    rank(3).leave()

    assert zero.wait_until_left([1, 2, 3]) == 2
    assert zero.wait_until_left([1, 3]) is None


class Stuck(FolderRendezvous):
    """A store that is cut off: it keeps to no limit."""

    asked, came, released = 0, threading.Event(), threading.Event()

    def post(self, key, text):
        self.asked += 1
        self.came.set()
        self.released.wait()

    read = post


def test_a_rank_that_ends_leaves_a_store_that_never_answers(rank, tmp_path, monkeypatch):
    monkeypatch.setattr(meetings, "_STUCK_S", 0.05)
    stuck = Stuck(tmp_path)
    side = dataclasses.replace(rank(1), rendezvous=stuck)

    side.leave()
    side.wait_until_ended()
    side.fail(UnavailableError("cut off"))
    assert side.wait_until_left([2, 3]) == 2
    side.end()

    assert stuck.came.wait(60)
    assert stuck.asked == 1  # whoever has not answered once is asked nothing more
    stuck.released.set()
