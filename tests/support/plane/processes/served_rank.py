"""A served plane, or a rank that joins it and obeys commands on standard input. Prints its results as JSON.

served_rank.py serve MIX ADDRESS WORLD_SIZE
served_rank.py join ADDRESS NUMBERS        lines: next, or resize NUMBERS; a rank leaves behind the last
served_rank.py open MIX KEYWORDS           a rank of a job that no plane is served to, with lines as above; as JSON
NUMBERS: RANK WORLD_SIZE [STEP [GENERATION]]
"""

import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import psutil

import omniload

OWN_RAYLETS = "OWN_RAYLETS"
"""Variable that is set if each host of the test has a node of a given Ray."""


def told(**result):
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


def named(numbers):
    return dict(zip(("rank", "world_size", "step", "generation"), map(int, numbers), strict=False))


def nodes_here():
    """Return the numbers of the nodes whose raylets are in this network namespace."""
    here, found = Path("/proc/self/ns/net").stat().st_ino, set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            is_here = Path(f"/proc/{process.pid}/ns/net").stat().st_ino == here
            words = process.cmdline() if process.name() == "raylet" and is_here else ()
            found |= {w.partition("=")[2] for w in words if w.startswith("--node_id=")}
    return found


def see_own_raylets():
    """Make Ray join this host's node; otherwise it would take any raylet of this machine for one of its host."""
    from ray._private import services  # noqa: PLC0415

    from omniload.actors.ray import environment  # noqa: F401, PLC0415 -- it sets what Ray reads

    services.find_node_ids = nodes_here


def serve(mix, address, world_size):
    with omniload.serve(mix, address=address, world_size=int(world_size)) as plane:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        told(pid=os.getpid())
        plane.wait()


def join(address, *numbers):
    with omniload.join(address, **named(numbers), arrays="numpy") as loader:
        heed(loader)


def open_mix(mix, keywords):
    with omniload.open(mix, arrays="numpy", **json.loads(keywords)) as loader:
        heed(loader)


def heed(loader):
    for line in sys.stdin:
        verb, *words = line.split()
        if verb == "resize":
            loader.resize(**named(words))
        else:
            batch = loader.next_batch()
            told(step=batch.step, rows=batch.tokens.tolist())


if __name__ == "__main__":
    if OWN_RAYLETS in os.environ:
        see_own_raylets()
    try:
        {"serve": serve, "join": join, "open": open_mix}[sys.argv[1]](*sys.argv[2:])
    except omniload.OmniloadError as error:
        told(error=type(error).__name__, message=str(error))
        sys.exit(error.exit_code)
