"""A rank of a plane of actors stays unchanged if another number is refused or no constructor for it is found."""

import os
import threading
import time
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import pytest

pytest.importorskip("ray")

from ray.exceptions import ActorDiedError, ActorUnavailableError, ObjectLostError

from omniload.actors.address import HostPlace, NodeTerms, PlaneAddress
from omniload.actors.rank_locks import lock_of
from omniload.actors.ray import finding
from omniload.actors.ray.head_watch import HeadWatch
from omniload.actors.ray.hosts.rank_claims import claim_rank
from omniload.actors.ray.rank import ahead
from omniload.actors.ray.rank import handle as module
from omniload.actors.ray.rank.handle import RayHandle
from omniload.base.concurrency.threads import DaemonPool
from omniload.base.errors import StateError, UnavailableError
from omniload.base.linux.network import host_id
from omniload.machine.messages import ResizeAsked
from omniload.machine.plans import fetch_pace
from omniload.machine.progress import rank_name
from omniload.plan.place_tree import ClientPlaceTree
from omniload.plan.world import World
from tests.support.plane.given.fake_actors import value_of

LATE = object()
"""An answer that does not come."""


class FakeConstructor:
    """A constructor that has ``left`` windows of two steps, and then none.

    ``asked`` has the constructors of the last requests, and their numbers; ``threads`` has the calling threads.
    """

    asked = ()
    left = 0
    threads = ()
    confirms = ()
    words: ClassVar[list[object]] = []

    def __init__(self, name):
        self.name, self.take_several = name, self
        self.lend_several = SimpleNamespace(remote=lambda *asked: (self.remote(*asked[:3]), (0, 1)))
        self.confirm = SimpleNamespace(remote=self.confirmed)

    def confirmed(self, step, edition):
        """Answer whether a lent step is valid, by the next word of ``words``."""
        FakeConstructor.confirms += ((self.name, step, edition),)
        return FakeConstructor.words.pop(0)

    def remote(self, step, _steps, rank):
        FakeConstructor.asked = self.name, step, rank.dp, rank.generation
        FakeConstructor.threads += (threading.current_thread(),)
        answer = tuple(SimpleNamespace(step=step + n) for n in range(2 * (self.left > 0)))
        FakeConstructor.left -= 1
        return answer


class FakeLink:
    """A link to a planner that has whatever ranks are asked for."""

    first_step = 0
    told = ()
    told_by = ""
    claimed = ()
    forgotten = ""
    order = ()

    def __init__(self, namespace, dp_rank, cp_rank, check):
        assert namespace == "n", "of the plane, whatever else this process is part of"
        FakeLink.checks = staticmethod(check)
        self.rank, self.world = (dp_rank, cp_rank, 0), World(tree=ClientPlaceTree.of(dp=2))

    def taken(self, step):
        FakeLink.told = step, *self.rank

    def tell(self):
        FakeLink.order += ("tell",)

    def tell_by(self, constructor):
        FakeLink.told_by = constructor.name

    def tell_past(self, constructor):
        raise AssertionError("no constructor is lost")

    def end_watch(self):
        FakeLink.order += ("end_watch",)

    def resize(self, asked, *_):
        FakeLink.order += ("resize",)
        self.world = self.world.followed_by(
            dp=asked.dp, step=asked.step, generation=asked.generation
        )
        return self.world

    def claim(self, name, guest):
        FakeLink.claimed += ((name, guest),)

    def forget(self, name):
        FakeLink.forgotten = name

    def become(self, dp_rank, generation, node):
        self.rank = dp_rank, 0, generation

    def watch(self, *_):
        pass

    def look(self):
        pass


class Head(HeadWatch):
    """A head that accepts connections, if a test may make none: its watch looks within seconds, at random."""

    def __init__(self, address, ranks):
        super().__init__(address, ranks, answers=lambda *_: True)


@pytest.fixture
def actors():
    """Return the names of the existing constructors."""
    return {"constructor-0", "constructor-1"}


