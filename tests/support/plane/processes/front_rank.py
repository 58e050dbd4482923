"""One rank of a job that uses ``omniload.open``, as a user would write it. Prints its batches as JSON.

front_rank.py MIX KEYWORDS      keywords as JSON; "plan" names the further actions of the rank
"""

import json
import os
import signal
import sys

PLAN = json.loads(sys.argv[2]).pop("plan", "")
if "ray first" in PLAN:
    import ray  # noqa: F401 -- that it is there is what is tested
if "group" in PLAN:
    import torch.distributed as dist
if "group first" in PLAN:
    dist.init_process_group("gloo")
if "group by hand" in PLAN:
    dist.init_process_group(
        "gloo", init_method=os.environ["PLACE"], rank=int(os.environ["NUMBER"]), world_size=2
    )
if f"rank {os.environ.get('RANK')} stays away" in PLAN:
    sys.exit(0)

ASKED_TO_END = []
if "asked to end" in PLAN:
    signal.signal(signal.SIGTERM, lambda number, _: ASKED_TO_END.append(number))

import omniload  # noqa: E402 -- the order of imports is what is tested
from tests.support.plane.processes.telling import tell  # noqa: E402 -- likewise

KEYWORDS = {key: value for key, value in json.loads(sys.argv[2]).items() if key != "plan"}
HELD_OUT = KEYWORDS.pop("evaluates", "")
"""Mix with the split that is evaluated during the second step."""


def with_mesh(keywords):
    """Return the keywords with torch's mesh for its sizes by name."""
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415 -- slow, and most go without

    names, sizes = zip(*keywords["mesh"].items(), strict=True)
    return keywords | {"mesh": init_device_mesh("cpu", sizes, mesh_dim_names=names)}


if "mesh" in KEYWORDS:
    KEYWORDS = with_mesh(KEYWORDS)


def evaluation_of():
    """Open an evaluation."""
    of_ranks = {key: KEYWORDS[key] for key in ("mesh",) if key in KEYWORDS}
    return omniload.open(HELD_OUT, split="eval", **of_ranks)


def begun(held_out):
    """Begin an evaluation before the training, where there is one; add its first batch."""
    early = evaluation_of() if HELD_OUT else None
    if early is not None:
        batch = early.next_batch()
        held_out.append([batch.step, batch.tokens.tolist()])
    return early


def evaluated(early, held_out):
    """Add the batches of an evaluation that began before the training, after those of another, which is left early."""
    with evaluation_of() as broken_off:
        next(iter(broken_off))
    with early:
        held_out.extend([batch.step, batch.tokens.tolist()] for batch in early)


def main():
    seen, states, held_out = [], [], []
    try:
        early = begun(held_out)
        with omniload.open(sys.argv[1], **KEYWORDS) as loader:
            for batch in loader:
                seen.append([batch.step, batch.tokens.tolist()])
                if "tells its first" in PLAN and len(seen) == 1:
                    tell({"pid": os.getpid()})
                if "mesh" in KEYWORDS:
                    states.append(loader.state_dict())
                if HELD_OUT and batch.step == 1:
                    evaluated(early, held_out)
                if "asked to end" in PLAN and batch.step == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                if "back once" in PLAN and batch.step == 1:
                    state = loader.state_dict()
                if "back once" in PLAN and len(seen) == 4:
                    loader.load_state_dict(state)
    except omniload.OmniloadError as error:
        tell({"error": type(error).__name__, "message": str(error)})
        return error.exit_code
    if "group last" in PLAN:
        dist.init_process_group("gloo")
        dist.barrier()
        dist.destroy_process_group()
    rank = int(os.environ.get("RANK", "0"))
    used = {"ray": "ray" in sys.modules, "held_out": held_out}
    tell({"rank": rank, "seen": seen, "asked": len(ASKED_TO_END), "states": states, **used})
    return 0


def main_of_attempts():
    """Open a loader with each set of keywords, one after another; print the refusals."""
    shared, refused = {key: KEYWORDS[key] for key in KEYWORDS if key != "attempts"}, []
    for more in KEYWORDS["attempts"]:
        keywords = shared | more
        try:
            with omniload.open(keywords.pop("mix", sys.argv[1]), **keywords) as loader:
                loader.start()
                with omniload.open(sys.argv[1], rank=0, world_size=1, steps=1) as alone:
                    alone.next_batch()
                omniload.open(sys.argv[1], **keywords).start()
        except omniload.OmniloadError as error:
            refused.append([type(error).__name__, str(error)])
    tell({"refused": refused})
    return 0


sys.exit(main_of_attempts() if "attempts" in KEYWORDS else main())
