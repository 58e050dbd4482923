"""The ways to source loaders, of the planner and of a constructor: whom they follow, and what comes too late."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from ray.exceptions import ActorDiedError, OutOfMemoryError

from omniload.actors.ray import links as module
from omniload.actors.ray.links import (
    LoaderHolders,
    Loaders,
    RayConstructorLink,
    RayLoaderLinks,
    Serving,
)
from omniload.actors.roles.links import BuildOrder
from omniload.base.errors import DefectError
from omniload.machine.messages import ReadAhead, StepsTaken
from omniload.plan.world import RanksServed


class FakeLoader:
    """A loader whose answers come when the test says so."""

    def __init__(self):
        self.answers = []
        self.read_ahead = self

    def remote(self, command):
        self.answers.append(Future())
        return self

    def future(self):
        return self.answers[-1]


FIRST, SECOND, THIRD = FakeLoader(), FakeLoader(), FakeLoader()
LOADERS = Loaders(
    of={0: FIRST, 1: FIRST},
    names={FIRST: "loader-0"},
    roles={0: "loader-0", 1: "loader-0"},
    turn=4,
    limit_s=1.0,
)
READ = ReadAhead(source=1, start=0, stop=9)


def serving(actor, name, turn, *sources):
    role = name.partition("+")[0]
    return Serving(sources=sources, actor=actor, name=name, role=role, turn=turn)


def test_a_source_that_is_moved_takes_another_way_and_the_others_stay():
    links = RayLoaderLinks(LOADERS)

    links.follow(serving(SECOND, "loader-1", 5, 1))

    assert [links.of(s).name for s in (0, 1)] == ["loader-0", "loader-1"]


def test_a_loader_that_is_replaced_is_followed_on_the_same_way():
    links = RayLoaderLinks(LOADERS)
    way = links.of(0)

    links.follow(serving(SECOND, "loader-0+1", 5, 0, 1))

    assert links.of(0) is way
    assert way.name == "loader-0+1"


@pytest.mark.parametrize("turn", [3, 4])
def test_what_was_said_earlier_and_comes_later_changes_nothing(turn):
    links = RayLoaderLinks(LOADERS)

    links.follow(serving(SECOND, "loader-0+1", turn, 0, 1))
    links.follow(serving(THIRD, "loader-1", turn, 0))

    assert {links.of(s).name for s in (0, 1)} == {"loader-0"}


def test_an_error_of_a_loader_whose_source_was_moved_is_nobodys():
    links, loader = RayLoaderLinks(LOADERS), FakeLoader()
    links.follow(serving(loader, "loader-0+1", 5, 0, 1))
    reads = [links.of(1).read_ahead(READ), links.of(1).read_ahead(READ)]
    loader.answers[0].set_exception(ValueError("its own"))
    links.follow(serving(SECOND, "loader-1", 6, 1))
    loader.answers[1].set_exception(ValueError("dropped meanwhile"))

    assert isinstance(reads[0].exception(), DefectError)
    assert reads[1].cancelled()


def test_a_source_that_is_added_takes_the_way_of_another():
    links = RayLoaderLinks(LOADERS)

    links.add(2, beside=1)

    assert links.of(2) is links.of(1)


def test_a_constructor_says_which_hand_over_it_knows_of_and_hears_no_older_news():
    holders = LoaderHolders(LOADERS)

    holders.replace(serving(SECOND, "loader-1", 7, 1))
    holders.replace(serving(THIRD, "loader-0+3", 6, 0, 1))

    assert holders.turns((0, 1)) == (6, 7)
    assert holders.names() == ("loader-0+3", "loader-1")


class FakeConstructor:
    """A constructor that is asked what ranks tell it, and answers when the test says so."""

    def __init__(self):
        self.heard, self.answers, self.told = [], [], self

    def remote(self, heard):
        self.heard.append(heard)
        self.answers.append(Future())
        return self

    def future(self):
        return self.answers[-1]


WORD = StepsTaken(steps={(0, 0): 3})


def test_a_constructor_is_asked_once_at_a_time_for_the_words_that_were_not_heard():
    actor = FakeConstructor()
    link = RayConstructorLink(actor, (0,), 0)
    told = link.told()

    assert link.told() is None
    actor.answers[0].set_result((5, WORD))
    assert told.result(0) is WORD
    assert link.told() is not None

    assert actor.heard == [0, 5]


class MetConstructor(FakeConstructor):
    """A constructor on whose way two threads meet, where both may look at once whether it is asked."""

    def __init__(self):
        super().__init__()
        self.meeting = threading.Barrier(2)

    def __eq__(self, other):
        if other is None:
            with suppress(threading.BrokenBarrierError):
                self.meeting.wait(0.5)
        return self is other

    __hash__ = FakeConstructor.__hash__


def test_of_two_threads_that_would_ask_a_constructor_at_once_one_does():
    """Each answer is followed by another question: asked twice once, it would be asked twice for good."""
    actor = MetConstructor()
    link = RayConstructorLink(actor, (0,), 0)

    with ThreadPoolExecutor(2) as threads:
        told = list(threads.map(lambda _: link.told(), range(2)))

    assert told.count(None) == 1
    assert actor.heard == [0]


def test_a_constructor_that_has_the_place_of_another_is_asked_for_all_of_its_words():
    first, second = FakeConstructor(), FakeConstructor()
    link = RayConstructorLink(first, (0,), 0)
    told = [link.told()]
    first.answers[0].set_result((5, WORD))
    told.append(link.told())

    link.lead_to(second, 1)
    told.append(link.told())
    first.answers[1].set_result((6, WORD))  # it lives on for a moment, and what it says is true

    assert link.told() is None
    assert (first.heard, second.heard) == ([0, 5], [0])
    assert told[1].result(0) is WORD
    second.answers[0].set_result((2, WORD))
    link.told()
    assert second.heard == [0, 2]


LOSSES = [ActorDiedError(), OutOfMemoryError("Ray ended it, as its host's memory ran out")]


@pytest.mark.parametrize("loss", LOSSES)
def test_a_constructor_that_is_lost_is_asked_again_until_another_has_its_place(monkeypatch, loss):
    later = []
    monkeypatch.setattr(module, "_later", later.append)
    first, second = FakeConstructor(), FakeConstructor()
    link = RayConstructorLink(first, (0,), 0)
    told = link.told()

    for answer in (0, 1):
        first.answers[answer].set_exception(loss)
        assert link.told() is None  # as one that was cut off may be there again
        later.pop()()
    first.answers[2].set_exception(loss)
    link.lead_to(second, 1)
    later.pop()()

    assert told.cancelled()
    assert (first.heard, later) == ([0, 0, 0], [])
    assert link.told() is not None


@pytest.mark.parametrize("loss", LOSSES)
def test_what_a_lost_constructor_was_to_build_and_a_lost_loader_to_read_is_nobodys_failure(loss):
    constructor, loader = FakeConstructor(), FakeLoader()
    constructor.carry_out = SimpleNamespace(remote=lambda _: constructor.remote("build"))
    links = RayLoaderLinks(LOADERS)
    links.follow(serving(loader, "loader-0+1", 5, 0, 1))
    link = RayConstructorLink(constructor, (0,), 0)
    link.told()  # it is asked already, so that the next call only has it build
    built = link.build((), RanksServed(dp_ranks=(0,)), 0)
    read = links.of(1).read_ahead(READ)

    links.follow(serving(SECOND, "loader-0+2", 6, 0, 1))
    constructor.answers[1].set_exception(loss)
    loader.answers[0].set_exception(loss)

    assert built.cancelled()  # each is asked of the next one
    assert read.cancelled()


def test_a_constructor_that_fails_to_say_what_ranks_told_it_ends_the_planning():
    actor = FakeConstructor()
    told = RayConstructorLink(actor, (0,), 0).told()

    actor.answers[0].set_exception(ValueError("its own"))

    assert isinstance(told.exception(0), DefectError)


class BuildingConstructor(FakeConstructor):
    """A constructor that notes what it is to build, and answers when the test says so."""

    def __init__(self):
        super().__init__()
        self.carry_out = SimpleNamespace(
            remote=lambda packed: self.remote(BuildOrder.unpacked(packed))
        )


def test_a_constructor_is_asked_in_the_call_that_carries_plans_unless_it_is_asked_already():
    actor, served = BuildingConstructor(), RanksServed(dp_ranks=(0,))
    link = RayConstructorLink(actor, (0,), 0)

    answers = [link.build((), served, 3), link.build((), served, 4)]
    assert link.told() is None
    actor.answers[0].set_result((5, WORD))
    actor.answers[1].set_result(0)
    answers.append(link.build((), served, 6))

    assert [(each.released_to, each.heard) for each in actor.heard] == [(3, 0), (4, None), (6, 5)]
    assert [answer.result(0) for answer in answers[:2]] == [WORD, 0]
    assert not answers[2].done()


@pytest.mark.parametrize("loss", LOSSES)
def test_what_a_lost_constructor_was_asked_with_plans_it_is_asked_again(monkeypatch, loss):
    later = []
    monkeypatch.setattr(module, "_later", later.append)
    actor = BuildingConstructor()
    link = RayConstructorLink(actor, (0,), 0)
    asked = link.build((), RanksServed(dp_ranks=(0,)), 0)

    actor.answers[0].set_exception(loss)
    later.pop()()
    actor.answers[1].set_result((2, WORD))

    assert actor.heard[1] == 0
    assert asked.result(0) is WORD
    assert link.told() is not None


def test_a_constructor_that_could_not_build_may_be_asked_again():
    actor = BuildingConstructor()
    link = RayConstructorLink(actor, (0,), 0)
    asked = link.build((), RanksServed(dp_ranks=(0,)), 0)

    actor.answers[0].set_exception(ValueError("its own"))

    assert isinstance(asked.exception(0), DefectError)
    assert link.told() is not None
