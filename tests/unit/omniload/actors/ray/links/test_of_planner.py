"""The links of the planner to source loaders and constructors: the members that they follow, and late answers."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
)

from omniload.actors.heartbeat_board import Activity
from omniload.actors.ray.links import of_planner as module
from omniload.actors.ray.links.of_constructor import Loaders, Serving
from omniload.actors.ray.links.of_planner import READS, RayConstructorLink, RayLoaderLinks
from omniload.actors.roles.build_order import BuildOrder
from omniload.actors.roles.constructor import ConstructorShell
from omniload.base.errors import DefectError, IntegrityError
from omniload.machine.data_constructor import DataConstructor
from omniload.machine.loader_groups import MOST_READS
from omniload.machine.messages import ReadAhead, SamplesReported, StepsTaken
from omniload.plan.world import RanksServed, WorldRank
from tests.support.plane.builders import a_plan, a_table

LIMIT_S = 60.0
LOSSES = [
    ActorDiedError(),
    NodeDiedError("its host is gone"),
    OutOfMemoryError("Ray ended it, as its host's memory ran out"),
]
PASSING = [ActorUnavailableError("its host was cut off", None), ObjectLostError("0" * 56, None, "")]
"""Errors after which a call is lost, and the actor is not replaced."""


class FakeLoader:
    """A loader that answers when the test says so."""

    def __init__(self):
        self.answers, self.groups, self.asked = [], [], []
        self.read_ahead = self.read_several = self

    def options(self, *, concurrency_group):
        self.groups.append(concurrency_group)
        return self

    def remote(self, asked):
        self.answers.append(Future())
        self.asked.append(asked)
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


def test_reads_are_asked_for_in_threads_beside_those_that_answer_constructors():
    loader = FakeLoader()
    links = RayLoaderLinks(LOADERS)
    links.follow(serving(loader, "loader-1", 5, 1))

    links.of(1).read_ahead(READ)

    assert loader.groups == [READS]


def of_many(count, spare=()):
    """Ways to a loader of many sources, of each of which a read was asked for; without some a plan can be made."""
    loader = FakeLoader()
    told = Loaders(
        of=dict.fromkeys(range(count), loader),
        names={loader: "loader-0"},
        roles=dict.fromkeys(range(count), "loader-0"),
        turn=4,
        limit_s=1.0,
    )
    links = RayLoaderLinks(told)
    asked = [ReadAhead(source=s, start=0, stop=9, is_lacked=s not in spare) for s in range(count)]
    return links, loader, [links.of(each.source).read_ahead(each) for each in asked]


def reports_of(commands):
    return [SamplesReported(source=each.source, table=a_table([1])) for each in commands]


def test_reads_of_many_sources_are_asked_for_in_few_calls_and_each_is_answered():
    _, loader, reads = of_many(500)
    assert len(loader.asked) == MOST_READS

    answer_all(loader)

    assert [read.result(0).source for read in reads] == list(range(500))
    sizes = [1 if isinstance(asked, ReadAhead) else len(asked) for asked in loader.asked]
    assert sizes[:MOST_READS] == [1] * MOST_READS
    assert max(sizes) == 16
    assert len(sizes) < 100


def test_of_several_reads_one_that_fails_fails_alone_and_those_without_an_answer_are_put_again():
    _, loader, reads = of_many(100)
    loader.answers[0].set_result(reports_of([loader.asked[0]])[0])
    several = loader.asked[MOST_READS]
    bad = IntegrityError("row group 1: cannot be decoded")

    loader.answers[MOST_READS].set_result([bad, *reports_of(several[1:3])])

    failed, *answered = (reads[each.source] for each in several[:3])
    assert failed.exception(0) is bad
    assert [read.result(0).source for read in answered] == [each.source for each in several[1:3]]
    assert loader.asked[-1][0] == several[3]  # before those that wait


@pytest.mark.parametrize("loss", LOSSES)
def test_several_reads_of_a_loader_that_is_lost_are_put_again_until_another_has_its_place(
    monkeypatch, loss
):
    later = []
    monkeypatch.setattr(module, "_later", later.append)
    links, loader, reads = of_many(100)
    loader.answers[0].set_result(reports_of([loader.asked[0]])[0])
    several = loader.asked[MOST_READS]

    loader.answers[MOST_READS].set_exception(loss)
    for number in range(1, MOST_READS):
        loader.answers[number].set_exception(loss)
    later[0]()
    assert not any(reads[each.source].done() for each in several)
    links.follow(serving(SECOND, "loader-0+1", 5, *range(100)))
    for answer in loader.answers[MOST_READS + 1 :]:
        if not answer.done():
            answer.set_exception(loss)
    for ask in later[1:]:
        ask()

    assert all(read.cancelled() for read in reads[1:])


def answer_all(loader):
    for number, answer in enumerate(loader.answers):  # more of them come meanwhile
        if answer.done():
            continue
        asked = loader.asked[number]
        is_one = isinstance(asked, ReadAhead)
        answer.set_result(reports_of([asked])[0] if is_one else reports_of(asked))


def test_a_read_that_no_plan_waits_for_is_asked_for_alone_as_another_may_take_long():
    _, loader, reads = of_many(500, spare=range(100, 500))

    answer_all(loader)

    several = [asked for asked in loader.asked if not isinstance(asked, ReadAhead)]
    assert several
    assert all(each.source < 100 for asked in several for each in asked)
    assert all(read.done() for read in reads)


@pytest.mark.parametrize("loss", [None, *PASSING])
def test_sources_that_are_moved_to_a_loader_leave_its_own_reads_as_they_are(monkeypatch, loss):
    later = []
    monkeypatch.setattr(module, "_later", later.append)
    links, loader, reads = of_many(100)
    if loss is not None:
        loader.answers[0].set_exception(loss)

    links.follow(serving(loader, "loader-0", 5, 100))
    for ask in later:
        ask()
    answer_all(loader)

    assert [read.result(0).source for read in reads] == list(range(100))


def test_a_source_that_waits_and_is_moved_meanwhile_is_not_asked_for():
    links, loader, reads = of_many(100)
    links.follow(serving(SECOND, "loader-1", 5, 99))

    answer_all(loader)

    assert reads[99].cancelled()
    assert all(read.done() for read in reads)


def test_a_source_that_is_added_takes_the_way_of_another():
    links = RayLoaderLinks(LOADERS)

    links.add(2, beside=1)

    assert links.of(2) is links.of(1)


class FakeConstructor:
    """A constructor that answers the planner's questions about its ranks when the test says so."""

    def __init__(self):
        self.heard, self.answers, self.told = [], [], self

    def remote(self, heard, *_):
        self.heard.append(heard)
        self.answers.append(Future())
        return self

    def future(self):
        return self.answers[-1]


