"""What a planner that takes over is told by a rank whose trainer goes on meanwhile."""

from concurrent.futures import Future

import pytest

pytest.importorskip("ray")
from ray.exceptions import ActorDiedError

from omniload.actors.ray import planner_link
from omniload.actors.ray.planner_link import PlannerLink


class Answer:
    """An answer that is there, or that will never be."""

    def __init__(self, error):
        self.error = error

    def future(self):
        done = Future()
        if self.error is None:
            done.set_result(None)
        else:
            done.set_exception(self.error)
        return done


class Method:
    """A method of a planner that notes what it is called with."""

    def __init__(self, error=None):
        self.steps, self.error = [], error

    def remote(self, *arguments):
        self.steps += arguments[:1]
        return Answer(self.error)


class FakePlanner:
    def __init__(self, error=None):
        self.taken, self.first_step = Method(error), Method()


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
    first, second, third = (FakePlanner(ActorDiedError()) for _ in range(3))
    third.taken.error = None
    planners = iter((first, second, third))
    monkeypatch.setattr(planner_link, "_LOOK_S", 0.0)
    monkeypatch.setattr(planner_link, "newest_of", lambda role: role)
    monkeypatch.setattr(planner_link, "actor_named", lambda name: next(planners))
    monkeypatch.setattr(planner_link, "answer_to", lambda *_: 0)
    link = Racing(0, 0, lambda: None)
    link.taken(3)

    link.racing = True
    link.look()
    link.racing = False
    link.look()

    assert first.taken.steps == [3]
    assert third.taken.steps == [max(second.taken.steps)]
