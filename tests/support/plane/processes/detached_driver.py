"""A driver, or a rank of one, that attaches to a detached plane. Prints the batches that it received, and its state.

detached_driver.py MIX KEYWORDS      keywords of omniload.open; its own are "takes", steps, and "end": kill, wait, or
                                     attached to be killed before its rank has joined; "mesh" are sizes by name
"""

import json
import os
import signal
import sys

import omniload
from tests.support.plane.processes.served_rank import OWN_RAYLETS, see_own_raylets


def taken(batch):
    """Return a batch as JSON, with None for each column that a stage of a pipeline lacks."""
    found = [batch.step]
    for name in ("tokens", "labels"):
        try:
            found.append(getattr(batch, name).tolist())
        except omniload.ConfigError:
            found.append([])
    return found


def main(mix, keywords):
    if OWN_RAYLETS in os.environ:
        see_own_raylets()
    if "mesh" in keywords:
        from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415 -- slow, and most go without

        names, sizes = zip(*keywords["mesh"].items(), strict=True)
        keywords["mesh"] = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    takes, end, seen = keywords.pop("takes"), keywords.pop("end", ""), []
    rank = keywords.get("rank", int(os.environ.get("RANK", "0")))
    if end == "attached":
        from omniload.actors.ray.given import detached  # noqa: PLC0415 -- what is opened is not here yet

        detached.join_detached = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    try:
        with omniload.open(mix, arrays="numpy", **keywords) as loader:
            for _ in range(takes):
                batch = loader.next_batch()
                seen.append(taken(batch) if "mesh" in keywords else taken(batch)[:2])
            told = {"seen": seen, "state": loader.state_dict(), "rank": rank}
            sys.stdout.write(json.dumps(told) + "\n")
            sys.stdout.flush()
            if end == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if end == "wait":
                sys.stdin.read()
    except omniload.OmniloadError as error:
        sys.stdout.write(json.dumps({"error": type(error).__name__, "message": str(error)}) + "\n")


main(sys.argv[1], json.loads(sys.argv[2]))