WORD, SERVED = StepsTaken(steps={(0, 0): 3}), RanksServed(dp_ranks=(0,))


def test_a_constructor_is_asked_once_at_a_time_for_the_words_that_were_not_heard():
    actor = FakeConstructor()
    link = RayConstructorLink(actor, (0,), 0)
    told = link.told(SERVED)

    assert link.told(SERVED) is None
    actor.answers[0].set_result((5, WORD))
    assert told.result(0) is WORD
    assert link.told(SERVED) is not None

    assert actor.heard == [0, 5]


class MetConstructor(FakeConstructor):
    """A constructor on whose link two threads meet, which may both check at once whether it was asked."""

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
        told = list(threads.map(lambda _: link.told(SERVED), range(2)))

    assert told.count(None) == 1
    assert actor.heard == [0]


def test_a_constructor_that_has_the_place_of_another_is_asked_for_all_of_its_words():
    first, second = FakeConstructor(), FakeConstructor()
    link = RayConstructorLink(first, (0,), 0)
    told = [link.told(SERVED)]
    first.answers[0].set_result((5, WORD))
    told.append(link.told(SERVED))

    link.lead_to(second, 1)
    told.append(link.told(SERVED))
    first.answers[1].set_result((6, WORD))  # it lives on for a moment, and its report is true

    assert link.told(SERVED) is None
    assert (first.heard, second.heard) == ([0, 5], [0])
    assert told[1].result(0) is WORD
    second.answers[0].set_result((2, WORD))
    link.told(SERVED)
    assert second.heard == [0, 2]


