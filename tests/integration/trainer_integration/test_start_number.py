"""Ranks agree on which start of a job it is, whatever their agents counted and an earlier start left in the store."""

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from omniload.base.errors import UnavailableError
from omniload.front.launch import Launch
from trainer_integration.loader import torch_arrays
from trainer_integration.loader.start_number import agreed_start
from trainer_integration.loader.torch_arrays import rendezvous_of

LIMIT_S = 120.0
COUNT = "omniload/starts"


@pytest.fixture
def connect():
    """Connect to the store that an agent keeps."""
    kept = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def connected():
        return dist.TCPStore("127.0.0.1", kept.port, timeout=timedelta(seconds=LIMIT_S))

    connected.kept = kept
    return connected


def a_launch(rank, restarts, world_size=3):
    return Launch(
        rank=rank, world_size=world_size, attempt="job", found_in="the test", restarts=restarts
    )


def started(connect, counted):
    """Start ranks whose agents counted so many restarts; the last rank comes first.

    An agent ends its ranks before it starts them again, so rank 0 answers no more when this returns.
    """
    found, before = {}, set(threading.enumerate())

    def start(rank):
        found[rank] = agreed_start(connect(), a_launch(rank, counted[rank]), LIMIT_S)

    threads = [threading.Thread(target=start, args=(rank,)) for rank in reversed(range(3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    for thread in set(threading.enumerate()) - before:
        thread.join(LIMIT_S)
    return [found.get(rank) for rank in range(3)]


@pytest.mark.parametrize(
    "counts",
    [
        [(0, 0, 0), (1, 1, 1), (2, 2, 2)],
        [(0, 0, 0), (0, 0, 1), (0, 1, 1), (1, 1, 1)],
    ],
)
def test_every_start_has_a_number_of_its_own_that_all_ranks_have(connect, counts):
    for number, counted in enumerate(counts):
        assert started(connect, counted) == [number] * 3


def test_a_store_that_is_as_new_as_the_start_leaves_the_launchers_count(connect):
    assert started(connect, (4, 4, 4)) == [4, 4, 4]


def test_a_rank_0_that_is_about_to_end_answers_no_rank_of_the_next_start(connect):
    """Agents of a static rendezvous start their ranks again one by one."""
    agreed_start(connect(), a_launch(0, 0, 2), LIMIT_S)

    with pytest.raises(UnavailableError, match=r"rank 1: rank 0 has not said within 0\.5 s"):
        agreed_start(connect(), a_launch(1, 1, 2), 0.5)

    assert agreed_start(connect(), a_launch(0, 1, 2), LIMIT_S) == 1
    assert agreed_start(connect(), a_launch(1, 1, 2), LIMIT_S) == 1


@pytest.fixture
def agents_store(monkeypatch):
    """A store that an agent of torchrun keeps, named by the variables of its ranks."""
    kept = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(kept.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(torch_arrays, "_STARTS", {})
    return kept


def test_every_loader_of_a_process_meets_under_one_start_whatever_its_timeout(agents_store):
    launch = a_launch(0, 0, 1)

    starts = [rendezvous_of(launch, timeout_s).start for timeout_s in (20.0, 21.0, 20.0)]

    assert starts == [0, 0, 0]
    assert agents_store.add(COUNT, 0) == 1


class LostAgent:
    """A store whose agent has ended."""

    def set(self, *_):
        pass

    def add(self, *_):
        raise dist.DistNetworkError("Connection reset by peer")

    wait = add


@pytest.mark.parametrize("rank", [0, 1])
def test_an_agent_that_is_lost_is_told_as_one(rank):
    with pytest.raises(UnavailableError, match=rf"rank {rank}: .*agent.*reset by peer"):
        agreed_start(LostAgent(), a_launch(rank, 0), 1.0)
