"""A replica's loader: it joins, is another rank, and takes a step again, as the manager's quorums say."""

import pytest

import omniload
from omniload import ConfigError, StateError, UnavailableError
from trainer_integration.replicas import ReplicaLoader


class FakeManager:
    """A manager as torchft 0.2 has it, after ``start_quorum``; what is asked of it and no more."""

    def __init__(self, replicas, rank, step=0, quorum=1):
        self.replicas, self.rank, self.step, self._quorum_id = replicas, rank, step, quorum

    def enter(self, quorum, **changes):
        """Be in another quorum."""
        self._quorum_id = quorum
        self.__dict__ |= changes

    def current_step(self):
        return self.step

    def num_participants(self):
        return self.replicas

    def participating_rank(self):
        return self.rank


class FakeLoader:
    """Notes what it is told; its batches are numbers of steps."""

    def __init__(self, step):
        self.next_step, self.said, self.closed = step, [], False

    def start(self):
        pass

    def resize(self, rank, world_size, *, step, generation):
        self.said.append((rank, world_size, step, generation))
        self.next_step = step

    def next_batch(self):
        self.next_step += 1
        return self.next_step - 1

    def close(self):
        self.closed = True


@pytest.fixture
def joined(monkeypatch):
    """Return what was joined, as it is; each with the numbers it was joined by."""
    found = []

    def join(address, *, step, **numbers):
        found.append((FakeLoader(step), {"address": address, "step": step} | numbers))
        return found[-1][0]

    monkeypatch.setattr(omniload, "join", join)
    return found


def test_a_replica_joins_at_the_step_that_its_peers_stand_before(joined):
    loader = ReplicaLoader(FakeManager(4, 3, step=17, quorum=9), "plane", arrays="numpy")

    assert loader.next_batch() == 17
    ((_, numbers),) = joined
    assert numbers == {
        "address": "plane",
        "rank": 3,
        "world_size": 4,
        "step": 17,
        "generation": 9,
        "arrays": "numpy",
    }


def test_ranks_of_a_replica_are_numbered_behind_those_of_the_replicas_before_it(joined):
    ReplicaLoader(FakeManager(3, 2), "plane", group_rank=1, group_size=4).next_batch()

    assert (joined[0][1]["rank"], joined[0][1]["world_size"]) == (9, 12)


def test_a_step_that_was_not_committed_is_the_same_batch_in_the_same_quorum(joined):
    manager = FakeManager(4, 0)
    loader = ReplicaLoader(manager, "plane")

    assert [loader.next_batch(), loader.next_batch()] == [0, 0]
    manager.step = 1
    assert loader.next_batch() == 1
    assert joined[0][0].said == []


def test_a_step_in_which_a_replica_died_is_taken_again_as_another_rank(joined):
    manager = FakeManager(4, 3)
    loader = ReplicaLoader(manager, "plane")
    loader.next_batch()

    manager.enter(2, replicas=3, rank=2)

    assert loader.next_batch() == 0
    assert joined[0][0].said == [(2, 3, 0, 2)]


def test_a_quorum_of_as_many_replicas_is_another_one_all_the_same(joined):
    manager = FakeManager(4, 0)
    loader = ReplicaLoader(manager, "plane")
    loader.next_batch()

    manager.enter(2, step=1)
    loader.next_batch()

    assert joined[0][0].said == [(0, 4, 1, 2)]


def test_a_replica_that_takes_no_part_is_told_how_to_make_the_manager(joined):
    with pytest.raises(StateError, match=r"takes no part in step 5.*use_async_quorum=False"):
        ReplicaLoader(FakeManager(3, None, step=5), "plane").next_batch()
    assert joined == []


def test_a_rank_that_left_out_a_step_is_refused(joined):
    manager = FakeManager(2, 0)
    loader = ReplicaLoader(manager, "plane")
    loader.next_batch()
    manager.step = 2

    with pytest.raises(StateError, match=r"before step 2, and this rank before step 1"):
        loader.next_batch()


def test_a_manager_without_a_number_of_its_quorum_needs_one_given(joined):
    class Bare:
        def current_step(self):
            return 0

        def num_participants(self):
            return 1

        def participating_rank(self):
            return 0

    with pytest.raises(ConfigError, match=r"Bare does not say which quorum.*quorum_id"):
        ReplicaLoader(Bare(), "plane")
    assert ReplicaLoader(Bare(), "plane", quorum_id=lambda: 4).next_batch() == 0
    assert joined[0][1]["generation"] == 4


def test_a_rank_outside_its_replica_is_refused():
    with pytest.raises(ConfigError, match=r"group_rank is 2 and group_size 2"):
        ReplicaLoader(FakeManager(1, 0), "plane", group_rank=2, group_size=2)


def test_the_plane_is_left_with_the_loader(joined):
    with ReplicaLoader(FakeManager(1, 0), "plane") as loader:
        loader.next_batch()

    assert joined[0][0].closed
    ReplicaLoader(FakeManager(1, 0), "plane").close()


def test_a_rank_that_did_not_get_its_batch_is_not_given_that_of_the_rank_it_was(joined):
    manager = FakeManager(4, 3)
    loader = ReplicaLoader(manager, "plane")
    loader.next_batch()
    manager.enter(2, replicas=3, rank=2)
    own = joined[0][0].next_batch

    def late():
        joined[0][0].next_batch = lambda: f"that of rank 2, step {own()}"
        raise UnavailableError("it was not there in time")

    joined[0][0].next_batch = late
    with pytest.raises(UnavailableError):
        loader.next_batch()

    assert loader.next_batch() == "that of rank 2, step 0"
    assert joined[0][0].said == [(2, 3, 0, 2)]


def test_a_replica_that_was_not_let_in_joins_as_the_rank_that_it_is_in_the_next_quorum(
    joined, monkeypatch
):
    def away(_):
        raise UnavailableError("nobody answers")

    manager = FakeManager(4, 3, step=17, quorum=9)
    loader = ReplicaLoader(manager, "plane")
    with monkeypatch.context() as patch:
        patch.setattr(FakeLoader, "start", away)
        with pytest.raises(UnavailableError):
            loader.next_batch()
    manager.enter(10, replicas=3, rank=2, step=18)

    assert loader.next_batch() == 18
    (first, _), (second, numbers) = joined
    assert (first.closed, first.said, second.said) == (True, [], [])
    assert (numbers["rank"], numbers["world_size"], numbers["generation"]) == (2, 3, 10)
