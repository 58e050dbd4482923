"""A mix in place of the dataset of a ``DataLoader``, and how loops take its batches."""

import threading
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch.utils.data
from torch.utils.data import IterableDataset
from typing_extensions import TypeIs, override

from omniload.base.concurrency.turns import EachBatch, ask_in_turn
from omniload.base.errors import ConfigError
from omniload.front.batches.training_batch import TrainingBatch
from omniload.front.loader import Loader
from omniload.front.opening import open_mix
from omniload.mix.config import MixConfig

__all__ = ["Mix", "MixBatches", "MixLoop", "as_it_is", "is_mix", "open_batches", "refuse_loader"]

Mix = str | Path | Mapping[str, object] | MixConfig

_TORCHS = {
    "workers": "the data plane has workers of its own",
    "cost_fn": "balance: in the mix evens out the ranks",
    "cost_counts": "balance: in the mix evens out the ranks",
    "share": "the data plane makes each sample once for all ranks",
    "on_hang": "the data plane replaces what hangs by itself",
    "batch_size": "batch.tokens of the mix sets how much a batch holds",
    "shuffle": "the mix orders its samples, by its seed",
    "sampler": "the mix orders its samples, by its seed",
    "batch_sampler": "the mix orders its samples, by its seed",
    "num_workers": "the data plane has workers of its own",
    "pin_memory": "device= puts batches where the model is",
    "drop_last": "every batch of a mix is whole",
    "worker_init_fn": "the data plane has workers of its own",
    "multiprocessing_context": "the data plane has workers of its own",
    "generator": "the mix orders its samples, by its seed",
    "prefetch_factor": "prefetch_steps= sets how far the data plane works ahead",
    "persistent_workers": "the data plane has workers of its own",
    "pin_memory_device": "device= puts batches where the model is",
    "in_order": "batches of a mix come in step order",
}


def as_it_is(batch: Any) -> Any:
    """Return a batch unchanged."""
    return batch


def _nothing() -> None:
    """Do nothing."""


class MixBatches(IterableDataset[TrainingBatch]):
    """Batches of an open mix, from the position of its loader."""

    def __init__(
        self, loader: Loader, form: Callable[[Any], Any], *, held_out: bool = False
    ) -> None:
        """Hand out the batches of ``loader``; ``form`` converts each to what the training loop takes.

        ``held_out`` marks data for evaluation, which each loop reads from its beginning.
        """
        self.loader, self.form, self.held_out = loader, form, held_out
        self.turn = threading.RLock()
        """Held while a thread asks for a batch."""

    @cached_property
    def beginning(self) -> dict[str, Any]:
        """Where loops begin, recorded at the first access: before a state is loaded or a batch is handed out."""
        # One of several ranks has no position before it has joined the others.
        self.loader.start()
        return self.loader.state_dict()

    def begin_anew(self) -> None:
        """Go back to where the first loop began; before any loop, note that position."""
        if self.beginning != self.loader.state_dict():
            self.loader.load_state_dict(self.beginning)

    def __len__(self) -> int:
        """Return the batches from where the loader was opened, as a map dataset's length is that of an epoch."""
        return len(self.loader)

    def ask(
        self, make: Callable[[Any], Any], take_back: list[Callable[[], None]]
    ) -> tuple[Any] | None:
        """Take the next batch, in the way that ``ask_in_turn`` calls it.

        Returns:
            The result of ``make`` for the batch, or ``None`` at the end. If making fails, the batch remains the next
            one.
        """
        batch: TrainingBatch | None = None

        def back() -> None:
            if batch is not None:
                self.loader.take_back()

        # Prepared before the batch is taken: from then on, nothing is called until the batch is known.
        take_back.append(back)
        batch = self.loader.next_batch()
        return None if batch is None else (make(self.form(batch)),)

    def loop(
        self,
        make: Callable[[Any], Any] = as_it_is,
        begin: Callable[[], None] = _nothing,
        end: Callable[[], None] = _nothing,
    ) -> "MixLoop":
        """Return a loop over the training loop's batches.

        Args:
            make: Called with each batch, while no other thread asks; makes what is handed out.
            begin: Called before the first batch is taken.
            end: Called once there is no further batch.
        """
        return MixLoop(self, make, begin, end)

    @override
    def __iter__(self) -> Iterator[TrainingBatch]:
        return iter(self.loader)


class MixLoop(EachBatch[tuple[Any]]):
    """A loop over a mix, which threads may share; a batch that an error or Ctrl-C keeps from it stays the next."""

    def __init__(
        self,
        batches: MixBatches,
        make: Callable[[Any], Any],
        begin: Callable[[], None],
        end: Callable[[], None],
    ) -> None:
        """See ``MixBatches.loop``."""
        super().__init__(self._next_alone, self._at_end)
        self._batches, self._make, self._begin, self._end_here = batches, make, begin, end
        self._has_begun = False

    def _next_alone(self) -> tuple[Any] | None:
        return ask_in_turn(self._batches.turn, None, self._ask)

    def _ask(self, _: float | None, take_back: list[Callable[[], None]]) -> tuple[Any] | None:
        if not self._has_begun:
            self._begin()
            self._has_begun = True
        return self._batches.ask(self._make, take_back)

    def _at_end(self, handed_out: int) -> None:
        self._batches.loader.end_loop(handed_out)
        self._end_here()

    @override
    def __next__(self) -> Any:
        return super().__next__()[0]


def is_mix(dataset: object) -> TypeIs[Mix]:
    """Whether ``dataset`` names or is a mix. A mapping with ``sources`` is a mix; others are map datasets."""
    if isinstance(dataset, Mapping):
        return "sources" in dataset
    return isinstance(dataset, str | Path | MixConfig)


def open_batches(mix: Mix, positional: tuple[Any, ...], keywords: dict[str, Any]) -> MixBatches:
    """Open a mix with the keywords of ``omniload.open``, and ``collate_fn``, which each batch passes through.

    Raises:
        ConfigError: A keyword asks for something that only torch's loader of single samples does.
    """
    if positional:
        raise ConfigError(
            f"a mix takes keywords alone, found {positional!r:.100} after it; "
            "batch_size and the like are in the mix file"
        )
    for name in [name for name in _TORCHS if name in keywords]:
        # A trainer passes its flags on: no workers, no pinning and no sampler ask for nothing, but an order does.
        if (value := keywords.pop(name)) or (name == "shuffle" and value is not None):
            raise ConfigError(
                f"{name}={value!r:.60} does not go with a mix: {_TORCHS[name]}; leave it out"
            )
    form = keywords.pop("collate_fn", None) or as_it_is
    held_out = keywords.get("split") is not None
    return MixBatches(open_mix(mix, **keywords), form, held_out=held_out)


def refuse_loader(dataset: object) -> None:
    """Refuse a loader in place of a dataset.

    Raises:
        ConfigError: ``dataset`` is a loader.
    """
    if isinstance(dataset, Loader | MixBatches | torch.utils.data.DataLoader):
        raise ConfigError(
            f"the dataset is a {type(dataset).__name__}, which makes batches already; every worker would hand out the "
            "same ones: iterate it directly"
        )
