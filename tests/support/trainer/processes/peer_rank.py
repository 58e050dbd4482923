"""One of several ranks that train on the same rows, without a data plane: the first sends, the others receive.

peer_rank.py RANK PORT PLAN     each line printed is JSON
"""

import json
import os
import signal
import sys
import time

import numpy as np
import torch.distributed as dist

from omniload.base.errors import OmniloadError
from omniload.batch.wire import Parts
from trainer_integration.loader.torch_exchange import exchange_of
from trainer_integration.loader.torch_peers import peers_of

RANK, PORT, PLAN = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
LONG_S, SHORT_S, GROUP_S = 60.0, 1.0, 5.0
"""Limits of waits in seconds.

The last is the limit of a group of ranks that start together, and of each of their messages; a busy machine takes a
while.
"""


def told(**what):
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def give(peers):
    for step in range(6):
        if PLAN == "late" and step == 3:
            time.sleep(GROUP_S + SHORT_S)  # longer than the group's own limit
        if PLAN == "killed" and step == 3:
            store.wait(
                ["taken"]
            )  # the peer has met this rank, and waits for a message that never comes
            os.kill(os.getpid(), signal.SIGKILL)
        state = json.dumps({"step": step}).encode() if step % 2 else b""
        peers.give("batch", step, state, Parts(shared=[np.full(step * 1000, step, np.uint8)]))


def take(peers):
    step, message = 0, None
    while step < 6:
        try:
            message = peers.take(SHORT_S if PLAN == "late" else LONG_S, behind=message)
            assert peers.take(SHORT_S) is message  # until the next one is requested
        except OmniloadError as error:
            told(error=type(error).__name__, message=str(error))
            if PLAN == "killed":
                return
            continue
        kind, found, state, parts = message
        batch = parts.shared[0] if parts.shared else np.empty(0, np.uint8)
        told(kind=kind, step=found, state=state.decode(), tokens=[len(batch), int(batch.sum())])
        if PLAN == "killed" and step == 0:
            store.set("taken", "")
        step += 1


def exchange():
    if RANK == 1:
        # A group that the other rank lacks, like Megatron's group of its first and last stage.
        dist.new_group([1], backend="gloo", use_local_synchronization=True)
    # Two groups of the same ranks, one after the other, as for two samplers; then a group for each rank alone.
    exchanges = [exchange_of(None, LONG_S) for _ in range(2)]
    alone = [dist.new_group([rank], backend="gloo") for rank in range(2)]
    exchanges.append(exchange_of(alone[RANK], LONG_S))
    for number, each in enumerate(exchanges):
        parts = each.all_gather(bytes([number]) * (1 + each.rank))
        told(rank=each.rank, size=each.size, parts=[list(part) for part in parts])


store = dist.TCPStore("127.0.0.1", PORT, 2, is_master=RANK == 0)
dist.init_process_group("gloo", store=store, rank=RANK, world_size=2)
if PLAN == "exchange":
    exchange()
    dist.barrier()
    sys.exit()
if PLAN == "absent" and RANK == 1:
    time.sleep(3 * SHORT_S)
    sys.exit()
try:
    limits_s = {"late": GROUP_S, "absent": SHORT_S, "killed": LONG_S}
    peers = peers_of([[0, 1]], RANK, "test", limits_s[PLAN])
except OmniloadError as error:
    told(error=type(error).__name__, message=str(error))
    sys.exit()
(give if RANK == 0 else take)(peers)
peers.close()
dist.barrier()
