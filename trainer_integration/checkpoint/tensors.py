"""Model and optimiser as tensors by name, and the other content of a checkpoint."""

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
"""For code that keeps nothing besides tensors and the data's position."""
_ALONE = ProcessGroups()


class Optimizer(Protocol):
    """The part of an optimiser that checkpoints use; torch's optimisers have it too."""

    @property
    def state(self) -> Mapping[Tensor, Mapping[str, Any]]:
        """State of each parameter, by names; only its tensors are saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """Content of a checkpoint besides the tensors that were loaded in place."""

    step: int
    """Steps done when it was saved, which is the number of the next step."""
    loader_state: JsonObject
    """State of the data plane at that step."""
    progress: JsonObject = field(default_factory=dict)
    """Other progress of the training; empty in checkpoints of older releases."""


def tensors_of(
    model: nn.Module, optimizer: Optimizer, groups: ProcessGroups = _ALONE
) -> dict[str, Tensor]:
    """Return all tensors by name; reading into them changes the model and the optimiser.

    The optimiser's other settings come from configuration. Experts that are divided among ranks are shards of all
    experts, so a checkpoint does not depend on which rank held which experts.
    """
    if not optimizer.state and isinstance(optimizer, torch.optim.Optimizer):
        _make_state(model, optimizer)
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for kind, value in optimizer.state.get(parameter, NOTHING).items():
            # A value that is no tensor, such as the count of torch's older optimisers, would need a pickle.
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
    # Without sharding, every data-parallel rank holds the same experts, and one copy is saved.
    over_dp = value.placements[0] if isinstance(value, DTensor) else Replicate()
    return DTensor.from_local(_held(value), mesh, (over_dp, Shard(0)), run_check=False)


def _make_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    # This import loads fully sharded models and torch's compiler, so only users of torch's optimisers wait for it.
    from torch.distributed.checkpoint.state_dict import (  # noqa: PLC0415
        get_optimizer_state_dict,
    )

    # Reading the state creates it, by a step without effect, and is refused while gradients exist.
    optimizer.zero_grad(set_to_none=True)
    get_optimizer_state_dict(model, optimizer)


def _held(value: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return value.to_local() if isinstance(value, DTensor) else value


def require_same_model(path: object, saved: Mapping[str, Json], own: Mapping[str, Json]) -> None:
    """Refuse a checkpoint of another model.

    Args:
        path: Path of the checkpoint, for messages.
        saved: Configuration of the model in it.
        own: Configuration of the model to load into.

    Raises:
        StateError: They differ; names every key that does.
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
