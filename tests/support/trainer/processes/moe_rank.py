"""Work of a rank of a small training run: ``ranks.run(moe_rank.answer, dp=2, job={...})``.

``job``: checkpoints (a folder), first and last step, load, save_at, short_last. Each rank trains on every
``world_size``-th row.
"""

from pathlib import Path

from omniload.base.errors import OmniloadError
from tests.support.trainer.moe_builders import (
    a_batch,
    a_config,
    a_microbatch,
    a_model,
    an_optimizer,
    rows_of,
)
from tests.support.trainer.moe_cases import dp_place
from trainer_integration.checkpoint.checkpoints import Checkpoints
from trainer_integration.training.step import train_step

DEFAULTS = {"first": 0, "last": 4, "load": False, "save_at": None, "short_last": False}


def labels_of(rows):
    return sum(len(document) - 1 for row in rows for document in row)


def run(job, groups):
    # The seeds differ, so a loading rank can only continue with the loaded weights.
    model = a_model(seed=5 if job["load"] else 0)
    optimizer = an_optimizer(model, lr=1e-2)
    checkpoints = Checkpoints(Path(job["checkpoints"]), a_config().model_dump(), groups=groups)
    answer = {"results": []}
    if job["load"]:
        restored = checkpoints.load(model, optimizer)
        answer["restored"] = {"step": restored.step, "loader": restored.loader_state}
    for step in range(job["first"], job["last"]):
        # The last step of a finite run may have fewer rows than ranks.
        short = job["short_last"] and step == job["last"] - 1
        rows = rows_of(step, num_rows=1 if short else 4)
        place, size = dp_place(groups)
        mine = a_microbatch(rows[place::size])
        batch = a_batch(step, [mine], loss_tokens=labels_of(rows))
        answer["results"].append(dict(train_step(model, optimizer, batch, groups).figures))
        if job["save_at"] == step + 1:
            checkpoints.save(step + 1, model, optimizer, {"version": 1, "next": step + 1})
    answer["weights"] = [float(p.detach().double().square().sum()) for p in model.parameters()]
    return answer


def answer(groups, *, job):
    """Return the result of the rank, or the error that ended it."""
    try:
        return run(DEFAULTS | job, groups)
    except OmniloadError as error:
        return {"error": type(error).__name__, "message": str(error)}
