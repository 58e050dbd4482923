"""Replicas under torchft's own lighthouse and managers: one dies in mid-step, another comes, the steps stay."""

import threading
from collections import defaultdict
from datetime import timedelta

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

pytest.importorskip("torchft")
import torch
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer

STEPS = 12
_STUCK_S, _PATIENCE_S = 20, 60
"""A sum that waits for a dead replica is given up after the one; on a full machine answers take up to the other."""
FORM = BatchForm(arrays=NumpyArrays())


def keys_of(batches):
    return sorted(tuple(row) for batch in batches for row in batch.tokens.tolist())


class Replica(threading.Thread):
    """A training loop as torchft's examples have it, in a thread."""

    def __init__(self, name, lighthouse, taken, *, dies_in=STEPS):
        super().__init__(name=name, daemon=True)
        self._lighthouse, self._taken, self._dies_in = lighthouse, taken, dies_in
        self.error = None

    def run(self):
        try:
            self._train()
        except Exception as error:  # noqa: BLE001 -- told by the test
            self.error = error

    def _train(self):
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        manager = Manager(
            pg=ProcessGroupGloo(timeout=timedelta(seconds=_STUCK_S)),
            min_replica_size=2,
            load_state_dict=lambda _: None,
            state_dict=dict,
            use_async_quorum=False,
            replica_id=self.name,
            store_addr="127.0.0.1",
            store_port=store.port,
            rank=0,
            world_size=1,
            lighthouse_addr=self._lighthouse,
            timeout=timedelta(seconds=_PATIENCE_S),
        )
        try:
            with ReplicaLoader(manager, "plane") as loader:
                while manager.current_step() < STEPS:
                    manager.start_quorum()
                    step, batch = manager.current_step(), loader.next_batch()
                    if step == self._dies_in:
                        return
                    count = torch.ones(1)
                    manager.allreduce(count).wait()
                    if manager.should_commit():
                        self._taken[step].append(batch)
        finally:
            manager.shutdown(wait=False)


def test_a_replica_of_torchft_dies_and_another_comes_and_every_step_holds_what_it_holds(
    tmp_path, monkeypatch
):
    mix = a_corpus(tmp_path, rows=8, micro_rows=1)
    mix = mix.model_copy(update={"runtime": mix.runtime.model_copy(update={"elastic": True})})
    spec = PlaneSpec(mix=mix, base_dir=tmp_path, tree=ClientPlaceTree.of())
    with LocalPlane(spec) as plane, Client(plane.handle(0)) as client:
        whole = [keys_of([FORM.of(client.next_batch())]) for _ in range(STEPS)]

    taken = defaultdict(list)
    with LocalPlane(spec) as plane:

        def join(_address, *, rank, world_size, step, generation):
            asked = ResizeAsked(dp=world_size, step=step, generation=generation)
            return Loader(
                lambda stack, _: stack.enter_context(Client(plane.handle(rank, 0, asked))), FORM
            )

        monkeypatch.setattr(omniload, "join", join)
        lighthouse = LighthouseServer(
            bind="[::]:0", min_replicas=2, join_timeout_ms=2000, heartbeat_timeout_ms=5000
        )
        try:
            replicas = [
                Replica(name, lighthouse.address(), taken, dies_in=step)
                for name, step in (("a", STEPS), ("b", STEPS), ("c", 4))
            ]
            for replica in replicas:
                replica.start()
            replicas[2].join(120)
            replicas.append(Replica("d", lighthouse.address(), taken))
            replicas[3].start()
            for replica in replicas:
                replica.join(300)
        finally:
            lighthouse.shutdown()

    assert [replica.error for replica in replicas] == [None] * 4
    assert [keys_of(taken[step]) for step in range(STEPS)] == whole
    assert {len(batches) for batches in taken.values()} == {2, 3}
