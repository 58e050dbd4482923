"""A rank that reports the time of each of its microbatches, computed from a cost. Prints its batches as JSON.

fitting_rank.py MIX KEYWORDS COST      keywords of omniload.open; its own are "takes", steps, and "save_at", the step
                                       before which the state is saved. COST is seconds of a token and of a pair of
                                       tokens, and the slowness of each rank; without it no times are reported
"""

import json
import sys

import omniload


def main(mix, keywords, cost):
    takes, save_at, state, seen = keywords.pop("takes"), keywords.pop("save_at", None), None, []
    try:
        with omniload.open(mix, arrays="numpy", **keywords) as loader:
            for _ in range(takes):
                batch = loader.next_batch()
                # Rows are listed by microbatch, because a cost decides the microbatch of each row.
                rows = [each.tokens.tolist() for each in batch.microbatches]
                seen.append([batch.step, rows])
                for each in batch.microbatches if cost else ():
                    (tokens, squares), slow = each.work(), cost[2 + keywords["rank"]]
                    loader.observe(each, seconds=slow * (cost[0] * tokens + cost[1] * squares))
                if batch.step + 1 == save_at:
                    state = loader.state_dict()
            told = {"seen": seen, "saved": state, "state": loader.state_dict()}
    except omniload.OmniloadError as error:
        told = {"error": type(error).__name__, "message": str(error)}
    sys.stdout.write(json.dumps(told | {"rank": keywords["rank"]}) + "\n")


main(sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3]))
