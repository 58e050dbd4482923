"""The parts that determine a sampler's order: its generators, its epoch, a state of its own."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import _InfiniteConstantSampler

from omniload.base.errors import StateError
from omniload.base.state import Json, JsonObject
from trainer_integration.loader.balancing import CostBatches
from trainer_integration.loader.resuming.random_state import Ambient

__all__ = ["Anatomy", "is_stateful", "shape_of"]

# Samplers that draw from their generator as they are iterated, or from torch's own if they have none.
_DRAWS = {RandomSampler, SubsetRandomSampler, WeightedRandomSampler}
# Compared by exact type, because a subclass may order in any other way.
_KNOWN = {
    BatchSampler,
    CostBatches,
    DistributedSampler,
    SequentialSampler,
    _InfiniteConstantSampler,
    list,
    range,
    tuple,
    *_DRAWS,
}
_DEPTH = 8  # a sampler inside a sampler inside a batch sampler: frameworks nest at most three


def is_stateful(thing: object) -> bool:
    """Whether ``thing`` follows torch's ``Stateful`` protocol."""
    return callable(getattr(thing, "state_dict", None)) and callable(
        getattr(thing, "load_state_dict", None)
    )


class Anatomy:
    """The parts of an index sampler, outermost first."""

    def __init__(self, sampler: Iterable[Any], generator: torch.Generator | None) -> None:
        """Examine ``sampler``; ``generator`` is that of the loader."""
        self.sampler = sampler
        self.parts = _parts(sampler)
        self.known = all(type(part) in _KNOWN for part in self.parts)
        """Whether the order is a function of generators and epoch alone."""
        owned = [generator, *(getattr(part, "generator", None) for part in self.parts)]
        self.generators = _distinct(owned)
        self.ambient: Ambient = "all"
        if self.known:
            drawn = [part for part in self.parts if type(part) in _DRAWS]
            free = any(part.generator is None for part in drawn)
            self.ambient = "torch" if free else "none"
        self.keeper = next((part for part in self.parts if is_stateful(part)), None)
        """The sampler that has a state of its own."""

    @property
    def replicas(self) -> int | None:
        """Number of ranks that the samples are dealt to, if a sampler tells it."""
        counts = (getattr(part, "num_replicas", None) for part in self.parts)
        return next((count for count in counts if type(count) is int), None)

    @property
    def names(self) -> list[Json]:
        """Class names of the parts, outermost first."""
        return [type(part).__qualname__ for part in self.parts]

    def epochs(self) -> list[Json]:
        """Return the epoch of each part that ``set_epoch`` can set, ``[E]``."""
        return [part.epoch for part in self._with_epoch()]

    def set_epochs(self, epochs: list[Any]) -> None:
        """Set the epochs that ``epochs`` returned.

        Raises:
            StateError: They are of another number of samplers.
        """
        parts = self._with_epoch()
        if len(parts) != len(epochs):
            raise StateError(
                f"the state holds {len(epochs)} epochs, {len(parts)} samplers have set_epoch; "
                "resume with the samplers of the run that saved"
            )
        for part, epoch in zip(parts, epochs, strict=True):
            part.set_epoch(epoch)

    def _with_epoch(self) -> list[Any]:
        return [
            part
            for part in self.parts
            if type(getattr(part, "epoch", None)) is int
            and callable(getattr(part, "set_epoch", None))
        ]

    def after(self, batches: int) -> Iterator[Any] | None:
        """Return the order from a batch onward without stepping through batches; ``None`` if it is unknown.

        Samples are skipped in C, and a sequential order by arithmetic.
        """
        # There is more than a sampler in a batch sampler, so the number of samples in a batch is unknown.
        if not self.known or len(self.parts) > 2:
            return None
        inner, outer = self.parts[-1], self.parts[0]
        if type(outer) is CostBatches:
            return outer.after(batches)
        if len(self.parts) == 1:
            return _skipped(inner, batches)
        rest = _skipped(inner, batches * outer.batch_size)
        return iter(BatchSampler(rest, outer.batch_size, outer.drop_last))


def _skipped(sampler: Any, samples: int) -> Iterator[int]:
    # A range is cut without stepping, whatever its length.
    if type(sampler) is SequentialSampler:
        return iter(range(len(sampler.data_source))[samples:])
    order: Iterator[int] = iter(sampler)
    next(islice(order, samples, samples), None)
    return order


def _parts(sampler: Any) -> list[Any]:
    parts: list[Any] = []
    while sampler is not None and len(parts) < _DEPTH and all(sampler is not p for p in parts):
        parts.append(sampler)
        inner = getattr(sampler, "batch_sampler", None)
        sampler = getattr(sampler, "sampler", None) if inner is None else inner
    return parts


def _distinct(generators: list[Any]) -> list[torch.Generator]:
    found: list[torch.Generator] = []
    for each in generators:
        if isinstance(each, torch.Generator) and all(each is not other for other in found):
            found.append(each)
    return found


def shape_of(loader: Any, anatomy: Anatomy) -> JsonObject:
    """Return the values that must be the same for a place in the order to mean the same samples."""
    try:
        samples: Json = len(loader.dataset)
    except (TypeError, NotImplementedError):
        samples = None
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    return {
        "samples": samples,
        # A user's batch sampler may use this name for anything.
        "batch_size": size if type(size) is int else None,
        "drop_last": loader.drop_last,
        "samplers": anatomy.names,
        "replicas": anatomy.replicas,
    }
