"""One rank of a job that samples groups, as a user would write it. Prints its batches as JSON.

Its state after each batch lies beside the mix, for ``--from-state``; of ranks that are killed one ends in its N-th
rollout, so within a batch. Ranks of one prompts, along tp, answer and judge each in its own way.

sampling_rank.py MIX GROUPS BATCHES [--from-state] [--killed-in N] [--tp]
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import omniload
from omniload.front.openers import torch_part
from tests.support.plane.processes.telling import tell


def rollout(prompts):
    """Return rewards by the number of the prompt: in every three prompts, one is all right and one is all wrong."""
    rewards = [[[1, 1], [0, 0], [1, 0]][prompt.key[1] % 3] for prompt in prompts]
    answers = [[prompt.tokens[:i] for i in range(2)] for prompt in prompts]
    return omniload.Rollouts(rewards=rewards, answers=answers)


def told_of(batch):
    return {
        "digest": batch.digest,
        "rounds": batch.rounds,
        "groups": [
            [group.prompt.key, group.prompt.tokens.tolist(), [a.tolist() for a in group.answers]]
            for group in batch.groups
        ],
    }


def message_of_an_exchange_that_one_rank_leaves():
    """Return the error that rank 0 gets if rank 1 does not take part."""
    # Long enough for ranks of a busy machine to meet.
    exchange = torch_part("exchange_of")(None, 3.0)
    found = [len(part) for part in exchange.all_gather(b"x" * (3 + exchange.rank))]
    said = ""
    if exchange.rank == 0:
        try:
            exchange.all_gather(b"x")
        except omniload.UnavailableError as error:
            said = str(error)
    dist.barrier()
    return found, said


def main():
    path, groups, batches, *how = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    left = [] if how else message_of_an_exchange_that_one_rank_leaves()
    mesh, rollouts = None, 0
    if how[:1] == ["--tp"]:
        mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))

    def killed_in_time(prompts):
        nonlocal rollouts
        rollouts += 1
        if rank == 1 and how[:1] == ["--killed-in"] and rollouts == int(how[1]):
            os.kill(os.getpid(), signal.SIGKILL)
        if mesh is not None and rank:
            return omniload.Rollouts(
                rewards=[[rank, 0.5]] * len(prompts), answers=[[[rank], []]] * len(prompts)
            )
        return rollout(prompts)

    with omniload.open(path, mesh=mesh, run_dir=f"{path}.run", arrays="numpy") as loader:
        sampler = omniload.DynamicSampler(loader, groups=groups, timeout=60)
        if how[:1] == ["--from-state"]:
            sampler.load_state_dict(json.loads(Path(path).with_name("state-0.json").read_text()))
        found = []
        for _ in range(batches):
            found.append(told_of(sampler.next_batch(killed_in_time)))
            state = sampler.state_dict()
            Path(path).with_name(f"state-{rank}.json").write_text(json.dumps(state))
    told = {"rank": rank, "left": left, "state": state, "batches": found}
    tell(told)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
