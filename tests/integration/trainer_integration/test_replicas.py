"""Replicas die, come back and fail to commit: the steps that are committed are those of a run whose ranks stay.

The lighthouse and the managers are written after torchft 0.2: a quorum has a number and numbers its
replicas; a step counts once it is committed by all; a replica that comes has the count from its peers. The
data plane is a real one, of threads.
"""

import random
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

import omniload
from omniload.actors.local.plane import LocalPlane
from omniload.actors.plane import PlaneSpec
from omniload.batch.arrays import NumpyArrays
from omniload.client import Client
from omniload.front.delivery import BatchForm
from omniload.front.loader import Loader
from omniload.machine.messages import ResizeAsked
from omniload.plan.place_tree import ClientPlaceTree
from tests.support.plane.corpora import a_corpus
from trainer_integration.replicas import ReplicaLoader

pytestmark = pytest.mark.usefixtures("leaves_nothing_behind")
STEPS = 20


@dataclass(eq=False)
class Manager:
    """One replica's side of the quorum."""

    lighthouse: "Lighthouse"
    step: int = 0
    _quorum_id: int = -1

    def enter(self, quorum, step):
        self._quorum_id, self.step = quorum, step

    def current_step(self):
        return self.step

    def num_participants(self):
        return len(self.lighthouse.replicas)

    def participating_rank(self):
        return self.lighthouse.replicas.index(self)


class Lighthouse:
    """Makes quorums of the replicas that are there."""

    def __init__(self):
        self.replicas, self.quorum, self.members = [], 0, []

    def start_quorum(self):
        """Make a quorum, another one where others are there; who comes has the step of its peers."""
        if self.members != self.replicas:
            self.quorum, self.members = self.quorum + 1, list(self.replicas)
        step = max(manager.step for manager in self.replicas)
        for manager in self.replicas:
            manager.enter(self.quorum, step)

    def commit(self):
        for manager in self.replicas:
            manager.step += 1


def joining(plane):
    """Return ``omniload.join`` of a plane of this process."""

    def join(_address, *, rank, world_size, step, generation):
        asked = ResizeAsked(dp=world_size, step=step, generation=generation)
        return Loader(
            lambda stack, _state: stack.enter_context(Client(plane.handle(rank, 0, asked))),
            BatchForm(arrays=NumpyArrays()),
        )

    return join


def keys_of(batches):
    """Return what a step was trained on, whichever replica had which row."""
    return sorted(tuple(row) for batch in batches for row in batch.tokens.tolist())


def unbroken(spec):
    with LocalPlane(spec) as plane, Client(plane.handle(0)) as client:
        form = BatchForm(arrays=NumpyArrays())
        return [keys_of([form.of(client.next_batch())]) for _ in range(STEPS)]


@pytest.mark.parametrize(("seed", "group_size"), [(0, 1), (1, 1), (2, 2)])
def test_steps_that_are_committed_hold_what_they_hold_in_an_unbroken_run(
    tmp_path, monkeypatch, seed, group_size
):
    mix = a_corpus(tmp_path, rows=8, micro_rows=1)
    elastic = mix.runtime.model_copy(update={"elastic": True})
    spec = PlaneSpec(
        mix=mix.model_copy(update={"runtime": elastic}),
        base_dir=tmp_path,
        tree=ClientPlaceTree.of(),
    )
    whole, chance = unbroken(spec), random.Random(seed)
    lighthouse, loaders, committed, redone = Lighthouse(), {}, [], 0

    def come():
        manager = Manager(lighthouse)
        lighthouse.replicas.insert(chance.randint(0, len(lighthouse.replicas)), manager)
        loaders[id(manager)] = [
            opened.enter_context(
                ReplicaLoader(manager, "plane", group_rank=rank, group_size=group_size)
            )
            for rank in range(group_size)
        ]

    with LocalPlane(spec) as plane, ExitStack() as opened:
        monkeypatch.setattr(omniload, "join", joining(plane))
        for _ in range(4):
            come()
        while len(committed) < STEPS:
            if len(lighthouse.replicas) < 4 and chance.random() < 0.4:
                come()
            lighthouse.start_quorum()
            dies = len(lighthouse.replicas) > 1 and chance.random() < 0.3
            batches = [
                loader.next_batch()
                for manager in lighthouse.replicas
                for loader in loaders[id(manager)]
            ]
            if dies:  # in mid-step, so that nobody commits
                lighthouse.replicas.remove(chance.choice(lighthouse.replicas))
            if dies or chance.random() < 0.1:
                redone += 1
                continue
            committed.append(keys_of(batches))
            lighthouse.commit()

    assert committed == whole
    assert redone > 3
    assert lighthouse.quorum > 5
