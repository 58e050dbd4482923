"""Lightning: a ``DataLoader`` whose state belongs to the batch that the training step has received.

Lightning saves and loads the state of loaders by itself. Three habits need care. From a loader without a length, it
takes a batch ahead, to recognise the last one. It saves no global generator, so the order of later epochs must come
from a generator of the loader. And it saves only rank 0's state.
"""

import inspect
import os
from collections.abc import Iterator, Mapping
from typing import Any, Self

import torch
import torch.distributed as dist
from typing_extensions import override

from omniload.base.errors import StateError
from trainer_integration.loader import data_loader

__all__ = ["DataLoader"]

_RANK = "saved_by_rank"


class DataLoader(data_loader.DataLoader):
    """Our loader for Lightning's ``Trainer``. The arguments are the same.

    Without ``generator=`` it shuffles with its own generator, which begins at the seed of the process
    (``seed_everything``) and is part of the state.
    """

    _before: dict[str, Any] | None = None
    """State before the last batch; ``None`` once Lightning is done with that batch."""
    _latest: Iterator[Any] | None = None

    def __init__(self, dataset: Any, *args: Any, **keywords: Any) -> None:
        """Take the arguments of ``trainer_integration.DataLoader``."""
        super().__init__(dataset, *args, **keywords)
        if not self.is_mix and self.generator is None:
            self.generator = torch.Generator().manual_seed(torch.initial_seed())
            sampler: Any = self.sampler
            # ``self`` is the default for a sampler without this attribute, which is left as it is.
            if getattr(sampler, "generator", self) is None:
                sampler.generator = self.generator

    __init__.__signature__ = inspect.signature(torch.utils.data.DataLoader.__init__)  # type: ignore[attr-defined]

    @override
    def __iter__(self) -> Any:
        if self.is_mix and self._before is not None:
            # Lightning ended with a batch that it took ahead, as at max_steps, so that batch was not trained on.
            self.mix.loader.take_back()
        self._before = None
        if self._latest is not None and self._is_at_end():
            # Lightning counts batches and asks for none after the last, so samplers' draws at the end happen here.
            next(self._latest, None)
        self._latest = batches = super().__iter__()
        return _Trailing(self, batches) if _length(self) is None else batches

    def _is_at_end(self) -> bool:
        state = self.place()
        return state.get("stage") == "running" and state.get("batches") == _length(self)

    def place(self) -> dict[str, Any]:
        """Return the state after all batches handed out, whether or not Lightning has used them."""
        return super().state_dict()

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the state after the batches that were trained on."""
        state = dict(self.place() if self._before is None else self._before)
        if not self.is_mix:
            # The rank's own number, because Lightning gives rank 0's state to all ranks.
            state[_RANK] = _rank()
        return state

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where a state was taken.

        Raises:
            StateError: The state does not fit, or is rank 0's position in an iterable dataset and this is another rank.
        """
        rank = state_dict.get(_RANK, _rank())
        if rank != _rank() and state_dict.get("kind") == "iterable":
            raise StateError(
                f"Lightning has kept the state of rank {rank} alone, and each rank reads an iterable dataset of its "
                f"own; rank {_rank()} has no place: use a map dataset or a mix on several ranks"
            )
        super().load_state_dict(state_dict)
        self._before = None


class _Trailing(Iterator[Any]):
    """Batches of a loader without a length: Lightning holds the last one back."""

    def __init__(self, loader: DataLoader, batches: Iterator[Any]) -> None:
        self._loader, self._batches = loader, batches

    @override
    def __iter__(self) -> Self:
        return self

    @override
    def __next__(self) -> Any:
        # Saved before the batch is taken, because Lightning trains on a batch only once it has the next one.
        before = self._loader.place()
        try:
            batch = next(self._batches)
        except StopIteration:
            self._loader._before = None  # at the end every batch is done with
            raise
        # Only now: if no batch arrives, as after a timeout, the last one still waits to be trained on.
        self._loader._before = before
        return batch


def _length(loader: DataLoader) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def _rank() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))
