"""A mix as the dataset of a loader: the batches come whole from the data plane."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import TypeIs, override

from omniload.base.errors import ConfigError
from omniload.front.loader import Loader
from omniload.front.opening import open_mix
from omniload.front.rows import TrainingBatch
from omniload.mix.config import MixConfig

__all__ = ["Mix", "MixBatches", "as_it_is", "is_mix", "open_batches", "refuse_loader"]

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


class MixBatches(IterableDataset[TrainingBatch]):
    """Batches of an open mix, from where its loader stands."""

    def __init__(self, loader: Loader, form: Callable[[Any], Any], steps: int | None) -> None:
        """Hand out the batches of ``loader``, which ends before ``steps``.

        Args:
            loader: The open mix.
            form: Makes of a batch what the training loop takes.
            steps: The step after the last, ``None`` where the data's end is not known beforehand.
        """
        self.loader, self.form, self._steps = loader, form, steps

    def __len__(self) -> int:
        """Return the steps of the whole run, as a map dataset's length is that of the whole epoch."""
        if self._steps is None:
            raise TypeError("a mix without steps= has no length: it ends with its data")
        return self._steps

    @override
    def __iter__(self) -> Iterator[TrainingBatch]:
        return iter(self.loader)


def is_mix(dataset: object) -> TypeIs[Mix]:
    """Whether ``dataset`` names or is a mix. A mapping is one by its ``sources``: others are map datasets."""
    if isinstance(dataset, Mapping):
        return "sources" in dataset
    return isinstance(dataset, str | Path | MixConfig)


def open_batches(mix: Mix, positional: tuple[Any, ...], keywords: dict[str, Any]) -> MixBatches:
    """Open a mix with the keywords of ``omniload.open``, and ``collate_fn``, which each batch passes through.

    Raises:
        ConfigError: A keyword belongs to torch's loader of single samples.
    """
    if positional:
        raise ConfigError(
            f"a mix takes keywords alone, found {positional!r:.100} after it; "
            "batch_size and the like are in the mix file"
        )
    for name, value in keywords.items():
        if name in _TORCHS:
            raise ConfigError(
                f"{name}={value!r:.60} does not go with a mix: {_TORCHS[name]}; leave it out"
            )
    form = keywords.pop("collate_fn", None) or as_it_is
    return MixBatches(open_mix(mix, **keywords), form, keywords.get("steps"))


def refuse_loader(dataset: object) -> None:
    """Refuse a loader in place of a dataset.

    Raises:
        ConfigError: ``dataset`` is one.
    """
    if isinstance(dataset, Loader | MixBatches | DataLoader):
        raise ConfigError(
            f"the dataset is a {type(dataset).__name__}, which makes batches already; every worker would hand out the "
            "same ones: iterate it directly"
        )


def as_it_is(batch: Any) -> Any:
    """Return a batch unchanged."""
    return batch
