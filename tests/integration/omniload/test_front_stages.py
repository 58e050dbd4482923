"""Stages of a pipeline, as processes of torch: each has the parts that it uses, and trains as on whole batches."""

from collections import Counter

import numpy as np
import pytest
import yaml

import omniload
from tests.house.modules import ROOT
from tests.support.plane.front_ranks import a_mix_file, environment, results_of
from tests.support.ports import free_port
from tests.support.programs import finished
from tests.support.trainer.stages import embedding, fresh, last_layer, sums_of

SCRIPT = ROOT / "tests" / "support" / "plane" / "processes" / "stage_rank.py"
LIMIT_S = 240


def rows_of(ranks, kind, step, tokens_of, labels_of):
    """Return the rows of some ranks, tokens with labels, in an order that does not depend on placement."""
    tokens = [row for rank in tokens_of for row in ranks[rank][kind][step]["tokens"]]
    labels = [row for rank in labels_of for row in ranks[rank][kind][step]["labels"]]
    pairs = zip(tokens, labels, strict=True)
    return sorted((*row, *following) for row, following in pairs)


def rows_in(batch):
    """Return the rows of a whole batch in the same form."""
    whole = {"tokens": batch.tokens.tolist(), "labels": batch.labels.tolist()}
    return rows_of([{"": [whole]}], "", 0, [0], [0])


@pytest.mark.parametrize(
    "sizes",
    [
        (1, 2, 2),
        # `make test` covers ranks along dp through Ray with tensor-parallel peers (test_front_ranks.py).
        pytest.param((2, 2, 1), marks=(pytest.mark.soak, pytest.mark.ray)),
    ],
)
def test_stages_that_get_their_own_columns_train_as_whole_batches_do(warm_python, tmp_path, sizes):
    """Four processes of torch, each with its part of a model."""
    mix = a_mix_file(tmp_path)
    evaluated = mix.with_name("held_out.yaml")
    held_out = yaml.safe_load(mix.read_text()) | {"splits": {"eval": 0.3}}
    evaluated.write_text(yaml.safe_dump(held_out))
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "4"]
    words += ["--master-port", str(free_port()), str(SCRIPT), str(mix), str(evaluated)]

    done = finished(
        [warm_python.path, *words, ",".join(map(str, sizes))],
        limit_s=LIMIT_S,
        env=environment(**warm_python.for_launchers),
    )

    ranks = {result["rank"]: result for result in results_of(done.stdout)}
    assert len(ranks) == 4, done.stderr[-3000:]
    # For each tensor-parallel peer, the ranks of both stages, along dp.
    numbers = np.arange(4).reshape(sizes)
    lines = [(numbers[:, 0, tp].tolist(), numbers[:, 1, tp].tolist()) for tp in range(sizes[2])]
    first, last = fresh()
    with omniload.open(mix, rank=0, world_size=1, steps=3) as loader:
        whole = list(loader)
    for step, batch in enumerate(whole):
        loss = last_layer(last, embedding(first, batch), batch)
        loss.backward()
        for begin, end in lines:
            assert rows_of(ranks, "seen", step, begin, end) == rows_in(batch)
            told = sum(ranks[rank]["losses"][step] for rank in end)
            assert told == pytest.approx(float(loss.detach()))
            assert all("no labels; " in ranks[rank]["seen"][step]["labels"] for rank in begin)
            assert all("the last one" in ranks[rank]["seen"][step]["tokens"] for rank in end)
    for line in lines:
        for of_stage, weight in zip(line, (first, last), strict=True):
            found, wanted = Counter(), sums_of(weight.grad)
            for rank in of_stage:
                found.update(ranks[rank]["gradient"])
            assert {i: found[i] for i in wanted} == pytest.approx(wanted, rel=1e-6, abs=1e-12)

    # All have the states of one process, which resumes from them with the whole batches.
    assert all(result["states"] == ranks[0]["states"] for result in ranks.values())
    with omniload.open(mix, rank=0, world_size=1, steps=3, state=ranks[3]["states"][1]) as loader:
        (again,) = loader
    assert again.tokens.tolist() == whole[2].tokens.tolist()

    # Each rank also has its columns if rank 0 deals batches, during the training.
    with omniload.open(evaluated, split="eval", rank=0, world_size=1) as loader:
        alone = list(loader)
    assert len(alone) > 1
    for begin, end in lines:
        for step, batch in enumerate(alone):
            assert rows_of(ranks, "held_out", step, begin, end) == rows_in(batch)
            assert all("no tokens; " in ranks[rank]["held_out"][step]["tokens"] for rank in end)
