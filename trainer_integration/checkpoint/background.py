"""Saves beside training: the tensors are copied to the host, and a thread writes the copy.

::

    training   step 18  19 │copy│ 20  21  22  23 ...                 stands still for the copy
    thread                      └ write, digest, commit ┘            messages over a group of its own

One save at a time: the next waits for the last. A checkpoint counts once it is committed, so a
process that ends in between leaves what a save that was cut off leaves.
"""

import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from omniload.base.concurrency.threads import DaemonPool
from omniload.base.state import Json
from trainer_integration.checkpoint.saving import Saving
from trainer_integration.moe.parallel.process_groups import ProcessGroups

__all__ = ["BackgroundSaver", "Saved", "groups_for_saving"]

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
