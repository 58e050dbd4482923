import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from omniload.actors.plane import PlaneSpec
from omniload.plan.place_tree import ClientPlaceTree
from tests.support.plane.corpora import a_corpus
from tests.support.trainer.moe_builders import a_microbatch, a_model, rows_of
from trainer_integration.moe.inputs import ModelInputs
from trainer_integration.moe.parallel.process_groups import ProcessGroups
from trainer_integration.training.evaluation import evaluate, summed_losses


def test_losses_of_sources_add_up_to_the_loss_of_training():
    model = a_model()
    rows = a_microbatch(rows_of(0))
    # Every other document is of the second source.
    numbers = np.repeat(np.arange(len(rows.cu_seqlens) - 1) % 2, np.diff(rows.cu_seqlens))
    numbers = numbers.reshape(rows.source_ids_RT.shape).astype(np.int16)
    rows.source_ids_RT[rows.source_ids_RT >= 0] = numbers[rows.source_ids_RT >= 0]

    sums = summed_losses(model, rows, 3)

    loss = model(ModelInputs.of(rows)).token_loss
    assert float(sums[:, 0].sum()) == pytest.approx(float(loss.detach()), rel=1e-6)
    assert int(sums[:, 1].sum()) == int(rows.loss_mask_RT.sum())
    for source in range(3):
        mine = rows.loss_mask_RT & (rows.source_ids_RT == source)
        assert int(sums[source, 1]) == int(mine.sum())
    assert float(sums[0, 0]) > 0
    assert float(sums[1, 0]) > 0


@pytest.fixture(scope="module")
def mix(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluation")
    found = a_corpus(folder, records=30, shards=1, longest=30, mix={"stop": "each_once"})
    return PlaneSpec(mix=found, base_dir=folder, tree=ClientPlaceTree.of())


def test_an_evaluation_takes_every_document_once_and_leaves_the_model_as_it_is(mix):
    model = a_model(vocab_size=5000)
    before = [p.detach().clone() for p in model.parameters()]

    first, second = (evaluate(model, mix, ProcessGroups()) for _ in range(2))

    assert first == second
    assert first.loss.keys() == {"web", "code"}
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    # A document of n tokens predicts n - 1 of them.

    for name, labels in first.labels.items():
        lengths = [len(t) for t in pq.read_table(mix.base_dir / name / "0.parquet")["tokens"]]
        assert labels == sum(n - 1 for n in lengths)