@pytest.fixture
def address(tmp_path, monkeypatch, actors):
    def actor_named(name, _namespace):
        if name not in actors:
            raise UnavailableError(f"the data plane has no {name} any more")
        return FakeConstructor(name)

    def wait_for_ref(answer, _timeout_s, check):
        check()
        return answer is not LATE

    monkeypatch.setattr(module, "PlannerLink", FakeLink)
    monkeypatch.setattr(module, "HeadWatch", Head)
    monkeypatch.setattr(ahead, "wait_for_ref", wait_for_ref)

    for each in (ahead, module):
        monkeypatch.setattr(each, "value_of", value_of)
    monkeypatch.setattr(module, "wait_for_ref", wait_for_ref)
    monkeypatch.setattr(finding, "newest_of", lambda role, _: role)
    # It answers at once, on a machine with time for it.
    monkeypatch.setattr(finding, "_LOOK_S", 10.0)
    monkeypatch.setattr(finding, "actor_named", actor_named)
    return PlaneAddress(
        cluster="127.0.0.2:1",
        namespace="n",
        dp_ranks_of={"constructor-0": (0,), "constructor-1": (1,)},
        board=tmp_path,
        batch_timeout_s=60.0,
        host=host_id(),
    )


@pytest.fixture
def handle(address):
    handle = RayHandle(address, 1, 0, lambda: None)
    yield handle
    handle.leave(1.0)


def said_by(handle, step):
    """Return the constructor that a rank asks for a step, the rank's name there, and its name for the planner."""
    assert handle.take(step, 5.0) is None
    handle.taken(step)
    assert FakeLink.told_by == FakeConstructor.asked[0]
    return FakeConstructor.asked, FakeLink.told


def await_answer(handle, step):
    """Wait until the answer to a rank is there; two threads pass it on."""
    until_s = time.monotonic() + 60.0
    while not handle.is_ready(step):
        assert time.monotonic() < until_s, f"step {step} did not come"


def test_a_rank_that_trained_finds_its_batches_taken_in_and_calls_nobody_from_its_own_thread(
    handle, monkeypatch
):
    def look(_):
        raise AssertionError("nobody is waited for")

    monkeypatch.setattr(FakeConstructor, "left", 3)
    monkeypatch.setattr(FakeConstructor, "threads", ())
    taken = [handle.take(step, 5.0).step for step in range(2)]
    for step in (2, 4):
        # As a training rank does, whatever happens meanwhile.
        await_answer(handle, step)
        monkeypatch.setattr(FakeLink, "look", look)
        taken += [handle.take(step, 5.0).step, handle.take(step + 1, 5.0).step]
    await_answer(handle, 6)

    assert taken == list(range(6))
    assert len(FakeConstructor.threads) == 4
    assert threading.current_thread() not in FakeConstructor.threads


def test_a_step_that_is_taken_twice_is_the_same_one_as_where_a_peer_could_not_be_sent_it(
    handle, monkeypatch
):
    monkeypatch.setattr(FakeConstructor, "left", 9)

    taken = [handle.take(step, 5.0).step for step in (0, 0, 1, 1, 2)]

    assert taken == [0, 0, 1, 1, 2]


@pytest.fixture
def lending(handle, monkeypatch):
    """Return a rank whose steps are long, with steps 0 to 3, and with the next two steps lent."""
    monkeypatch.setattr(fetch_pace, "_LONG_S", 0.0)
    monkeypatch.setattr(FakeConstructor, "left", 9)
    monkeypatch.setattr(FakeConstructor, "confirms", ())
    monkeypatch.setattr(FakeConstructor, "words", [True, True, True, True])
    assert [handle.take(step, 5.0).step for step in range(4)] == [0, 1, 2, 3]
    await_answer(handle, 4)
    return handle


def test_a_batch_that_is_lent_is_confirmed_as_it_is_handed_out(lending):
    FakeConstructor.confirms = ()

    looked_at = lending.lent(4)

    assert FakeConstructor.confirms == ()
    assert lending.take(4, 5.0) is looked_at
    assert FakeConstructor.confirms == (("constructor-1", 4, (0, 1)),)


