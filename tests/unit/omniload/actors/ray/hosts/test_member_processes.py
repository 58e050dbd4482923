"""Processes of members: this host's are watched directly, and those of other hosts by a process there."""

import os

import pytest

pytest.importorskip("ray")
from omniload.actors.ray.hosts.member_processes import MemberProcesses
from omniload.actors.ray.processes import Process
from omniload.machine.progress import Progress
from omniload.machine.roster.members import Member

FIRST, OTHER = Member("constructor-0"), Member("constructor-1")
NOBODY = 2**31 - 1
"""A number that no process ever has."""


class Watches:
    """Records of the requests to the other hosts."""

    def __init__(self):
        self.members = {}

    def add(self, name, process, board):
        self.members[name] = process, board

    def forget(self, name):
        self.members.pop(name, None)

    def stopped(self):
        return frozenset(self.members)

    def beats(self, _now_s):
        return {name: Progress(name=name, pid=7, beat_s=1.0, tasks=()) for name in self.members}


@pytest.fixture
def watches():
    return Watches()


@pytest.fixture
def held(watches):
    made = MemberProcesses(watches)
    yield made
    made.close()


def test_a_member_of_another_host_is_looked_at_there_until_it_is_ended(held, watches, tmp_path):
    there = Process(os.getpid(), "another machine", "node-b")
    held.take(OTHER, there, tmp_path, pytest.fail)

    assert watches.members == {OTHER.name: (there, tmp_path)}
    assert held.stopped() == {OTHER.name}
    assert list(held.beats(1.0)) == [OTHER.name]

    # Ray is to end it.
    assert not held.end(OTHER)
    assert watches.members == {}


def test_a_member_of_this_host_that_has_ended_is_looked_at_nowhere(held, watches):
    """Earlier, a process was started to look for it on the opener's own host, where none is needed."""
    held.take(FIRST, Process(NOBODY, Process.own().place, "home"), None, pytest.fail)

    assert watches.members == {}
    assert held.stopped() == frozenset()
    assert not held.end(FIRST)
