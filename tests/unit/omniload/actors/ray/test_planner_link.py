"""What a planner that takes over is told by a rank whose trainer goes on meanwhile."""

from concurrent.futures import Future

import pytest

pytest.importorskip("ray")

from omniload.actors.ray import planner_link
from omniload.actors.ray.planner_link import PlannerLink


class Answer:
    """An answer that is there."""

    def future(self):
        done = Future()
        done.set_result(None)
        return done


class Told:
    """A method of a planner that notes what it is called with."""

    def __init__(self):
        self.steps = []

    def remote(self, step=None, *rank):
        self.steps.append(step)
        return Answer()


class FakePlanner:
    def __init__(self):
        self.taken = Told()


class Racing(PlannerLink):
    """A link whose trainer takes the next step each time that the last one is looked up."""

    racing = False

    @property
    def _taken(self):
        step = self._last
        if self.racing:
            self.taken(step + 1)
        return step

    @_taken.setter
    def _taken(self, step):
        self._last = step


def test_a_planner_that_takes_over_is_told_the_last_step_that_the_trainer_took(monkeypatch):
    planner = FakePlanner()
    planner.first_step = Told()
    monkeypatch.setattr(planner_link, "newest_of", lambda role: role)
    monkeypatch.setattr(planner_link, "actor_named", lambda name: planner)
    monkeypatch.setattr(planner_link, "answer_to", lambda *_: 0)
    link = Racing(0, 0, lambda: None)
    link.taken(3)

    link.racing = True
    link._follow()
    link.racing = False
    link._follow()

    assert planner.taken.steps[-1] == max(planner.taken.steps)
