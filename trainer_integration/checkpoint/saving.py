"""What saving by all ranks together has in common, wherever the checkpoint goes."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Generic, TypeVar

import torch.distributed as dist
from torch import Tensor, nn

from omniload.base.errors import StateError
from omniload.base.state import Json
from trainer_integration.checkpoint.tensors import NOTHING, Optimizer, Restored, tensors_of
from trainer_integration.moe.parallel.process_groups import ProcessGroups

__all__ = ["ALONE", "Saving"]

Committed = TypeVar("Committed")
"""Names a committed checkpoint: a folder here, or one within a namespace."""
ALONE = ProcessGroups()
"""Of one rank."""


class Saving(ABC, Generic[Committed]):
    """The checkpoints of one run, saved by all ranks together. Every rank calls every method, in the same order."""

    def __init__(self, model_config: Mapping[str, Json], keep: int, groups: ProcessGroups) -> None:
        """Save for the ranks of ``groups``, and keep the newest ``keep``; ``model_config`` must not change."""
        self._model_config = dict(model_config)
        self._keep = keep
        self._groups, self._group = groups, groups.world
        self._rank = 0 if groups.world is None else dist.get_rank(groups.world)

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: Optimizer,
        loader_state: Mapping[str, Json],
        progress: Mapping[str, Json] = NOTHING,
    ) -> Committed:
        """Save and commit; when this returns on any rank the checkpoint is durable.

        Args:
            step: Steps done.
            model: Its parameters are saved.
            optimizer: Has state: one of torch's has taken a step.
            loader_state: The data plane's state after the same steps; rank 0's is saved.
            progress: Of the training besides; rank 0's is saved.

        Returns:
            The committed folder.

        Raises:
            NoRoomError: It does not fit; what was written of it is removed.
            StateError: A checkpoint of this step exists, or the optimiser has no state.
            UnavailableError: The store does not answer.
        """
        return self.write(step, self.tensors_at(step, model, optimizer), loader_state, progress)

    def tensors_at(self, step: int, model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
        """Return what ``write`` takes.

        Raises:
            StateError: The optimiser has no state.
        """
        if not optimizer.state:
            raise StateError(f"the optimiser has no state at step {step}; save after a step")
        return tensors_of(model, optimizer, self._groups)

    @abstractmethod
    def load(
        self, model: nn.Module, optimizer: Optimizer, *, step: int | None = None
    ) -> Restored | None:
        """Load the checkpoint of a step, or the newest, into ``model`` and ``optimizer``, in place.

        Every byte is checked before it is used, or as it is read.

        Args:
            model: Built from the same configuration; any number of ranks.
            optimizer: Its optimiser, used or fresh.
            step: Which checkpoint; None takes the newest.

        Returns:
            What else was saved; None where there is no checkpoint.

        Raises:
            IntegrityError: A part is missing or not what was saved; raised on all ranks.
            StateError: Written by another release or for another model, or not there.
            UnavailableError: The store does not answer.
        """

    @abstractmethod
    def write(
        self,
        step: int,
        tensors: dict[str, Tensor],
        loader_state: Mapping[str, Json],
        progress: Mapping[str, Json] = NOTHING,
    ) -> Committed:
        """Save and commit tensors; see ``save``."""