@pytest.mark.parametrize("loss", LOSSES)
def test_a_constructor_that_is_lost_is_asked_again_until_another_has_its_place(monkeypatch, loss):
    later = []
    monkeypatch.setattr(module, "_later", later.append)
    first, second = FakeConstructor(), FakeConstructor()
    link = RayConstructorLink(first, (0,), 0)
    told = link.told(SERVED)

    for answer in (0, 1):
        first.answers[answer].set_exception(loss)
        assert link.told(SERVED) is None  # because one that was cut off may return
        later.pop()()
    first.answers[2].set_exception(loss)
    link.lead_to(second, 1)
    later.pop()()

    assert told.cancelled()
    assert (first.heard, later) == ([0, 0, 0], [])
    assert link.told(SERVED) is not None


@pytest.mark.parametrize("loss", LOSSES)
def test_what_a_lost_constructor_was_to_build_and_a_lost_loader_to_read_is_nobodys_failure(loss):
    constructor, loader = FakeConstructor(), FakeLoader()
    constructor.carry_out = SimpleNamespace(remote=lambda _: constructor.remote("build"))
    links = RayLoaderLinks(LOADERS)
    links.follow(serving(loader, "loader-0+1", 5, 0, 1))
    link = RayConstructorLink(constructor, (0,), 0)
    link.told(SERVED)  # it is asked already, so that the next call only has it build
    built = link.build((), RanksServed(dp_ranks=(0,)), 0)
    read = links.of(1).read_ahead(READ)

    links.follow(serving(SECOND, "loader-0+2", 6, 0, 1))
    constructor.answers[1].set_exception(loss)
    loader.answers[0].set_exception(loss)

    assert built.cancelled()  # each is asked of the next one
    assert read.cancelled()


def test_a_constructor_that_fails_to_say_what_ranks_told_it_ends_the_planning():
    actor = FakeConstructor()
    told = RayConstructorLink(actor, (0,), 0).told(SERVED)

    actor.answers[0].set_exception(ValueError("its own"))

    assert isinstance(told.exception(0), DefectError)


class BuildingConstructor(FakeConstructor):
    """A constructor that records its build orders, and answers when the test says so."""

    def __init__(self):
        super().__init__()
        self.carry_out = SimpleNamespace(
            remote=lambda packed: self.remote(BuildOrder.unpacked(packed))
        )


def test_a_constructor_is_asked_in_the_call_that_carries_plans_unless_it_is_asked_already():
    actor, served = BuildingConstructor(), RanksServed(dp_ranks=(0,))
    link = RayConstructorLink(actor, (0,), 0)

    answers = [link.build((), served, 3), link.build((), served, 4)]
    assert link.told(SERVED) is None
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
    assert link.told(SERVED) is not None


def test_a_constructor_that_could_not_build_may_be_asked_again():
    actor = BuildingConstructor()
    link = RayConstructorLink(actor, (0,), 0)
    asked = link.build((), RanksServed(dp_ranks=(0,)), 0)

    actor.answers[0].set_exception(ValueError("its own"))

    assert isinstance(asked.exception(0), DefectError)
    assert link.told(SERVED) is not None


@pytest.mark.parametrize("loss", PASSING)
@pytest.mark.parametrize("is_asked", [True, False], ids=["asked", "only told"])
def test_plans_that_a_constructor_which_lives_may_not_have_heard_of_are_sent_again(
    monkeypatch, loss, is_asked
):
    later = []
    monkeypatch.setattr(module, "_later", later.append)
    actor = BuildingConstructor()
    link = RayConstructorLink(actor, (0,), 0)
    if not is_asked:
        link.told(SERVED)
    built = link.build((), RanksServed(dp_ranks=(0,)), 7)

    actor.answers[-1].set_exception(loss)
    assert not built.done()
    later.pop()()
    actor.answers[-1].set_result((2, WORD) if is_asked else 1)

    orders = [each for each in actor.heard if isinstance(each, BuildOrder)]
    assert [each.released_to for each in orders] == [7, 7]
    assert built.result(0) is (WORD if is_asked else 1)
    assert later == []


