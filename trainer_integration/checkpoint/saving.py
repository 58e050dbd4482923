"""Saving by all ranks together, wherever the checkpoint goes: either at once, or in parallel with training.

In parallel with training, the tensors are copied to the host, and a thread writes the copy::

    training   step 18  19 │copy│ 20  21  22  23 ...                 stands still for the copy
    thread                      └ write, digest, commit ┘            messages over a group of its own

There is one save at a time: the next waits for the last. A checkpoint counts once it is committed, so a process that
ends before that leaves the same as a save that was cut off.
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
"""Name of a committed checkpoint: a folder here, or one within a namespace."""
ALONE = ProcessGroups()
"""Groups of a single rank."""


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
            optimizer: Must have state: an optimiser of torch must have taken a step.
            loader_state: The data plane's state after the same steps; rank 0's is saved.
            progress: Other progress of the training; rank 0's is saved.

        Returns:
            The committed folder.

        Raises:
            NoRoomError: It does not fit; the part that was written is removed.
            StateError: A checkpoint of this step exists, or the optimiser has no state.
            UnavailableError: The store does not answer.
        """
        return self.write(step, self.tensors_at(step, model, optimizer), loader_state, progress)

    def tensors_at(self, step: int, model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
        """Return the tensors that ``write`` takes.

        Raises:
            StateError: The optimiser has no state.
        """
        # torch's optimisers create their state in the first step; a checkpoint saved before would lack it.
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
            step: Step of the checkpoint; None takes the newest.

        Returns:
            The other saved values; None if there is no checkpoint.

        Raises:
            IntegrityError: A part is missing or not what was saved; raised on all ranks.
            StateError: The checkpoint is of another release or another model, or does not exist.
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
"""Limit for a message between the ranks of a save, because the slowest rank may write for long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint that is committed."""

    step: int
    took_s: float
    """Seconds from the copy to the commit."""


def groups_for_saving(groups: ProcessGroups) -> ProcessGroups:
    """Return groups with a separate one for the messages of saves, so that they do not mix with those of steps.

    All ranks call it.
    """
    if groups.world is None:
        return groups
    # Gloo pairs messages by their order within a group, so messages of a save could be paired with those of a step.
    world = dist.new_group(backend="gloo", timeout=timedelta(seconds=_LONGEST_S))
    return replace(groups, world=world)


class BackgroundSaver:
    """Writes checkpoints from a thread. Every rank calls every method, in the same order."""

    def __init__(self, checkpoints: Saving[Any]) -> None:
        """Save by ``checkpoints``, whose group must be of ``groups_for_saving``."""
        self._checkpoints = checkpoints
        # Daemon threads, so that a store that hangs does not keep a rank from ending.
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
        """Whether a save has ended whose result ``finish`` has not returned yet."""
        return self._writing is not None and self._writing.done()

    def finish(self) -> Saved | None:
        """Wait for the save under way; ``None`` if there is none.

        Raises:
            OmniloadError: The error of the save.
        """
        # Removed before the wait, so that a failed save is reported once.
        writing, self._writing = self._writing, None
        return None if writing is None else writing.result()

    def _take(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy into the buffers of the last save; buffers that do not fit are made anew."""
        for name, tensor in tensors.items():
            buffer = self._copy.get(name)
            if buffer is None or _form_of(buffer) != _form_of(tensor):
                # Copies are asynchronous only to pinned memory.
                pinned = tensor.device.type == "cuda"
                # Also for a shard, whose description stays the same wherever its numbers are.
                buffer = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
            _held(buffer).copy_(_held(tensor), non_blocking=True)
            self._copy[name] = buffer
        for gone in self._copy.keys() - tensors.keys():
            del self._copy[gone]
        # Copies from a GPU have only begun above, and the next step overwrites their source.
        if any(tensor.device.type == "cuda" for tensor in tensors.values()):
            torch.cuda.synchronize()


def _held(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, without its gradient."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _form_of(tensor: Tensor) -> tuple[object, ...]:
    shards = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else ()
    return (tensor.shape, tensor.dtype, *shards)
