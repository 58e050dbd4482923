"""A node of a given Ray on a host of its own, without the services that no data plane uses. Prints its head's address.

ray_node.py ADDRESS FOLDER [HEAD]      the address of the host; the address of a running head

A node of ``ray start`` takes a minute of processor time for the same work, because it starts the dashboard and the
collection of logs, and each worker loads Ray. The node ends with its input.
"""

import faulthandler
import sys

from omniload.actors.ray.hosts.node import start_node
from omniload.actors.ray.hosts.node_plan import NodePlan
from tests.support.plane.two_hosts import UP

_STORE_BYTES, _UP_WITHIN_S = 100_000_000, 300


def main(address, folder, head=None):
    plan = NodePlan(
        folder=folder, address=address, workers=2, object_store_bytes=_STORE_BYTES, head=head
    )
    # The test that waits for the address gets a stack of each thread, and its wait has a limit.
    faulthandler.dump_traceback_later(_UP_WITHIN_S, exit=True)
    node = start_node(plan)
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.write(f"{UP}{node.gcs_address}\n")
    sys.stdout.flush()
    sys.stdin.read()
    node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
