"""Model and optimiser as tensors by name, and what a checkpoint holds beside them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from omniload.base.errors import StateError
from omniload.base.state import Json, JsonObject
from trainer_integration.moe.model import is_of_experts
from trainer_integration.moe.parallel.process_groups import ProcessGroups

__all__ = ["NOTHING", "Restored", "require_same_model", "set_optimizer", "tensors_of"]

NOTHING: Mapping[str, Json] = MappingProxyType({})
"""Of who keeps nothing beside tensors and the data's place."""
_ALONE = ProcessGroups()
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What a checkpoint held beside the tensors that were loaded in place."""

    step: int
    """Steps done when it was saved: the number of the next one."""
    loader_state: JsonObject
    """State of the data plane at that step."""
    progress: JsonObject = field(default_factory=dict)
    """Of the training besides; empty in checkpoints of older releases."""


def tensors_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, groups: ProcessGroups = _ALONE
) -> dict[str, Tensor]:
    """Return all tensors by name. The optimiser's other settings come from configuration.

    Experts that ranks share out are shards of all experts: a checkpoint does not depend on who held which.
    """
    # A fresh optimiser makes its state here, and refuses to while gradients exist.
    optimizer.zero_grad(set_to_none=True)
    of_model, of_optimizer = _flat_states(model, optimizer)
    tensors = {
        **{f"model.{name}": value for name, value in of_model.items()},
        **{
            f"optimizer.{name}": value
            for name, value in of_optimizer.items()
            if isinstance(value, Tensor)
        },
    }
    mesh = groups.mesh
    if mesh is None or groups.sp.size == 1:
        return tensors
    return {
        # A scalar, such as the optimiser's count of steps, is no expert's part.
        name: _of_all_experts(value, mesh) if is_of_experts(name) and value.ndim else value
        for name, value in tensors.items()
    }


def _of_all_experts(value: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return the experts of all sequence-parallel peers, of which this rank holds some, or parts of some."""
    over_dp = value.placements[0] if isinstance(value, DTensor) else Replicate()
    return DTensor.from_local(_held(value), mesh, (over_dp, Shard(0)), run_check=False)


def set_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]
) -> None:
    """Give the optimiser the state that was loaded into ``tensors``."""
    _, state = _flat_states(model, optimizer)
    loaded = {
        # What is no tensor, such as betas, was not saved, and stays as the configuration of this run has it.
        name: _as_held(tensors.get(f"optimizer.{name}", value), value)
        for name, value in state.items()
    }
    set_optimizer_state_dict(model, optimizer, loaded, options=_FLAT)


def _as_held(loaded: Any, own: Any) -> Any:  # noqa: ANN401 -- as ``_held``
    """Return a loaded value in the form of the optimiser's own."""
    if not isinstance(own, DTensor):
        return _held(loaded)
    own.to_local().copy_(_held(loaded))
    return own


def _held(value: Any) -> Any:  # noqa: ANN401 -- settings of the optimiser are of any type
    """Return what this rank holds of a tensor."""
    return value.to_local() if isinstance(value, DTensor) else value


def require_same_model(path: object, saved: Mapping[str, Json], own: Mapping[str, Json]) -> None:
    """Refuse a checkpoint of another model.

    Args:
        path: Of the checkpoint, for messages.
        saved: Configuration of the model in it.
        own: Configuration of the model to load into.

    Raises:
        StateError: They differ; every key that does is named.
    """
    changed = [
        f"{key} was {saved.get(key)!r} and is {own.get(key)!r}"
        for key in sorted(saved.keys() | own.keys())
        if saved.get(key) != own.get(key)
    ]
    if changed:
        raise StateError(
            f"{path} holds another model: {'; '.join(changed)}; restore the configuration "
            "or start in a new folder"
        )


def _flat_states(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return both states by name: tensors, and settings of the optimiser, which torch types as nested."""
    of_model, of_optimizer = get_state_dict(model, optimizer, options=_FLAT)
    return dict(of_model), dict(of_optimizer)
