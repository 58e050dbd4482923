"""Ranks of a small plane: which of their steps come after a rest, and how many steps there are in a turn."""

import time
from itertools import pairwise
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from omniload.actors.ray.measuring import pauses
from omniload.actors.ray.measuring.pauses import Paced, Ranks
from omniload.actors.ray.measuring.probe import _by_place, _Driven
from omniload.actors.ray.measuring.spent import Spent
from omniload.client import Client
from omniload.machine.plans.fetch_pace import FetchPace

WINDOW = 8


class AHandle:
    """The end of a rank: asks for its steps of a quarter of a second at once; the first batch of them is slow."""

    def __init__(self, done, most=WINDOW):
        self.first_step, self._done, self._pace, self._now_s = 0, done, FetchPace(most), 0.0
        self._held, self._behind, self.opened = 0, None, []
        self.made.append(self)

    @property
    def is_empty(self):
        return not self._held

    def rest(self, seconds):
        """Let some time pass."""
        self._now_s += seconds

    def take(self, step, timeout=None):
        began_s = time.thread_time()
        if not self._held:
            self._held, self._behind = self._behind or self._pace.at_once, None
            self.opened.append((step, self._held))
            while time.thread_time() - began_s < 2e-3:
                pass
        self._done.append((self, step))
        self._pace.take(self._now_s)
        self._held -= 1
        if self._behind is None and step - self.opened[-1][0] == min(1, self.opened[-1][1] - 1):
            self._behind = self._pace.at_once
        return SimpleNamespace(step=step)

    def taken(self, step):
        pass


def ranks_of(*handles):
    return Ranks([(Client(handle), handle) for handle in handles])


@pytest.fixture
def done(monkeypatch):
    """Return the record of actions: a rest, or a rank's step; only ranks' steps take time."""
    found, handles = [], []

    def rest(seconds):
        found.append("rest")
        for handle in handles:
            handle.rest(seconds)

    monkeypatch.setattr(pauses.time, "sleep", rest)
    monkeypatch.setattr(AHandle, "made", handles, raising=False)
    return found


@pytest.mark.parametrize("resting", [0, 1, 2])
def test_ranks_rest_before_each_step_and_their_batches_are_told_apart_by_place(done, resting):
    handles = [AHandle(done) for _ in range(2)]
    ranks = ranks_of(*handles)
    ranks.settle(3 * WINDOW, resting=resting > 0)
    done.clear()
    begun = [len(handle.opened) for handle in handles]

    takes_s, aside_s = ranks.pace(resting, 24)

    rested = [then for before, then in pairwise(done) if before == "rest"]
    assert [sum(of is handle for of, _ in rested) for handle in handles] == [
        24 * (number < resting) for number in range(2)
    ]
    opened = [handle.opened[count:] for handle, count in zip(handles, begun, strict=True)]
    assert len(takes_s[0]) == sum(map(len, opened[:resting]))
    assert sum(map(len, takes_s)) == 24 * resting
    assert (aside_s > 0) == (resting > 0)
    # The rank's own thread is charged with the time that it was busy.
    assert all(each >= 2e-3 for each in takes_s[0])
    assert not any(each >= 2e-3 for of_place in takes_s[1:] for each in of_place)


def test_ranks_that_settle_fetch_as_few_as_those_that_rest_before_each_step(done):
    handle = AHandle(done, 32)
    ranks = ranks_of(handle)
    ranks.take(100)
    assert handle.opened[-1][1] == 32

    ranks.settle(96, resting=True)

    assert handle.opened[-1][1] == 6
    assert 6 <= done.count("rest") <= 24


@pytest.mark.parametrize("took", [(3e-4, 1e-4), (1e-4, 3e-4)])
def test_a_batch_at_hand_takes_no_time_in_which_others_had_the_core_nor_that_of_looking_at_it(
    monkeypatch, done, took
):
    monkeypatch.setattr(pauses, "took", lambda _: took)

    assert ranks_of(AHandle(done)).pace(1, 1)[0] == ((1e-4,), (), (), ())


class Alone:
    """A rank in another process that obeys commands at once."""

    pid = 7

    def __init__(self):
        self.asked = []

    def ask(self, what):
        self.asked.append(what)

    def answer(self, limit_s):
        return ((2e-4,), (1e-4,)), 3e-4


def a_plane(alone, ranks):
    mix = SimpleNamespace(steps_at_once=WINDOW, steps_ahead=2 * WINDOW)
    return _Driven(SimpleNamespace(mix=mix), {"loader-0": 5}, ranks, alone)


def test_a_turn_has_as_many_steps_as_the_one_before_took_its_time_for(monkeypatch):
    alone = Alone()
    plane = a_plane(alone, ranks_of())
    # Two windows took a quarter of a turn, the next eight as much again.
    spent = iter([(0.1, 16), (0.1, 64), (40.0, 256)])
    monkeypatch.setattr(
        _Driven,
        "_since",
        lambda *_: Spent(**dict(zip(("seconds", "steps"), next(spent), strict=True)), by_role={}),
    )

    for _ in range(3):
        plane.turn()

    assert alone.asked[1::2] == [("take", 16), ("take", 64), ("take", 256)]


def test_the_rank_beside_rests_by_itself_or_together_with_those_of_the_opener(done):
    alone = Alone()
    plane = a_plane(alone, ranks_of(AHandle(done)))

    apart = plane.pace(together=False)
    assert "rest" not in done
    together = plane.pace(together=True)

    # Before each of 64 steps, and where it asked for more as it came to that pace.
    assert 64 < done.count("rest") <= 64 + 3 * WINDOW
    assert alone.asked == [("settle", 3 * WINDOW), ("pace", 64)] * 2
    assert apart.takes_s == together.takes_s == ((2e-4,), (1e-4,))
    assert apart.aside_s == 3e-4
    assert apart.spent.steps == 64
    assert apart.spent.by_role.keys() == {"loader", "rank", "opener", "node"}
    assert apart.spent.by_role["opener"] > 0


def test_takes_of_several_whiles_are_put_together_by_place_but_for_places_that_no_batch_had():
    whiles = [
        Paced(spent=Spent(seconds=1.0, steps=1, by_role={}), takes_s=takes_s, aside_s=0.0)
        for takes_s in (((1.0,), (2.0,), ()), ((3.0, 4.0), (), ()))
    ]

    assert _by_place(whiles) == ((1.0, 3.0, 4.0), (2.0,))
