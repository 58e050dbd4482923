"""Model and optimiser as tensors by name, and what a checkpoint holds beside them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from omniload.base.errors import StateError
from omniload.base.state import Json, JsonObject
from trainer_integration.moe.model import is_of_experts
from trainer_integration.moe.parallel.process_groups import ProcessGroups

__all__ = ["NOTHING", "Optimizer", "Restored", "require_same_model", "tensors_of"]

NOTHING: Mapping[str, Json] = MappingProxyType({})
"""Of who keeps nothing beside tensors and the data's place."""
_ALONE = ProcessGroups()


class Optimizer(Protocol):
    """What checkpoints know of an optimiser: torch's have it too."""

    @property
    def state(self) -> Mapping[Tensor, Mapping[str, Any]]:
        """What is kept of each parameter, by names; of it only tensors are saved."""


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
    model: nn.Module, optimizer: Optimizer, groups: ProcessGroups = _ALONE
) -> dict[str, Tensor]:
    """Return all tensors by name: what is read into them is in the model and the optimiser.

    The optimiser's other settings come from configuration. Experts that ranks share out are shards of all
    experts: a checkpoint does not depend on who held which.
    """
    if not optimizer.state and isinstance(optimizer, torch.optim.Optimizer):
        _make_state(model, optimizer)
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for kind, value in optimizer.state.get(parameter, NOTHING).items():
            # What is none, as a count of torch's older optimisers, would need a pickle.
            if isinstance(value, Tensor):
                tensors[f"optimizer.state.{name}.{kind}"] = value
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
    # Without sharding every data-parallel rank holds the same experts, of which one is saved.
    over_dp = value.placements[0] if isinstance(value, DTensor) else Replicate()
    return DTensor.from_local(_held(value), mesh, (over_dp, Shard(0)), run_check=False)


def _make_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    # With fully sharded models and torch's compiler behind it: only who comes with torch's optimiser waits for that.
    from torch.distributed.checkpoint.state_dict import (  # noqa: PLC0415
        get_optimizer_state_dict,
    )

    # Reading the state makes it, by a step without effect, and is refused while gradients exist.
    optimizer.zero_grad(set_to_none=True)
    get_optimizer_state_dict(model, optimizer)


def _held(value: Tensor) -> Tensor:
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
