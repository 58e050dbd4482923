"""A driver of one rank that attaches to a detached plane. Prints what it was handed, and its state.

detached_driver.py MIX KEYWORDS      keywords of omniload.open; of its own "takes", steps, and "end": kill or wait
"""

import json
import os
import signal
import sys

import omniload


def main(mix, keywords):
    takes, end, seen = keywords.pop("takes"), keywords.pop("end", ""), []
    try:
        with omniload.open(mix, arrays="numpy", **keywords) as loader:
            for _ in range(takes):
                batch = loader.next_batch()
                seen.append([batch.step, batch.tokens.tolist()])
            sys.stdout.write(json.dumps({"seen": seen, "state": loader.state_dict()}) + "\n")
            sys.stdout.flush()
            if end == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if end == "wait":
                sys.stdin.read()
    except omniload.OmniloadError as error:
        sys.stdout.write(json.dumps({"error": type(error).__name__, "message": str(error)}) + "\n")


main(sys.argv[1], json.loads(sys.argv[2]))