@pytest.mark.parametrize("loss", PASSING)
def test_plans_that_were_lost_are_not_sent_again_once_another_constructor_has_the_place(
    monkeypatch, loss
):
    later = []
    monkeypatch.setattr(module, "_later", later.append)
    first, second = BuildingConstructor(), BuildingConstructor()
    link = RayConstructorLink(first, (0,), 0)
    built = link.build((), RanksServed(dp_ranks=(0,)), 7)

    first.answers[-1].set_exception(loss)
    link.lead_to(second, 1)
    later.pop()()

    assert built.cancelled()
    assert (len(first.heard), second.heard) == (1, [])


class EndingConstructor(FakeConstructor):
    """A constructor that hears where the data end."""

    def __init__(self):
        super().__init__()
        self.end = SimpleNamespace(remote=self.remote)


@pytest.mark.parametrize(("loss", "times"), [*((loss, 3) for loss in PASSING), (LOSSES[0], 1)])
def test_a_constructor_hears_where_the_data_end_though_word_of_it_was_lost(
    monkeypatch, loss, times
):
    later = []
    monkeypatch.setattr(module, "_later", later.append)
    actor = EndingConstructor()
    RayConstructorLink(actor, (0,), 0).end(40)

    for answer in range(2):
        if answer < len(actor.answers):
            actor.answers[answer].set_exception(loss)
        for ask in (later.pop() for _ in range(len(later))):
            ask()

    assert actor.heard == [40] * times


class FailingConstructor(ConstructorShell):
    """A constructor whose reads fail on command, after the answer to the planner's build order."""

    def __init__(self):
        self.failing = Future()
        machine = DataConstructor(dp_ranks=[0], names=["web"], row_length=8)
        super().__init__(machine, lambda _: self.failing.result(LIMIT_S), Activity("constructor-0"))


class LossyActor:
    """An actor's handle over a constructor; the given errors replace the answers of its first calls."""

    def __init__(self, shell, losses, pool):
        self.shell, self.losses, self.pool = shell, losses, pool
        self.told = SimpleNamespace(remote=partial(self.call, shell.told))
        self.carry_out = SimpleNamespace(remote=partial(self.call, self.built_beside))

    def built_beside(self, packed):
        order = BuildOrder.unpacked(packed)
        building = self.pool.submit(self.shell.build, order.plans, order.served)
        return self.shell.told_beside(building, order)

    def call(self, method, *asked):
        return SimpleNamespace(future=lambda: self.pool.submit(self.answer, method, *asked))

    def answer(self, method, *asked):
        try:
            return method(*asked)
        except IntegrityError:
            if not self.losses:
                raise
            raise self.losses.pop() from None


@pytest.mark.parametrize("losses", [[], PASSING[:1], 2 * PASSING], ids=["none", "one", "several"])
def test_a_planner_hears_that_a_step_cannot_be_built_however_often_the_answer_is_lost(
    monkeypatch, losses
):
    monkeypatch.setattr(module, "_later", lambda ask: ask())
    shell = FailingConstructor()
    with ThreadPoolExecutor(4) as pool:
        link = RayConstructorLink(LossyActor(shell, list(losses), pool), (0,), 0)
        with_plans = link.build([a_plan([[[0, 1, 0, 0, 5, 5]]], step=3)], SERVED, 0)
        assert shell.taken(2, WorldRank(0))
        assert with_plans.result(LIMIT_S).steps == {(0, 0): 2}

        told = link.told(SERVED)
        shell.failing.set_exception(IntegrityError("bad record"))

        assert isinstance(told.exception(LIMIT_S), IntegrityError)