def test_a_batch_whose_plan_was_taken_back_is_asked_for_anew_and_then_given(lending):
    looked_at = lending.lent(4)
    FakeConstructor.words = [False]

    again = lending.take(4, 5.0)

    assert (again.step, FakeConstructor.words) == (4, [])
    assert again is not looked_at


def test_what_a_lost_constructor_has_lent_is_asked_of_the_one_in_its_place(
    lending, monkeypatch, actors
):
    monkeypatch.setattr(finding, "newest_of", lambda role, _: f"{role}+1")
    actors.add("constructor-1+1")
    looked_at = lending.lent(4)
    FakeConstructor.words = [ActorDiedError()]

    again = lending.take(4, 5.0)

    assert (again.step, FakeConstructor.asked[:2]) == (4, ("constructor-1+1", 4))
    assert again is not looked_at


PASSING = [ActorUnavailableError("it was cut off", None), ObjectLostError("0" * 56, None, "")]
"""Errors after which a call is lost, and the constructor is not replaced."""


@pytest.mark.parametrize("loss", PASSING)
def test_a_constructor_that_may_live_is_asked_again_for_what_it_has_lent(
    lending, monkeypatch, loss
):
    monkeypatch.setattr(module, "_ASK_AGAIN_S", 0.0)
    looked_at = lending.lent(4)
    FakeConstructor.words = [loss]

    again = lending.take(4, 5.0)

    assert (again.step, FakeConstructor.asked[:2]) == (4, ("constructor-1", 4))
    assert again is not looked_at


@pytest.mark.parametrize("loss", PASSING)
def test_a_rank_whose_batch_was_lost_on_its_way_asks_the_same_constructor_again(
    handle, monkeypatch, loss
):
    monkeypatch.setattr(module, "_ASK_AGAIN_S", 0.0)
    answers, remote = [loss, loss], FakeConstructor.remote
    monkeypatch.setattr(
        FakeConstructor, "remote", lambda *a: answers.pop() if answers else remote(*a)
    )
    monkeypatch.setattr(FakeConstructor, "left", 1)

    assert handle.take(0, 5.0).step == 0

    assert answers == []
    assert FakeConstructor.asked[0] == "constructor-1"


def test_a_constructor_that_does_not_say_whether_a_batch_stands_is_waited_for_with_a_limit(lending):
    FakeConstructor.words = [LATE, True]

    with pytest.raises(UnavailableError, match="waited 0 s for the batch of step 4"):
        lending.take(4, 0.01)

    assert lending.take(4, 5.0).step == 4


def test_each_batch_of_a_window_that_is_lent_is_told_as_it_is_taken(lending, monkeypatch):
    monkeypatch.setattr(FakeLink, "told", ())
    lending.take(4, 5.0)

    lending.taken(4)

    assert FakeLink.told[0] == 4


def test_what_a_rank_took_is_told_before_it_is_another_one_and_before_it_is_given_back(
    handle, monkeypatch
):
    monkeypatch.setattr(FakeLink, "order", ())

    handle.resize(ResizeAsked(dp=1, step=5), 0)
    assert handle.leave(1.0)

    assert FakeLink.order == ("tell", "resize", "tell", "end_watch")


def test_a_rank_whose_raylet_goes_while_it_trains_has_what_came_and_is_then_told_so(
    handle, monkeypatch
):
    def gone(_):
        raise UnavailableError("its raylet has ended")

    monkeypatch.setattr(FakeConstructor, "left", 2)
    assert [handle.take(step, 5.0).step for step in (0, 1)] == [0, 1]
    await_answer(handle, 2)
    monkeypatch.setattr(module.Raylet, "check", gone)

    assert [handle.take(step, 5.0).step for step in (2, 3)] == [2, 3]
    with pytest.raises(UnavailableError, match="its raylet has ended"):
        handle.take(4, 5.0)


