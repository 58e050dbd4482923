"""Windows of batches are fetched, and released, in a thread next to the trainer's."""

import threading
import weakref
from concurrent.futures import wait
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from ray.exceptions import ActorDiedError

from omniload.actors.gate import Gate
from omniload.actors.ray.rank import ahead as module
from omniload.actors.ray.rank.ahead import BatchesAhead
from omniload.base.errors import UnavailableError
from omniload.machine.plans.fetch_pace import FetchPace
from omniload.plan.world import WorldRank
from tests.support.plane.given.fake_actors import value_of

RANK = WorldRank(0)


def unlost(_):
    raise AssertionError("no constructor is lost")


class Batch:
    """A batch that records the thread in which its last reference is released."""

    def __init__(self, step, left):
        self.step = step
        weakref.finalize(self, lambda: left.append((step, threading.current_thread())))


class Constructor:
    """Has windows of ``size`` batches up to a step, once it may answer."""

    def __init__(self, size, end=10**6):
        self.size, self.end, self.left = size, end, []
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.take_several = self
        self.lend_several, self.given, self.edition = Lending(self), [], (0, 1)

    def remote(self, step, most, *_):
        assert self.may_answer.wait(60.0)
        count = max(0, min(self.size, most, self.end - step))
        return tuple(Batch(step + n, self.left) for n in range(count))


class Lending:
    """Lends steps under its edition as a constructor does; records how many bytes each answer may have."""

    def __init__(self, constructor):
        self.constructor = constructor

    def remote(self, step, most, *rank_and_given):
        self.constructor.given.append((step, rank_and_given[-1]))
        return self.constructor.remote(step, most), self.constructor.edition


def quick(most=4):
    """Return the pace of a rank whose steps take no time: it asks for as many as it may."""
    pace = FetchPace(most)
    pace.take(0.0)
    pace.take(0.0)
    return pace


class Slow(FetchPace):
    """The pace of a rank whose steps are long as soon as two are known, and that asks for several at once."""

    at_once = 4

    def __init__(self):
        super().__init__(most=4)
        self.taken = 0

    def take(self, now_s):
        self.taken += 1

    @property
    def is_slow(self):
        return self.taken > 2


@pytest.fixture
def open_to(monkeypatch):
    """Return the fetching ahead of a rank, given its constructor."""
    monkeypatch.setattr(module, "wait_for_ref", lambda _answer, _limit_s, check: check() or True)
    monkeypatch.setattr(module, "value_of", lambda answer: answer)
    # The number of batches in a request follows from the pace: here no step takes any time, on whatever machine.
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 0.0))
    opened = []

    def open_ahead(constructor, pace=None):
        pace = pace or quick()
        opened.append(BatchesAhead(Gate(), lambda: None, pace=pace, limit_s=60.0))
        opened[-1].lead_to(constructor, RANK, unlost)
        return opened[-1]

    yield open_ahead
    assert all(each.close(10.0) for each in opened)


def steps_of(ahead, count):
    """Take batches as a rank that trains, each released before the next."""
    steps, batch = [], None
    while len(steps) < count:
        if ahead.is_empty:
            wait([ahead.ask(len(steps))], 10.0)
            assert ahead.take_in()
        batch = ahead.next()
        if batch is None:
            break
        steps.append(batch.step)
    return steps


@pytest.mark.parametrize("taken", [1, 2], ids=["with one at hand", "with the next asked for"])
def test_a_batch_that_did_not_reach_the_trainer_is_asked_for_again(open_to, taken):
    ahead = open_to(Constructor(2))
    assert steps_of(ahead, taken) == list(range(taken))

    assert not ahead.begins_at(taken - 1)
    wait([ahead.ask(taken - 1)], 10.0)
    assert ahead.take_in()

    assert ahead.begins_at(taken - 1)
    assert [ahead.next().step, ahead.next().step] == [taken - 1, taken]


@pytest.mark.parametrize("size", [1, 4])
def test_batches_come_in_the_order_of_steps_and_end_with_the_data(open_to, size):
    assert steps_of(open_to(Constructor(size, end=10)), 99) == list(range(10))


def test_the_last_batch_of_a_window_is_left_by_the_thread_that_asks(open_to):
    constructor = Constructor(4)
    ahead = open_to(constructor)

    for step in (0, 4, 8):
        wait([ahead.ask(step)], 10.0)
        assert ahead.take_in()
        constructor.may_answer.clear()
        held = [ahead.next() for _ in range(4)]
        # It answers as this thread is done with asking; and as that has come, the other is done with these.
        constructor.may_answer.set()
        wait([ahead.coming], 10.0)
        del held

    threads = dict(constructor.left)
    assert [threads[step] is threading.current_thread() for step in (0, 1, 2)] == [True] * 3
    assert threads[3] is not threading.current_thread()


