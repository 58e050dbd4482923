"""Batches that a loader puts on a GPU: what it made, however much the GPU still has to do.

Products of matrices stand before each look at a batch, so that the next batches are copied, and the memory of the last
ones is given away, long before the GPU comes to it.
"""

import numpy as np
import pytest
import torch

import omniload
from tests.support.plane.corpora import a_corpus
from tests.support.trainer.gpus import GPU, kept_busy, needs_gpu
from tests.support.trainer.run_lines import write_mix
from trainer_integration.loader.torch_arrays import TorchSideStream

pytestmark = needs_gpu

_FIELDS = ("tokens", "labels", "position_ids", "source_ids", "cu_seqlens", "document_sources")
_STEPS = 40
_LENGTH = 128


@pytest.fixture(params=[4, 128], ids=["small steps", "large steps"])
def mix_file(tmp_path, request):
    mix = a_corpus(
        tmp_path, records=400, rows=request.param, micro_rows=request.param // 4, length=_LENGTH
    )
    write_mix(tmp_path / "mix.yaml", mix)
    return tmp_path / "mix.yaml"


def fields_of(batch):
    """Return every field of the batch and of its microbatches."""
    return [getattr(rows, name) for rows in (batch, *batch.microbatches) for name in _FIELDS]


def made(mix_file, **how):
    """Return the fields of each batch as a loader without a GPU makes them."""
    with omniload.open(mix_file, steps=_STEPS, arrays="numpy", **how) as loader:
        return [[array.copy() for array in fields_of(batch)] for batch in loader]


def test_a_batch_is_whole_whenever_the_gpu_comes_to_it(mix_file):
    seen = []
    with omniload.open(mix_file, steps=_STEPS, device="cuda") as loader:
        for batch in loader:
            kept_busy(10)
            seen.append([tensor.clone() for tensor in fields_of(batch)])
    torch.cuda.synchronize()

    assert len(seen) == _STEPS
    for step, (tensors, arrays) in enumerate(zip(seen, made(mix_file), strict=True)):
        assert {tensor.device.type for tensor in tensors} == {"cuda"}
        for tensor, array in zip(tensors, arrays, strict=True):
            assert np.array_equal(tensor.cpu().numpy(), array), f"step {step}"


def test_a_copy_does_not_stand_behind_what_the_gpu_computes():
    side = TorchSideStream(GPU, torch.cuda)
    rows = torch.arange(1 << 20)
    side.copied(rows)  # the first makes the memory that it starts in
    torch.cuda.synchronize()
    computed = kept_busy(300)

    copy, mark = side.copied(rows), side.mark()
    mark.synchronize()
    copied_first = not computed.query()
    side.arrive([copy], mark)

    assert copied_first
    assert torch.equal(copy.cpu(), rows)


def test_a_state_of_a_loader_with_a_gpu_goes_on_without_one(mix_file):
    with omniload.open(mix_file, steps=_STEPS, device="cuda") as loader:
        for _ in range(5):
            tokens = loader.next_batch().tokens
        state = loader.state_dict()
    whole = made(mix_file)

    rest = made(mix_file, state=state)

    assert np.array_equal(tokens.cpu().numpy(), whole[4][0])
    assert len(rest) == _STEPS - 5
    for arrays, expected in zip(rest, whole[5:], strict=True):
        assert all(map(np.array_equal, arrays, expected))


def test_a_gpu_that_is_not_there_is_refused(mix_file):
    count = torch.cuda.device_count()
    with pytest.raises(omniload.ConfigError, match=f"sees {count} of type cuda"):
        omniload.open(mix_file, device=f"cuda:{count}")
