"""Ranks of a small plane: which of their steps come after a rest, and how many steps there are in a turn."""

import time
from itertools import pairwise
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from omniload.actors.ray.measuring import probe
from omniload.actors.ray.measuring.probe import _Driven, _Ranks
from omniload.actors.ray.measuring.spent import Spent

WINDOW = 8


class ARank:
    """A rank that asks for every eighth step, from one on; the others are at hand."""

    def __init__(self, asks_at, done):
        self.first_step, self._asks_at, self._done = 0, asks_at, done

    def take(self, step):
        self._done.append((self, step))
        began_s = time.thread_time()
        while step % WINDOW == self._asks_at and time.thread_time() - began_s < 2e-3:
            pass

    def taken(self, step):
        pass


@pytest.mark.parametrize("resting", [0, 1, 2])
def test_ranks_rest_before_a_window_and_before_a_batch_of_it_wherever_their_windows_begin(
    monkeypatch, resting
):
    done = []
    monkeypatch.setattr(probe.time, "sleep", lambda _: done.append("rest"))
    handles = [ARank(asks_at, done) for asks_at in (3, 7)]
    ranks = _Ranks(handles, WINDOW)
    ranks.look()

    takes_s, opened = ranks.pace(resting, 1)

    rested = [then for before, then in pairwise(done) if before == "rest"]
    expected = [(handles[0], 11), (handles[0], 12), (handles[1], 15), (handles[1], 8)]
    assert set(rested) == set(expected[: 2 * resting])
    assert len(opened) == len(takes_s) == resting
    # Of a window its own thread has had what the rank was busy for.
    assert [each >= 2e-3 for _, each in opened] == [True] * resting


class Alone:
    """A rank beside this process, that does as it is asked at once."""

    pid = 7

    def __init__(self):
        self.asked = []

    def ask(self, what):
        self.asked.append(what)

    def answer(self, limit_s):
        return [1e-4], [(2e-4, 3e-4)]


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
    plane = a_plane(alone, _Ranks([ARank(3, done)], WINDOW))

    apart = plane.pace(0.16, together=False)
    assert "rest" not in done
    together = plane.pace(0.16, together=True)

    assert done.count("rest") == 4
    assert alone.asked == [("look",), ("pace", 2)] * 2
    assert apart.takes_s == together.takes_s == (1e-4,)
    assert apart.opened == ((2e-4, 3e-4),)
    assert apart.spent.steps == 2 * WINDOW
    assert apart.spent.by_role.keys() == {"loader", "rank", "opener", "node"}
    assert apart.spent.by_role["opener"] > 0
