"""A stage of a pipeline under Megatron's names: what it does not get is ``None``."""

import pytest

from omniload.batch.microbatch import Batch
from omniload.batch.stages import Stage, own_part
from omniload.front.batches.training_batch import TrainingBatch
from omniload.mix.config import PipelineConfig
from tests.support.plane.builders import a_microbatch
from trainer_integration.hosts.megatron import microbatch
from trainer_integration.loader.torch_arrays import TorchArrays


def at_stage(number):
    rows = a_microbatch([[(0, 0, 0, 0, 8, 8)]], length=8)
    whole = Batch(step=0, microbatches=(rows,), loss_tokens=7, imbalance=1.0, bound=1.0)
    stage = Stage.at(number, 3, PipelineConfig().model_dump())
    return microbatch(TrainingBatch(own_part(whole, 0, (), stage), TorchArrays(), "shifted"))


@pytest.mark.parametrize(
    ("number", "none"),
    [(0, {"labels", "loss_mask"}), (1, {"tokens", "labels", "loss_mask"}), (2, {"tokens"})],
)
def test_what_a_stage_does_not_get_is_none(number, none):
    found = at_stage(number)

    assert {name for name, value in found.items() if value is None} == none | {"attention_mask"}
    assert found["position_ids"].tolist() == [list(range(8))]
    assert found["max_seqlen"] == 8
