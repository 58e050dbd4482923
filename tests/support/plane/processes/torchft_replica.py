"""A replica of torchft on a host, or its lighthouse. Prints its committed steps as JSON.

torchft_replica.py lighthouse HOST
torchft_replica.py train NAME LIGHTHOUSE ADDRESS HOST STEPS WAITS_IN

It waits for a line before it begins, and before step WAITS_IN; if that is negative, it waits after it has received
the batch of -WAITS_IN.
"""

import json
import sys
from datetime import timedelta

from torch import ones
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer

from trainer_integration import ReplicaLoader

_STUCK_S, _PATIENCE_S = 10, 60


def told(**result):
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


def lighthouse(host):
    server = LighthouseServer(
        bind="0.0.0.0:0", min_replicas=2, join_timeout_ms=4000, heartbeat_timeout_ms=5000
    )
    told(address=f"http://{host}:{server.address().rpartition(':')[2]}")
    sys.stdin.read()
    server.shutdown()


def train(name, lighthouse_at, address, host, steps, waits_in):
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=_STUCK_S)),
        min_replica_size=2,
        load_state_dict=lambda _: None,
        state_dict=dict,
        use_async_quorum=False,
        replica_id=name,
        store_addr=host,
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse_at,
        hostname=host,
        timeout=timedelta(seconds=_PATIENCE_S),
    )
    told(is_up=True)
    sys.stdin.readline()
    try:
        with ReplicaLoader(manager, address, arrays="numpy") as loader:
            while manager.current_step() < int(steps):
                if manager.current_step() == int(waits_in):
                    told(waits=True)
                    sys.stdin.readline()
                    waits_in = -1
                manager.start_quorum()
                step, batch = manager.current_step(), loader.next_batch()
                if step == -int(waits_in):
                    told(waits=True)
                    sys.stdin.readline()
                manager.allreduce(ones(1)).wait()
                if manager.should_commit():
                    told(step=step, rows=batch.tokens.tolist())
    finally:
        manager.shutdown(wait=False)


if __name__ == "__main__":
    {"lighthouse": lighthouse, "train": train}[sys.argv[1]](*sys.argv[2:])
