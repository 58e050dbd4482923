"""A served plane, or a rank that joins it and does what it is told on standard input. Prints what it has as JSON.

served_rank.py serve MIX ADDRESS WORLD_SIZE
served_rank.py join ADDRESS NUMBERS        lines: next, or resize NUMBERS; a rank leaves behind the last
NUMBERS: RANK WORLD_SIZE [STEP [GENERATION]]
"""

import json
import os
import signal
import sys

import omniload


def told(**result):
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


def named(numbers):
    return dict(zip(("rank", "world_size", "step", "generation"), map(int, numbers), strict=False))


def serve(mix, address, world_size):
    with omniload.serve(mix, address=address, world_size=int(world_size)) as plane:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        told(pid=os.getpid())
        plane.wait()


def join(address, *numbers):
    with omniload.join(address, **named(numbers), arrays="numpy") as loader:
        for line in sys.stdin:
            verb, *words = line.split()
            if verb == "resize":
                loader.resize(**named(words))
            else:
                batch = loader.next_batch()
                told(step=batch.step, rows=batch.tokens.tolist())


if __name__ == "__main__":
    try:
        {"serve": serve, "join": join}[sys.argv[1]](*sys.argv[2:])
    except omniload.OmniloadError as error:
        told(error=type(error).__name__, message=str(error))
        sys.exit(error.exit_code)
