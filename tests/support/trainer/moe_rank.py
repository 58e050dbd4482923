"""One rank of a small training run, as a process of its own: ``python -m tests.support.trainer.moe_rank JOB``.

``JOB`` is JSON: rank, world_size, rendezvous (a file), checkpoints (a folder), first and last
step, load, save_at, short_last, results (a file). Each rank trains on every ``world_size``-th row.
"""

import dataclasses
import json
import sys
from pathlib import Path

import torch.distributed as dist

from omniload.base.errors import OmniloadError
from tests.support.trainer.moe_builders import (
    a_batch,
    a_config,
    a_microbatch,
    a_model,
    an_optimizer,
    rows_of,
)
from trainer_integration.checkpoint.checkpoints import Checkpoints
from trainer_integration.moe.parallel.process_groups import ProcessGroups
from trainer_integration.training.step import train_step


def labels_of(rows):
    return sum(len(document) - 1 for row in rows for document in row)


def run(job, groups):
    # Seeds differ, so what a loading rank goes on with is what it loaded.
    model = a_model(seed=5 if job["load"] else 0)
    optimizer = an_optimizer(model, lr=1e-2)
    checkpoints = Checkpoints(Path(job["checkpoints"]), a_config().model_dump(), groups=groups)
    answer = {"results": []}
    if job["load"]:
        restored = checkpoints.load(model, optimizer.adamw)
        answer["restored"] = {"step": restored.step, "loader": restored.loader_state}
    for step in range(job["first"], job["last"]):
        # The last step of a finite run may have fewer rows than ranks.
        short = job["short_last"] and step == job["last"] - 1
        rows = rows_of(step, num_rows=1 if short else 4)
        mine = a_microbatch(rows[job["rank"] :: job["world_size"]])
        batch = a_batch(step, [mine], loss_tokens=labels_of(rows))
        result = dataclasses.asdict(train_step(model, optimizer, batch, groups))
        answer["results"].append(result)
        if job["save_at"] == step + 1:
            checkpoints.save(step + 1, model, optimizer.adamw, {"version": 1, "next": step + 1})
    answer["weights"] = [float(p.detach().double().square().sum()) for p in model.parameters()]
    return answer


def main():
    job = json.loads(sys.argv[1])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job['rendezvous']}",
        rank=job["rank"],
        world_size=job["world_size"],
    )
    try:
        answer = run(job, ProcessGroups.of(job["world_size"], 1))
    except OmniloadError as error:
        answer = {"error": type(error).__name__, "message": str(error)}
    Path(job["results"]).write_text(json.dumps(answer))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
