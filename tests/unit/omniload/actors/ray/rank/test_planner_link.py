"""A rank's link to the planner: its reports, the planner that it follows, and when it gives up."""

import queue
import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")
from ray.exceptions import ActorDiedError

from omniload.actors.gate import Gate
from omniload.actors.ray import finding as finding_module
from omniload.actors.ray.rank import planner_link as link_module
from omniload.actors.ray.rank.planner_link import PlannerLink
from omniload.base.errors import UnavailableError
from omniload.plan.world import WorldRank


class Answer:
    """An answer that is there, or that will never be."""

    def __init__(self, error, value=None):
        self.error, self.found = error, value

    def value(self):
        if self.error is not None:
            raise self.error
        return 0

    def future(self):
        done = Future()
        if self.error is None:
            done.set_result(self.found)
        else:
            done.set_exception(self.error)
        return done


class Method:
    """A method of a planner that records its calls."""

    def __init__(self, error=None):
        self.steps, self.error = [], error

    def remote(self, *arguments):
        self.steps += arguments[:1]
        return Answer(self.error)


class FakeConstructor:
    """A constructor that passes on the reports of ranks, does not know these ranks, or is lost."""

    def __init__(self, error=None, *, passes_on=True):
        self.told, self.taken = [], self
        self.answer = Answer(error, passes_on)

    def remote(self, *step_as):
        self.told.append(step_as)
        return self.answer


class FakePlanner:
    def __init__(self, error=None, *, is_gone=False):
        self.taken = Method(error)
        self.first_step = Method(ActorDiedError() if is_gone else None)


def answered(ask):
    answer = Future()
    answer.set_result(ask())
    return answer


@pytest.fixture
def finding(monkeypatch):
    """Return a function that makes ranks find planners, one after another; an error is raised instead."""
    monkeypatch.setattr(link_module, "_LOOK_S", 1e-9)
    monkeypatch.setattr(link_module.time, "sleep", lambda _: None)
    monkeypatch.setattr(finding_module, "ask_head", answered)
    monkeypatch.setattr(link_module, "wait_for_ref", lambda *_: True)
    monkeypatch.setattr(link_module, "value_of", Answer.value)

    def find(*planners):
        left = iter(planners)

        def newest_actor(role, _namespace):
            planner = next(left)
            return planner if planner is None else (role, planner)

        monkeypatch.setattr(finding_module, "newest_actor", newest_actor)

    return find


def test_a_rank_that_comes_while_a_planner_takes_the_place_of_another_waits_for_it(finding):
    found, looks = FakePlanner(), []
    finding(None, FakePlanner(is_gone=True), None, found)

    link = PlannerLink("omniload-a", 0, 0, lambda: looks.append(1))
    link.taken(3)
    link.tell()

    assert (link.first_step, found.taken.steps, len(looks)) == (0, [3], 4)


def test_a_rank_that_finds_no_planner_for_a_minute_says_so(finding, monkeypatch):
    finding(*[None] * 99)
    monkeypatch.setattr(link_module, "_ANSWER_S", 1e-5)

    with pytest.raises(UnavailableError, match="no planner gave the first step of the data within"):
        PlannerLink("omniload-a", 0, 0, lambda: None)


def test_a_rank_whose_planner_is_lost_looks_at_the_plane_while_the_head_does_not_answer(
    monkeypatch, finding
):
    asked, looks = [], []
    finding(FakePlanner(ActorDiedError()))
    link = PlannerLink("omniload-a", 0, 0, lambda: looks.append(len(asked)))
    monkeypatch.setattr(finding_module, "ask_head", lambda ask: asked.append(Future()) or asked[-1])
    link.taken(3)
    link.tell()

    for _ in range(3):
        link.look()
    found = FakePlanner(None)
    asked[0].set_result(("planner+1", found))
    link.look()

    assert (looks, found.taken.steps) == ([0, 0, 1, 1, 1], [3])


def test_a_head_that_answers_while_a_rank_looks_is_heard_in_that_look(monkeypatch, finding):
    """In the next look, the answer would name a planner that was lost before. A kill then cost ranks a second more."""
    asked, found = [], FakePlanner(None)

    def wait(answers, limit_s):
        assert 0 < limit_s < 1
        asked[0].set_result(("planner+1", found))

    finding(FakePlanner(ActorDiedError()))
    link = PlannerLink("omniload-a", 0, 0, lambda: None)
    monkeypatch.setattr(finding_module, "ask_head", lambda ask: asked.append(Future()) or asked[-1])
    monkeypatch.setattr(link_module, "wait", wait)
    link.taken(3)
    link.tell()

    link.look()

    assert found.taken.steps == [3]


def test_a_planner_that_takes_over_is_told_the_last_step_that_the_trainer_took(finding):
    first, second, third = (FakePlanner(ActorDiedError()) for _ in range(3))
    third.taken.error = None
    finding(first, second, third)
    link = PlannerLink("omniload-a", 0, 0, lambda: None)
    link.taken(3)
    link.tell()

    for step in (4, 5):  # while no planner is there
        link.taken(step)
        link.look()

    assert [each.taken.steps for each in (first, second, third)] == [[3], [4], [5]]


