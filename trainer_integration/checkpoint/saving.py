"""Saving by all ranks together, wherever the checkpoint goes, at once or beside training.

Beside training, the tensors are copied to the host, and a thread writes the copy::

    training   step 18  19 │copy│ 20  21  22  23 ...                 stands still for the copy
    thread                      └ write, digest, commit ┘            messages over a group of its own

One save at a time: the next waits for the last. A checkpoint counts once it is committed, so a
process that ends in between leaves what a save that was cut off leaves.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from omniload.base.concurrency.threads import DaemonPool
from omniload.base.errors import StateError
from omniload.base.state import Json
from trainer_integration.checkpoint.tensors import NOTHING, Optimizer, Restored, tensors_of
from trainer_integration.moe.parallel.process_groups import ProcessGroups

__all__ = ["ALONE", "BackgroundSaver", "Saved", "Saving", "groups_for_saving"]

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
        # torch's makes its state in its first step; saved before, it would be missing in the checkpoint.
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


_LONGEST_S = 3600.0
"""Of a message between the ranks of a save: the slowest of them may write for long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint that is committed."""

    step: int
    took_s: float
    """From the copy to the commit."""


def groups_for_saving(groups: ProcessGroups) -> ProcessGroups:
    """Return the groups with another for the messages of saves, so that they do not mix with those of steps.

    All ranks call it.
    """
    if groups.world is None:
        return groups
    # Gloo pairs messages by their order within a group: those of a save would meet those of a step.
    world = dist.new_group(backend="gloo", timeout=timedelta(seconds=_LONGEST_S))
    return replace(groups, world=world)


class BackgroundSaver:
    """Writes checkpoints from a thread. Every rank calls every method, in the same order."""

    def __init__(self, checkpoints: Saving[Any]) -> None:
        """Save by ``checkpoints``, whose group must be of ``groups_for_saving``."""
        self._checkpoints = checkpoints
        # Daemons: a store that hangs keeps no rank from ending.
        self._pool = DaemonPool(1, "omniload-save")
        self._copy: dict[str, Tensor] = {}
        self._writing: Future[Saved] | None = None

    def start(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        loader_state: Mapping[str, Json],
        progress: Mapping[str, Json],
    ) -> None:
        """Copy ``tensors`` and begin to write; see ``Checkpoints.write``. The last save must be over."""
        assert self._writing is None, "finish the last save first"
        self._take(tensors)
        began_s, copied = time.perf_counter(), dict(self._copy)

        def write() -> Saved:
            self._checkpoints.write(step, copied, loader_state, progress)
            return Saved(step=step, took_s=time.perf_counter() - began_s)

        self._writing = self._pool.submit(write)

    @property
    def is_ready(self) -> bool:
        """Whether a save has ended that ``finish`` has not told of."""
        return self._writing is not None and self._writing.done()

    def finish(self) -> Saved | None:
        """Wait for the save under way; ``None`` where there is none.

        Raises:
            OmniloadError: As the save raised it.
        """
        # Taken off before it is waited for: a save that failed is told once.
        writing, self._writing = self._writing, None
        return None if writing is None else writing.result()

    def _take(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy into the buffers of the last save, which are made where they do not fit."""
        for name, tensor in tensors.items():
            buffer = self._copy.get(name)
            if buffer is None or _form_of(buffer) != _form_of(tensor):
                # Only pinned memory is copied to without waiting.
                pinned = tensor.device.type == "cuda"
                # Of a shard too: what it is a shard of stays, wherever its numbers lie.
                buffer = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
            _held(buffer).copy_(_held(tensor), non_blocking=True)
            self._copy[name] = buffer
        for gone in self._copy.keys() - tensors.keys():
            del self._copy[gone]
        # Copies from a GPU have only begun above, and the next step writes over what they read.
        if any(tensor.device.type == "cuda" for tensor in tensors.values()):
            torch.cuda.synchronize()


def _held(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor, without its gradient."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _form_of(tensor: Tensor) -> tuple[object, ...]:
    shards = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else ()
    return (tensor.shape, tensor.dtype, *shards)