def test_what_a_rank_asked_as_another_one_keeps_nothing_waiting_that_it_asks_later(
    handle, monkeypatch
):
    remote = FakeConstructor.remote
    monkeypatch.setattr(FakeConstructor, "remote", lambda *_: LATE)
    with pytest.raises(UnavailableError, match="waited 0 s for the batch of step 0"):
        handle.take(0, 0.01)
    monkeypatch.setattr(FakeConstructor, "remote", remote)
    handle.resize(ResizeAsked(dp=1, step=5), 0)

    assert said_by(handle, 5) == (("constructor-0", 5, 0, 1), (5, 0, 0, 1))


def test_a_process_that_ends_without_closing_its_rank_waits_for_the_call_that_is_made_beside_it(
    address, monkeypatch
):
    called, may_end, at_exit = threading.Event(), threading.Event(), []

    def remote(*_):
        called.set()
        assert may_end.wait(60.0)
        return ()

    monkeypatch.setattr(FakeConstructor, "remote", remote)
    monkeypatch.setattr(module.atexit, "register", lambda *call: at_exit.append(partial(*call)))
    handle = RayHandle(address, 1, 0, lambda: None)
    (end,) = at_exit
    with pytest.raises(UnavailableError, match="waited 0 s for the batch of step 0"):
        handle.take(0, 0.01)
    assert called.wait(60.0)

    with monkeypatch.context() as forked:
        forked.setattr(module.os, "getpid", lambda: 1)
        end()  # in a forked child, in which no such thread runs
    assert not handle.is_ready(0)

    pool = DaemonPool(1, "ends")
    ended = pool.submit(end)
    with suppress(UnavailableError):  # as soon as no caller is admitted
        while not handle.is_ready(0):
            assert not ended.done()
    assert not ended.done()
    may_end.set()
    ended.result(60.0)
    assert pool.close(10.0)
    assert handle.leave(1.0)


def test_a_resize_to_a_number_that_another_rank_has_leaves_the_rank_as_it_was(handle, tmp_path):
    others = claim_rank(tmp_path, f"{rank_name(0, 0, 1)} of 1")

    with pytest.raises(StateError, match="has a handle already"):
        handle.resize(ResizeAsked(dp=1, step=5), 0)

    assert said_by(handle, 0) == (("constructor-1", 0, 1, 0), (0, 1, 0, 0))
    assert handle.first_step == 0
    with pytest.raises(StateError, match="has a handle already"):  # its own number is still its own
        claim_rank(tmp_path, rank_name(1, 0, 1))
    others.close()


def test_a_rank_whose_new_constructor_is_lost_waits_for_the_one_that_takes_its_place(
    handle, actors, monkeypatch
):
    actors.remove("constructor-0")
    monkeypatch.setattr(module, "_LOOK_S", 0.0)
    monkeypatch.setattr(FakeLink, "look", lambda _: actors.add("constructor-0"))

    handle.resize(ResizeAsked(dp=1, step=5), 0)

    assert said_by(handle, 5) == (("constructor-0", 5, 0, 1), (5, 0, 0, 1))


def test_a_rank_that_joins_while_its_constructor_is_lost_waits_for_the_one_that_takes_its_place(
    address, actors, monkeypatch
):
    actors.remove("constructor-1")
    monkeypatch.setattr(module, "_LOOK_S", 0.0)
    monkeypatch.setattr(FakeLink, "look", lambda _: actors.add("constructor-1"))

    joined = RayHandle(address, 1, 0, lambda: None, NOW)

    assert said_by(joined, 0)[0] == ("constructor-1", 0, 1, 0)
    joined.leave(1.0)


def test_a_rank_whose_new_constructor_does_not_come_is_what_it_was_and_may_ask_again(
    handle, actors, monkeypatch
):
    monkeypatch.setattr(finding, "_FOUND_S", 0.0)
    actors.remove("constructor-0")

    with pytest.raises(UnavailableError, match="no constructor-0"):
        handle.resize(ResizeAsked(dp=1, step=5), 0)
    assert said_by(handle, 0) == (("constructor-1", 0, 1, 0), (0, 1, 0, 0))
    assert handle.first_step == 0

    actors.add("constructor-0")
    handle.resize(ResizeAsked(dp=1, step=5), 0)
    assert said_by(handle, 5) == (("constructor-0", 5, 0, 1), (5, 0, 0, 1))
    assert handle.first_step == 5


