"""The batch of a step, as a training loop takes it: all rows of a rank, and the microbatches they are dealt into."""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from typing_extensions import override

from omniload.batch.arrays import Arrays
from omniload.batch.microbatch import Batch
from omniload.batch.slices import joined
from omniload.front.batches.rows import Fields, Labels, PackedRows

__all__ = ["TrainingBatch"]


class TrainingBatch(PackedRows):
    """One rank's part of a step: all its rows, and the microbatches that they are dealt into."""

    def __init__(
        self,
        batch: Batch,
        arrays: Arrays,
        labels: Labels,
        device: object = None,
        values_per_patch: int = 0,
    ) -> None:
        super().__init__(joined(batch.microbatches), arrays, labels, device, values_per_patch)
        self._batch, self._parts = batch, batch.microbatches

    @cached_property
    def microbatches(self) -> tuple[PackedRows, ...]:
        """The rows in the order to run them, in parts of at most ``batch.micro_tokens`` and of balanced cost."""
        return tuple(
            PackedRows(part, self._arrays, self._labels, self._device, self._values_per_patch)
            for part in self._batch.microbatches
        )

    def fields_asked(self) -> Fields:
        """Return the fields that were asked for so far."""
        # Microbatches are looked at only if the loop has used them, because looking would make them.
        parts = self.microbatches if "microbatches" in self.__dict__ else ()
        return Fields(whole=self.made(), parts=frozenset().union(*(p.made() for p in parts)))

    def fill(self, fields: Fields, put: Callable[[Any], Any]) -> None:
        """Make fields before they are asked for, each put where it is to be by ``put``."""
        self.make(fields.whole, put)
        if fields.parts:
            for part in self.microbatches:
                part.make(fields.parts, put)

    @property
    def step(self) -> int:
        """Number of the step, from 0."""
        return self._batch.step

    @property
    def loss_tokens(self) -> int:
        """Labels of the step over all ranks: divide the sum of all losses by this number."""
        return self._batch.loss_tokens

    @property
    def imbalance(self) -> float:
        """Cost of the heaviest rank over the mean of all."""
        return self._batch.imbalance

    @property
    def microbatch_imbalance(self) -> float:
        """Cost of the heaviest microbatch over the mean of all ranks' microbatches. Pipeline stages wait for it."""
        return self._batch.microbatch_imbalance

    @property
    def tokens_by_source(self) -> Mapping[str, int]:
        """Tokens of each source in the step, over all ranks."""
        return self._batch.tokens_by_source

    @cached_property
    def source_tags(self) -> tuple[Mapping[str, str], ...]:
        """Tags of each source, as the mix file gives them, by its number in ``source_ids``."""
        return tuple(self._batch.source_tags.get(name, {}) for name in self.tokens_by_source)

    @override
    def to(self, device: object, *, non_blocking: bool = False) -> "TrainingBatch":
        self._arrays.check(device)
        return TrainingBatch(
            self._batch, self._arrays, self._labels, device, self._values_per_patch
        )

    @override
    def __repr__(self) -> str:
        microbatches = len(self._batch.microbatches)
        return f"TrainingBatch(step={self.step}, {self._described()}, microbatches={microbatches})"
