"""One rank fetches and its peers follow: batches, states, failures and the end, over a queue instead of ranks."""

import json
from collections import deque
from dataclasses import replace

import numpy as np
import pytest

from omniload.base.errors import StateError, UnavailableError
from omniload.batch.microbatch import Batch
from omniload.batch.wire import Parts, Routes
from omniload.client import Client
from omniload.front.peers import Dealt, FetchingHandle, FollowingHandle, Shared
from tests.support.plane.builders import a_microbatch

NOTHING = Parts()
ALL = Shared(Routes.among([None, None], sliced=False))


def some_rows():
    """Two rows of 8: one full, one of two pieces and padding."""
    return a_microbatch([[(0, 0, 0, 0, 8, 8)], [(1, 4, 0, 0, 3, 3), (0, 1, 0, 2, 4, 6)]], length=8)


class Wire:
    """Ends of one broadcast in this process."""

    fetching_rank = 4

    def __init__(self):
        self.sent = deque()
        self.closed = False

    def give(self, kind, step, state, parts=NOTHING):
        self.sent.append((kind, step, state, parts))

    def take(self, timeout_s, behind=None):
        if self.sent and self.sent[0] is behind:
            self.sent.popleft()
        if not self.sent:
            raise UnavailableError(f"nothing came in {timeout_s:g} s")
        return self.sent[0]

    def close(self):
        self.closed = True


class Fetched:
    """A rank's handle of a plane with steps 3 and 4, which may fail."""

    first_step = 3

    def __init__(self):
        self.told, self.failure, self.closed = [], None, False

    def take(self, step, timeout_s=None):
        if self.failure is not None:
            raise self.failure
        if step > 4:
            return None
        return Batch(
            step=step, microbatches=(some_rows(),), loss_tokens=1, imbalance=1.0, bound=1.0
        )

    def taken(self, step):
        self.told.append(step)

    def state_at(self, step):
        return {"step": step}

    def close(self):
        self.closed = True


@pytest.fixture
def pair():
    """A fetching client and a following one."""
    wire, plane = Wire(), Fetched()
    fetching = Client(FetchingHandle([plane], wire, ALL))
    return fetching, Client(FollowingHandle(wire, 1.0, 2.0)), plane, wire


def test_a_peer_has_the_batches_and_states_of_the_rank_that_fetches_and_the_end(pair):
    fetching, following, plane, _ = pair
    assert following.next_step == 3
    assert following.state_dict() == fetching.state_dict() == {"step": 3}

    for step in (3, 4):
        mine, theirs = fetching.next_batch(), following.next_batch()
        assert (theirs.step, mine.step) == (step, step)
        np.testing.assert_array_equal(
            theirs.microbatches[0].tokens_RT, mine.microbatches[0].tokens_RT
        )
        assert following.state_dict() == fetching.state_dict() == {"step": step + 1}

    assert fetching.next_batch() is None
    assert following.next_batch() is None
    assert following.next_batch() is None
    assert following.state_dict() == {"step": 5}
    assert plane.told == [3, 4]


def test_a_failure_of_the_plane_is_raised_by_every_peer_with_the_rank_it_came_by(pair):
    fetching, following, plane, _ = pair
    plane.failure = StateError("source 'web' has gone")

    with pytest.raises(StateError, match="web"):
        fetching.next_batch()
    with pytest.raises(StateError, match="rank 4: source 'web' has gone"):
        following.next_batch()

    plane.failure = None
    assert fetching.next_batch().step == following.next_batch().step == 3


def test_what_nobody_foresaw_is_told_to_every_peer_too(pair):
    fetching, following, plane, _ = pair
    plane.failure = MemoryError("no room for a batch")

    with pytest.raises(MemoryError):
        fetching.next_batch()
    with pytest.raises(UnavailableError, match="rank 4: no room for a batch"):
        following.next_batch()


def test_a_wait_that_was_given_up_may_be_taken_up_again(pair):
    fetching, following, _, _ = pair
    with pytest.raises(UnavailableError, match=r"0\.5 s"):
        following.next_batch(0.5)

    fetching.next_batch()

    assert following.next_batch().step == 3


def test_a_peer_is_told_when_the_rank_that_fetches_has_closed(pair):
    fetching, following, plane, wire = pair
    fetching.close()

    assert (plane.closed, wire.closed) == (True, True)
    with pytest.raises(StateError, match="rank 4, which fetches for this one, has closed"):
        following.next_batch()


