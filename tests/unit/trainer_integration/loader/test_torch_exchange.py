"""Exchanges of rollouts over torch: a gather that fails names the ranks that did not come to it."""

import threading

import pytest

pytest.importorskip("torch")

import torch.distributed as dist

from omniload.base.errors import UnavailableError
from trainer_integration.loader import torch_exchange
from trainer_integration.loader.torch_exchange import TorchExchange


class Done:
    def wait(self):
        return True


class Group:
    """A gloo group whose ranks are alike, and whose n-th gather fails."""

    def __init__(self, fails_at):
        self.left = fails_at

    def allgather(self, parts, own):
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("Connection closed by peer\nand more of it")
        for part in parts[0]:
            part.copy_(own[0])
        return Done()


@pytest.fixture
def store(monkeypatch):
    made = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: made)
    return made


RANKS = (2, 5, 7)


def arrivals():
    return [torch_exchange._Arrivals("place", RANKS, rank) for rank in RANKS]


def message_of(exchange):
    with pytest.raises(UnavailableError) as caught:
        exchange.all_gather(b"a")
    return str(caught.value)


def test_ranks_that_did_not_come_are_named_by_their_numbers_in_the_job(store):
    first, *_, last = arrivals()
    last.come()

    assert message_of(TorchExchange(Group(1), first, 0, 3, 20.0)) == (
        "rank 0 of 3 waited up to 20 s for the others' rollouts: 1 rank of the job did not come: [5]; do they run, and "
        "ask for as many batches? timeout= waits longer (Connection closed by peer)"
    )


def test_a_rank_that_came_to_the_gather_before_has_not_come_to_this_one(store):
    first, *others = arrivals()
    exchange = TorchExchange(Group(3), first, 0, 3, 20.0)
    for each in others:
        each.come()
    assert exchange.all_gather(b"a") == [b"a"] * 3

    assert "2 ranks of the job did not come: [5, 7]" in message_of(exchange)


def test_where_all_had_come_one_has_ended(store):
    first, *others = arrivals()
    for each in others:
        each.come()

    assert "all had come, and one has ended since" in message_of(
        TorchExchange(Group(2), first, 0, 3, 20.0)
    )


def test_of_many_that_did_not_come_a_few_are_named(store):
    mine = torch_exchange._Arrivals("place", range(20), 0)

    assert "19 ranks of the job did not come: [1, 2, 3, 4, 5, 6, 7, 8], ...;" in message_of(
        TorchExchange(Group(1), mine, 0, 20, 20.0)
    )


def test_a_store_that_is_gone_is_told(store, monkeypatch):
    mine, *_ = arrivals()

    def gone(*_):
        raise dist.DistNetworkError("Broken pipe")

    monkeypatch.setattr(mine, "_has_come", gone)

    assert "rank 2, or whoever hosts torch's store, has ended" in message_of(
        TorchExchange(Group(1), mine, 0, 3, 20.0)
    )


def test_a_store_that_does_not_answer_is_waited_for_once_and_not_for_long(store, monkeypatch):
    mine, *_ = arrivals()
    answers = threading.Event()
    monkeypatch.setattr(mine, "_has_come", lambda _: answers.wait(60))
    monkeypatch.setattr(torch_exchange, "_STUCK_S", 0.01)
    group = Group(1)
    exchange = TorchExchange(group, mine, 0, 3, 20.0)

    assert "torch's store does not answer, nor may its host, rank 0;" in message_of(exchange)
    monkeypatch.setattr(mine, "_store", None)
    group.left = 1
    assert "torch's store does not answer" in message_of(exchange)
    answers.set()
