"""Stages of a pipeline, as processes of torch: each has what it uses, and they train as whole batches do."""

import subprocess

import pytest
import yaml

import omniload
from tests.house.modules import ROOT
from tests.support.plane.front_ranks import a_mix_file, environment, results_of
from tests.support.ports import free_port
from tests.support.trainer.stages import embedding, fresh, last_layer, sums_of

SCRIPT = ROOT / "tests" / "support" / "plane" / "processes" / "stage_rank.py"
LIMIT_S = 240


def test_stages_that_get_their_own_columns_train_as_whole_batches_do(warm_python, tmp_path):
    mix = a_mix_file(tmp_path)
    evaluated = mix.with_name("held_out.yaml")
    evaluated.write_text(
        yaml.safe_dump(yaml.safe_load(mix.read_text()) | {"splits": {"eval": 0.3}})
    )
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "4"]
    words += ["--master-port", str(free_port())]

    done = subprocess.run(
        [warm_python.path, *words, str(SCRIPT), str(mix), str(evaluated)],
        env=environment(**warm_python.for_launchers),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )

    ranks = {result["rank"]: result for result in results_of(done.stdout)}
    assert len(ranks) == 4, done.stderr[-3000:]
    first, last = fresh()
    with omniload.open(mix, rank=0, world_size=1, steps=3) as loader:
        whole = list(loader)
    for step, batch in enumerate(whole):
        loss = last_layer(last, embedding(first, batch), batch)
        loss.backward()
        for rank in (0, 1):
            assert ranks[rank]["seen"][step]["tokens"] == batch.tokens.tolist()
            assert "no labels; " in ranks[rank]["seen"][step]["labels"]
        for rank in (2, 3):
            assert ranks[rank]["seen"][step]["labels"] == batch.labels.tolist()
            assert "stage 1 of 2 along pp, the last one" in ranks[rank]["seen"][step]["tokens"]
            assert ranks[rank]["losses"][step] == pytest.approx(float(loss.detach()))
    for rank, weight in enumerate((first, first, last, last)):
        assert ranks[rank]["gradient"] == pytest.approx(sums_of(weight.grad), rel=1e-9)

    # The states of all are those of one process, which goes on from them with the whole batches.
    assert all(result["states"] == ranks[0]["states"] for result in ranks.values())
    with omniload.open(mix, rank=0, world_size=1, steps=3, state=ranks[3]["states"][1]) as loader:
        (again,) = loader
    assert again.tokens.tolist() == whole[2].tokens.tolist()

    # So has each its columns where rank 0 deals batches, beside the training.
    with omniload.open(evaluated, split="eval", rank=0, world_size=1) as loader:
        held_out = list(loader)
    assert len(held_out) > 1
    for rank, name, other in ((1, "tokens", "labels"), (2, "labels", "tokens")):
        dealt = ranks[rank]["held_out"]
        assert [batch[name] for batch in dealt] == [getattr(b, name).tolist() for b in held_out]
        assert all(f"no {other}; " in batch[other] for batch in dealt)