def test_a_peer_that_missed_a_batch_is_told_and_not_handed_another(pair):
    fetching, following, _, wire = pair
    fetching.next_batch()
    wire.sent.clear()
    fetching.next_batch()

    with pytest.raises(StateError, match=r"asks for step 3, and rank 4, .* handed on step 4"):
        following.next_batch()


def test_the_end_is_sent_once_however_often_a_loop_asks_behind_it(pair):
    fetching, following, _, wire = pair
    assert [fetching.next_batch().step for _ in range(2)] == [3, 4]
    assert [following.next_batch().step for _ in range(2)] == [3, 4]
    assert [fetching.next_batch() for _ in range(6)] == [None] * 6

    assert [kind for kind, *_ in wire.sent if kind != "batch"] == ["end"]
    assert [following.next_batch() for _ in range(2)] == [None, None]


def test_a_batch_that_is_taken_back_behind_one_that_was_waited_for_has_its_state(pair):
    fetching, following, _, _ = pair
    for _ in range(2):
        fetching.next_batch()
    first = following.next_batch()
    assert following.wait_for_batch().step == 4
    assert following.state_dict() == {"step": 4}

    following.take_back(first)

    assert following.state_dict() == {"step": 3}
    assert [following.next_batch().step for _ in range(2)] == [3, 4]
    assert following.state_dict() == {"step": 5}


def test_a_state_that_is_not_at_hand_is_refused():
    wire = Wire()
    FetchingHandle([Fetched()], wire, ALL)

    with pytest.raises(
        StateError, match=r"before step 9 is not at hand, those before steps \[3\] are"
    ):
        FollowingHandle(wire, 1.0, 2.0).state_at(9)


def test_ranks_that_open_differently_are_told():
    wire = Wire()
    wire.give("batch", 3, json.dumps({}).encode())

    with pytest.raises(StateError, match="sent 'batch' where hello was to come"):
        FollowingHandle(wire, 1.0, 2.0)


class Deals:
    """The ways of one rank to three others in this process, each of which gets its own."""

    fetching_rank = 0

    def __init__(self):
        self.ways = [Wire() for _ in range(4)]
        self.closed = False

    def give(self, kind, step, state, parts=NOTHING):
        for way, own in zip(self.ways, parts.own or [None] * 4, strict=True):
            way.give(kind, step, state, Parts(own=() if own is None else (own,)))

    def close(self):
        self.closed = True


class OfPlace(Fetched):
    """A handle of a place, whose batches name the place."""

    def __init__(self, place):
        super().__init__()
        self.place = place

    def take(self, step, timeout_s=None):
        batch = super().take(step, timeout_s)
        return batch and replace(batch, loss_tokens=self.place)


@pytest.fixture
def dealt():
    """The clients of four ranks at two places, the first of which deals, with its handles and ways."""
    handles, deals = [OfPlace(0), OfPlace(1)], Deals()
    dealt = Dealt(places_R=[0, 1, 0, 1], peers_R=[0, 0, 1, 1], stages=[None, None])
    dealing = Client(FetchingHandle(handles, deals, dealt))
    others = [Client(FollowingHandle(way, 1.0, 2.0)) for way in deals.ways[1:]]
    return [dealing, *others], handles, deals


def test_each_rank_is_dealt_the_batches_of_its_place_and_all_have_one_state_and_end(dealt):
    clients, handles, deals = dealt

    for step in (3, 4):
        batches = [client.next_batch() for client in clients]
        assert [(batch.step, batch.loss_tokens) for batch in batches] == [
            (step, place) for place in (0, 1, 0, 1)
        ]
        assert [client.state_dict() for client in clients] == [{"step": step + 1}] * 4

    assert [client.next_batch() for client in clients] == [None] * 4
    assert [handle.told for handle in handles] == [[3, 4], [3, 4]]
    clients[0].close()
    assert deals.closed
    assert all(handle.closed for handle in handles)


def test_what_keeps_one_place_from_its_batch_is_told_to_all_and_none_has_the_step_twice(dealt):
    clients, handles, _ = dealt
    handles[1].failure = UnavailableError("no reader answers")

    for client in clients:
        with pytest.raises(UnavailableError, match="no reader answers"):
            client.next_batch()

    handles[1].failure = None
    assert [client.next_batch().step for client in clients] == [3] * 4
    assert [client.next_batch().step for client in clients] == [4] * 4
