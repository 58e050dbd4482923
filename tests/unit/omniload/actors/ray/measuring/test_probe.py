"""What the roles of small planes had of processors meanwhile."""

import time
from itertools import pairwise
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from omniload.actors.ray.measuring import probe
from omniload.actors.ray.measuring.probe import by_role

WINDOW = 8


def test_a_worker_that_ended_meanwhile_takes_nothing_off_what_the_others_of_its_role_had():
    roles = {1: "loader", 2: "rank"}

    found = by_role({1: 5.0, 2: 1.0, 3: 2.0, 4: 7.0}, {1: 6.0, 2: 1.5, 3: 2.25, 5: 9.0}, roles)

    assert found == {"loader": 1.0, "rank": 0.5, "node": 0.25}


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


@pytest.mark.parametrize("resting", [1, 2])
def test_ranks_rest_before_a_window_and_before_a_batch_of_it_wherever_their_windows_begin(
    monkeypatch, resting
):
    done = []
    monkeypatch.setattr(probe.time, "sleep", lambda _: done.append("rest"))
    ranks = [ARank(asks_at, done) for asks_at in (3, 7)]
    mix = SimpleNamespace(steps_at_once=WINDOW, steps_ahead=2 * WINDOW)
    driven = probe._Driven(SimpleNamespace(pids=dict), SimpleNamespace(mix=mix), ranks)

    found = driven.paces(ranks[:resting], 1e-9)

    rested = [then for before, then in pairwise(done) if before == "rest"]
    expected = [(ranks[0], 11), (ranks[0], 12), (ranks[1], 15), (ranks[1], 8)]
    assert set(rested) == set(expected[: 2 * resting])
    assert len(found.opens_s) == len(found.takes_s) == resting
    assert found.spent.steps == WINDOW