def test_a_head_that_is_lost_is_in_the_log_once_whoever_looks_and_ends_who_waits(
    address, monkeypatch, caplog
):
    class Lost(Head):
        def check(self):
            raise UnavailableError("the head takes no connection")

    monkeypatch.setattr(module, "HeadWatch", Lost)
    handle = RayHandle(address, 1, 0, lambda: None)

    for _ in range(3):
        with pytest.raises(UnavailableError, match="takes no connection"):
            FakeLink.checks()
    handle.leave(1.0)

    assert [line.getMessage() for line in caplog.records] == ["the head takes no connection"]


NOW = ResizeAsked(dp=2, step=0)
"""The present numbers of ranks."""


def test_a_rank_that_joins_in_the_place_of_a_lost_one_is_of_the_ranks_that_come_next(address):
    RayHandle(address, 1, 0, lambda: None).leave(1.0)  # it dies in its first step

    joined = RayHandle(address, 1, 0, lambda: None, NOW)

    assert said_by(joined, 0) == (("constructor-1", 0, 1, 1), (0, 1, 0, 1))
    joined.leave(1.0)


def test_a_rank_that_joins_where_nobody_was_is_of_the_ranks_of_now(address):
    joined = RayHandle(address, 1, 0, lambda: None, NOW)

    assert said_by(joined, 0) == (("constructor-1", 0, 1, 0), (0, 1, 0, 0))
    joined.leave(1.0)


def test_a_rank_that_joins_in_the_place_of_one_that_lives_is_refused_and_changes_nothing(
    address, handle, monkeypatch
):
    asked = []
    resize = FakeLink.resize
    monkeypatch.setattr(
        FakeLink, "resize", lambda link, what: asked.append(what) or resize(link, what)
    )

    with pytest.raises(StateError, match="has a handle already"):
        RayHandle(address, 1, 0, lambda: None, NOW)

    assert asked == [NOW]  # the planner was asked for no other ranks


def test_a_rank_that_could_not_join_may_try_again(address, actors, monkeypatch):
    monkeypatch.setattr(finding, "_FOUND_S", 0.0)
    actors.remove("constructor-1")
    with pytest.raises(UnavailableError, match="no constructor-1"):
        RayHandle(address, 1, 0, lambda: None, NOW)

    actors.add("constructor-1")
    joined = RayHandle(address, 1, 0, lambda: None, NOW)

    assert said_by(joined, 0)[0] == ("constructor-1", 0, 1, 0)
    joined.leave(1.0)


def test_a_rank_of_another_host_has_its_number_noted_on_that_of_the_plane(
    address, tmp_path, monkeypatch
):
    terms = NodeTerms(is_given=False, bind="eth0", ports="", store_bytes=1)
    place = HostPlace(node="n", address="10.0.0.2", board=tmp_path)
    there = address.model_copy(update={"host": "elsewhere", "terms": terms})
    monkeypatch.setattr(FakeLink, "claimed", ())

    handle = RayHandle(there.with_node_on(host_id(), place), 1, 0, lambda: None)
    for step in (5, 6, 7, 8):
        handle.resize(ResizeAsked(dp=1, step=step), 0)
    handle.leave(1.0)

    names, guests = zip(*FakeLink.claimed, strict=True)
    became = [f"{rank_name(0, 0, 1)} of {generation}" for generation in (1, 2, 3, 4)]
    assert names == (rank_name(1, 0, 1), *became)
    assert FakeLink.forgotten == rank_name(1, 0, 1)
    # No other code here removes the locks of generations that are long gone.
    kept = {lock_of(tmp_path, name).name for name in became[-2:]}
    assert {path.name for path in tmp_path.glob("*.lock")} == kept
    assert set(guests) == {guests[0]}
    assert str(os.getpid()) in guests[0]
