"""What can be shown of devices and types without a GPU."""

import pytest
import torch

from omniload.batch.slices import slice_for_cp
from tests.support.trainer.fake_gpus import a_rank_of_many
from tests.support.trainer.moe_builders import (
    a_config,
    a_microbatch,
    a_model,
    an_optimizer,
    rows_of,
)
from trainer_integration.moe.inputs import ModelInputs
from trainer_integration.moe.model import MoETransformer
from trainer_integration.moe.parallel import ep_transport
from trainer_integration.moe.parallel.ep_transport import RowMap, combine, dispatch

INPUTS = ModelInputs.of(a_microbatch(rows_of(0)))


def test_layers_compute_in_bfloat16_and_parameters_stay_float32():
    wide = a_model(hidden=32)
    narrow = MoETransformer(wide.config, dtype=torch.bfloat16)
    seen = []
    narrow.blocks[0].experts.register_forward_hook(lambda _m, _i, out: seen.append(out.dtype))

    loss, expected = narrow(INPUTS).token_loss, wide(INPUTS).token_loss
    loss.backward()

    assert seen == [torch.bfloat16]
    assert loss.item() == pytest.approx(expected.item(), rel=2e-2)
    assert loss.item() != expected.item()
    assert {p.grad.dtype for p in narrow.parameters()} == {torch.float32}


def test_a_model_is_built_without_memory_on_the_meta_device():
    with torch.device("meta"):
        model = MoETransformer(a_config())

    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert an_optimizer(model).gradients.is_meta


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize(
    "given",
    [{}, {"bias_rate": 0.01, "expert_groups": 2, "z_weight": 0.1}, {"capacity_factor": 1.0}],
)
def test_a_step_asks_the_device_for_no_number(varlen, given):
    """On the meta device there are none to ask for: ``item``, ``tolist`` and ``nonzero`` raise."""
    with torch.device("meta"):
        model = MoETransformer(a_config(hidden=32, **given), dtype=torch.bfloat16)
    inputs = ModelInputs.of(a_microbatch(rows_of(0)), device="meta", varlen=varlen)

    output = model(inputs)
    (output.token_loss + output.balance_loss + output.z_loss).backward()

    assert all(p.grad is not None and p.grad.is_meta for p in model.parameters())


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("given", [{}, {"capacity_factor": 1.0, "bias_rate": 0.01}])
@pytest.mark.parametrize(("transport", "waits"), [("ag_rs", 0), ("a2a", 1)])
def test_a_layer_that_peers_share_waits_for_the_device_where_all_to_all_must_know_how_many_rows_go(
    monkeypatch, transport, waits, given, varlen
):
    """Once a layer with ``a2a``, with ``ag_rs`` never; backward never."""
    asked, peers = [], 4

    def on_host(rows_PP):
        asked.append(tuple(rows_PP.shape))
        return [[6] * peers] * peers

    monkeypatch.setattr(ep_transport, "_on_host", on_host)
    config = a_config(hidden=32, num_kv_heads=4, **given)
    part = slice_for_cp(a_microbatch(rows_of(0)), 0, peers)

    with a_rank_of_many(1, peers) as groups:
        with torch.device("meta"):
            model = MoETransformer(
                config, peers=groups.sp, transport=transport, dtype=torch.bfloat16
            )
        output = model(ModelInputs.of(part, groups.sp, "meta", varlen=varlen))
        (output.token_loss + output.balance_loss + output.z_loss).backward()

    assert asked == [(peers, peers)] * waits * config.num_layers
    assert all(p.grad is not None and p.grad.is_meta for p in model.parameters())


def test_moving_rows_asks_the_device_for_no_number():
    experts = torch.empty(6, 2, dtype=torch.int64, device="meta")
    x = torch.empty(6, 8, device="meta", requires_grad=True)

    row_map = RowMap.of(experts, 4, drops=True)
    combine(dispatch(x, row_map), row_map).sum().backward()

    assert x.grad.shape == x.shape