@pytest.mark.parametrize(("size", "asked"), [(1, [True]), (3, [False, True, True])])
def test_the_window_behind_is_asked_for_with_the_second_batch_or_with_the_only_one(
    open_to, size, asked
):
    ahead = open_to(Constructor(size))
    wait([ahead.ask(0)], 10.0)
    assert ahead.take_in()

    found = [(ahead.next().step, ahead.coming is not None) for _ in range(size)]

    assert found == list(enumerate(asked))
    assert [batch.step for batch in ahead.ask(size).result(60.0).batches] == list(
        range(size, 2 * size)
    )


def test_of_large_steps_none_is_kept_for_the_thread_that_asks(open_to):
    constructor = Constructor(1)

    assert steps_of(open_to(constructor), 6) == list(range(6))

    # The last one may be released while the requesting thread still has the answer in which it came.
    left = constructor.left[:5]
    assert [step for step, thread in left] == [0, 1, 2, 3, 4]
    assert {thread for _, thread in left} == {threading.current_thread()}


def test_what_has_not_come_and_what_failed_is_not_taken_in(open_to):
    constructor = Constructor(4)
    constructor.may_answer.clear()
    ahead = open_to(constructor)
    assert not ahead.take_in(), "nothing is asked for"
    asked = ahead.ask(0)

    assert not ahead.take_in()
    ahead.lead_to(constructor, (0, 0, 1), unlost)
    constructor.may_answer.set()
    with pytest.raises(UnavailableError, match="the ranks of before"):
        asked.result(60.0)

    assert ahead.coming is None
    assert steps_of(ahead, 4) == [0, 1, 2, 3]


def test_batches_at_hand_are_left_where_the_rank_is_another_one(open_to):
    ahead = open_to(Constructor(4))
    assert steps_of(ahead, 2) == [0, 1]

    ahead.lead_to(Constructor(2), (1, 0, 1), unlost)

    assert ahead.is_empty
    assert ahead.next() is None
    wait([ahead.ask(2)], 10.0)
    assert ahead.take_in()
    assert [ahead.next().step, ahead.next().step, ahead.next()] == [2, 3, None]


def test_a_constructor_that_is_lost_is_told_of_while_the_rank_trains_on_what_it_has(
    open_to, monkeypatch
):
    monkeypatch.setattr(module, "value_of", value_of)
    first, lost = Constructor(2), []
    ahead = open_to(first)
    ahead.lead_to(first, RANK, lost.append)
    wait([ahead.ask(0)], 10.0)
    assert ahead.take_in()
    monkeypatch.setattr(Constructor, "remote", lambda *_: ActorDiedError())

    assert [ahead.next().step, ahead.next().step] == [0, 1]

    assert isinstance(ahead.coming.exception(10.0), ActorDiedError)
    assert lost == [first]


def test_a_rank_whose_steps_are_long_is_lent_what_it_fetches_ahead(open_to):
    constructor = Constructor(1)
    ahead = open_to(constructor, Slow())

    found = []
    for step in range(5):
        wait([ahead.ask(step)], 10.0)
        assert ahead.take_in()
        found.append(ahead.is_lent)
        assert ahead.next().step == step

    assert found == [False, False, False, True, True], "by two steps a pace is known"
    wait([ahead.coming], 10.0)
    assert constructor.given == [(3, 0), (4, 0), (5, 0)]


def test_a_rank_that_begins_asks_for_one_batch_and_for_more_once_its_pace_is_known(open_to):
    ahead = open_to(Constructor(4), FetchPace(4))

    sizes = []
    for step in (0, 1, 2):
        wait([ahead.ask(step)], 10.0)
        sizes.append(len(ahead.coming.result(60.0).batches))
        assert ahead.take_in()
        assert ahead.next().step == step

    assert sizes == [1, 1, 4]


def test_a_short_step_has_the_batches_behind_it_given(open_to):
    constructor = Constructor(2)

    assert steps_of(open_to(constructor), 6) == list(range(6))

    assert constructor.given == []


def test_what_was_taken_back_is_left_and_asked_for_anew_with_one_that_is_given(open_to):
    constructor = Constructor(3)
    ahead = open_to(constructor, Slow())
    assert steps_of(ahead, 7) == list(range(7))
    assert ahead.is_lent

    ahead.drop()

    assert (ahead.is_empty, ahead.is_lent, ahead.coming) == (True, False, None)
    wait([ahead.ask(7)], 10.0)
    assert ahead.take_in()
    assert (ahead.is_lent, ahead.next().step, ahead.is_lent) == (False, 7, True)
    assert constructor.given[-1] == (7, 1)


def test_a_batch_that_is_looked_at_stays_lent_and_the_one_behind_it_is_asked_for(open_to):
    ahead = open_to(Constructor(1), Slow())
    assert steps_of(ahead, 3) == [0, 1, 2]
    wait([ahead.coming], 10.0)
    assert ahead.take_in()

    looked_at = ahead.peek()

    assert ahead.is_lent
    assert ahead.coming.result(60.0).batches[0].step == 4
    assert ahead.next() is looked_at
    assert ahead.peek() is None