def test_whoever_waits_tells_what_was_taken_though_no_thread_watches(finding):
    planner = FakePlanner()
    planner.check = Method()
    finding(planner)
    link = PlannerLink("omniload-a", 0, 0, lambda: None)
    link.taken(3)

    link.look()
    link.look()

    assert planner.taken.steps == [3]


def test_the_thread_that_watches_tells_at_once_what_the_trainer_took_and_as_whom(finding):
    told, left = queue.SimpleQueue(), threading.Event()
    planner = FakePlanner()
    planner.taken = SimpleNamespace(
        remote=lambda *step_as: told.put((step_as, threading.current_thread())) or Answer(None)
    )
    finding(planner)
    link = PlannerLink("omniload-a", 1, 0, lambda: None)
    link.watch(Gate(), left, ranks=1_000_000)  # its next look is in half an hour

    link.taken(3)
    link.become(0, 1, "")  # another rank from now on: it took nothing yet
    link.taken(8)

    found = [told.get(timeout=60.0)]
    while found[-1][0] != (8, WorldRank(0, 0, 1)):
        found.append(told.get(timeout=60.0))
    assert {step_as for step_as, _ in found} <= {(3, WorldRank(1)), (8, WorldRank(0, 0, 1))}
    (watch,) = {thread for _, thread in found}
    assert watch is not threading.current_thread()
    left.set()
    link.end_watch()
    watch.join(60.0)
    assert not watch.is_alive()


def test_a_constructor_passes_on_what_a_rank_takes_and_the_planner_is_called_by_nobody(finding):
    planner, constructor = FakePlanner(), FakeConstructor()
    finding(planner)
    link = PlannerLink("omniload-a", 1, 0, lambda: None)
    link.tell_by(constructor)

    for step in (3, 7):
        link.taken(step)
        link.tell()
    link.tell()

    assert constructor.told == [(3, WorldRank(1)), (7, WorldRank(1))]
    assert planner.taken.steps == []


def test_what_a_lost_constructor_does_not_pass_on_the_planner_is_told_and_what_follows(finding):
    planner, constructor = FakePlanner(), FakeConstructor(ActorDiedError())
    finding(planner)
    link = PlannerLink("omniload-a", 0, 0, lambda: None)
    link.tell_by(constructor)
    link.taken(3)
    link.tell()

    link.tell()
    link.taken(4)
    link.tell()

    assert [told[0] for told in constructor.told] == [3]
    assert planner.taken.steps == [3, 4]


def test_a_word_that_a_constructor_does_not_know_yet_is_told_to_the_planner_and_the_next_one_to_it(
    finding,
):
    """A constructor that has just replaced another knows no ranks.

    If they reported past it from then on, each report would cost a call.
    """
    planner, constructor = FakePlanner(), FakeConstructor(passes_on=False)
    finding(planner)
    link = PlannerLink("omniload-a", 0, 0, lambda: None)
    link.tell_by(constructor)
    link.taken(3)
    for _ in range(3):
        link.tell()

    constructor.answer = Answer(None, value=True)
    link.taken(4)
    for _ in range(2):
        link.tell()

    assert [told[0] for told in constructor.told] == [3, 4]
    assert planner.taken.steps == [3]


def test_a_word_that_one_constructor_does_not_know_is_told_to_the_one_that_has_its_place(finding):
    planner, first, next_one = FakePlanner(), FakeConstructor(), FakeConstructor()
    heard = Future()
    first.answer = SimpleNamespace(future=lambda: heard)
    finding(planner)
    link = PlannerLink("omniload-a", 0, 0, lambda: None)
    link.tell_by(first)
    link.taken(3)
    link.tell()

    link.tell_by(next_one)
    heard.set_result(False)
    for _ in range(2):
        link.tell()

    assert [told[0] for told in next_one.told] == [3]
    assert planner.taken.steps == []


def test_what_a_constructor_heard_and_may_not_have_passed_on_is_told_past_it_once_it_is_lost(
    finding,
):
    planner, first, next_one = FakePlanner(), FakeConstructor(), FakeConstructor()
    finding(planner)
    link = PlannerLink("omniload-a", 0, 0, lambda: None)
    link.tell_by(first)
    link.taken(3)
    link.tell()

    link.tell_past(first)
    link.tell()
    link.tell_by(next_one)
    link.tell_past(first)  # heard late: another has its place
    link.tell()

    assert planner.taken.steps == [3]
    assert [told[0] for told in next_one.told] == [3]


def test_a_planner_that_takes_over_is_told_by_the_rank_itself_whatever_became_of_its_constructor(
    finding,
):
    first, second, constructor = FakePlanner(ActorDiedError()), FakePlanner(), FakeConstructor()
    finding(first, second)
    link = PlannerLink("omniload-a", 0, 0, lambda: None)
    link.taken(2)
    link.tell()  # the planner is lost
    link.tell_by(constructor)
    link.taken(3)

    link.look()

    assert second.taken.steps == [3]
    assert [told[0] for told in constructor.told] == [3]
