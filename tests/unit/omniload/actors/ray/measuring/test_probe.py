"""Ranks of a small plane: which of their steps come after a rest, and how many steps there are in a turn."""

import time
from itertools import pairwise
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from omniload.actors.ray.measuring import probe
from omniload.actors.ray.measuring.probe import _Driven, _Ranks, _taken_after_a_pause
from omniload.actors.ray.measuring.spent import Spent
from omniload.client import Client

WINDOW = 8


class AHandle:
    """The end of a rank that asks for every eighth step, from one on; the others are at hand."""

    def __init__(self, asks_at, done):
        self.first_step, self._asks_at, self._done = 0, asks_at, done

    def take(self, step, timeout=None):
        self._done.append((self, step))
        began_s = time.thread_time()
        while step % WINDOW == self._asks_at and time.thread_time() - began_s < 2e-3:
            pass
        return SimpleNamespace(step=step)

    def taken(self, step):
        pass


def ranks_of(*handles):
    return _Ranks([Client(handle) for handle in handles], WINDOW)


@pytest.mark.parametrize("resting", [0, 1, 2])
def test_ranks_rest_before_a_window_and_before_batches_of_it_wherever_their_windows_begin(
    monkeypatch, resting
):
    done = []
    monkeypatch.setattr(probe.time, "sleep", lambda _: done.append("rest"))
    handles = [AHandle(asks_at, done) for asks_at in (3, 7)]
    ranks = ranks_of(*handles)
    ranks.look()

    takes_s = ranks.pace(resting, 1)

    rested = [then for before, then in pairwise(done) if before == "rest"]
    expected = [(handles[0], step) for step in (11, 12, 13, 14, 15, 8)]
    expected += [(handles[1], step) for step in (15, 8, 9, 10, 11, 12)]
    assert set(rested) == set(expected[: 6 * resting])
    assert [len(of_place) for of_place in takes_s] == [resting, resting, resting, 3 * resting]
    # Of a window its own thread has had what the rank was busy for.
    assert [each >= 2e-3 for each in takes_s[0]] == [True] * resting


@pytest.mark.parametrize("took", [(3e-4, 1e-4), (1e-4, 3e-4)])
def test_a_batch_at_hand_takes_no_time_in_which_others_had_the_core_nor_that_of_looking_at_it(
    monkeypatch, took
):
    monkeypatch.setattr(probe.time, "sleep", lambda _: None)
    monkeypatch.setattr(probe, "took", lambda _: took)

    assert _taken_after_a_pause(None) == 1e-4


class Alone:
    """A rank beside this process, that does as it is asked at once."""

    pid = 7

    def __init__(self):
        self.asked = []

    def ask(self, what):
        self.asked.append(what)

    def answer(self, limit_s):
        return (2e-4,), (1e-4,)


def a_plane(alone, ranks):
    mix = SimpleNamespace(steps_at_once=WINDOW, steps_ahead=2 * WINDOW)
    return _Driven(SimpleNamespace(mix=mix), {"loader-0": 5}, ranks, alone)


def test_a_turn_has_as_many_steps_as_the_one_before_took_its_time_for(monkeypatch):
    alone = Alone()
    plane = a_plane(alone, _Ranks([], WINDOW))
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


def test_the_rank_beside_rests_by_itself_or_together_with_those_of_the_opener(monkeypatch):
    done = []
    monkeypatch.setattr(probe.time, "sleep", lambda _: done.append("rest"))
    alone = Alone()
    plane = a_plane(alone, ranks_of(AHandle(3, done)))

    apart = plane.pace(2, together=False)
    assert "rest" not in done
    together = plane.pace(2, together=True)

    assert done.count("rest") == 12
    assert alone.asked == [("look",), ("pace", 2)] * 2
    assert apart.takes_s == together.takes_s == ((2e-4,), (1e-4,))
    assert apart.spent.steps == 2 * WINDOW
    assert apart.spent.by_role.keys() == {"loader", "rank", "opener", "node"}
    assert apart.spent.by_role["opener"] > 0
