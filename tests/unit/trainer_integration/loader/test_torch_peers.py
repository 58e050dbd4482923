"""Messages to peers over a group of torch, of which each comes once however often its sender gives up waiting."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from omniload.base.errors import UnavailableError
from omniload.batch.wire import Parts
from trainer_integration.loader import gloo_groups, torch_peers
from trainer_integration.loader.torch_peers import peers_of


class Group:
    """A group whose other rank takes a message each time that it is told to."""

    DistError = RuntimeError

    def __init__(self):
        self.sent, self.taken, self.gone = [], 0, False
        self.fails = "Timed out waiting"
        self.distributed_c10d = SimpleNamespace(
            _get_default_store=lambda: None, PrefixStore=lambda *_: None
        )

    def is_initialized(self):
        return True

    def ProcessGroupGloo(self, *_):  # noqa: N802 -- torch's name
        return self

    def _set_default_timeout(self, _):
        pass

    def broadcast(self, tensor, _):
        number = len(self.sent)
        self.sent.append(tensor)

        def wait(_limit):
            if self.taken <= number:
                raise RuntimeError(self.fails)

        # A connection that is closed ends a wait, too.
        return SimpleNamespace(wait=wait, is_completed=lambda: self.taken > number or self.gone)

    def heads(self):
        """Return the steps that were sent, of messages that are a head and a batch, or a head alone."""
        return [int(each[2]) for each in self.sent if each.dtype == torch.int64]


@pytest.fixture
def group(monkeypatch):
    made = Group()
    for module in (gloo_groups, torch_peers):
        monkeypatch.setattr(module, "dist", made)
    return made


def give(peers, step):
    peers.give("batch", step, b"", Parts(shared=[np.full(8, step, np.uint8)]))


def test_a_batch_that_was_given_again_after_a_wait_comes_once(group):
    peers = peers_of([[0, 1]], 0, "test", 1.0)
    for step in range(4):
        give(peers, step)  # nobody has taken any yet, and nobody waits

    for _ in range(2):
        with pytest.raises(UnavailableError, match=r"waited 1 s until ranks \[1\] take a batch"):
            give(peers, 4)
    assert group.heads() == [0, 1, 2, 3]

    group.taken = 2  # a head and its batch
    give(peers, 4)
    assert group.heads() == [0, 1, 2, 3, 4]
    with pytest.raises(UnavailableError):
        give(peers, 5)


def test_a_peer_that_has_not_taken_what_came_before_has_the_word_that_the_loader_is_closed(group):
    peers = peers_of([[0, 1]], 0, "test", 1.0)
    for step in range(4):
        give(peers, step)

    with pytest.raises(UnavailableError):
        peers.give("closed", 9, b"")

    assert group.heads() == [0, 1, 2, 3, 9]


def test_peers_that_are_gone_with_their_last_batch_need_no_word_that_the_loader_is_closed(group):
    peers = peers_of([[0, 1]], 0, "test", 1.0)
    give(peers, 0)
    group.taken = 2
    group.gone = True

    peers.give("closed", 9, b"")

    assert group.heads() == [0, 9]


def test_a_connection_that_is_lost_is_no_wait_of_so_many_seconds(group):
    peers = peers_of([[0, 1]], 0, "test", 1.0)
    group.fails = "[pair.cc:553] Connection closed by peer [127.0.0.1]:28564"
    for step in range(4):
        give(peers, step)

    with pytest.raises(
        UnavailableError,
        match=r"^a connection was lost before ranks \[1\] take a batch of rank 0: ",
    ):
        give(peers, 4)
