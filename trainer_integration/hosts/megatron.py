"""Megatron-style loops: an iterator of dictionaries, and a hook that saves its state.

Megatron-LM, Bridge and similar trainers call ``next(iterator)`` once per microbatch, on the ranks that feed a
tensor-parallel group, and ``iterator.iterable.save_state()`` at a checkpoint.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Self

from typing_extensions import override

from omniload.base.errors import ConfigError
from omniload.front.batches.training_batch import TrainingBatch
from trainer_integration.loader.data_loader import DataLoader

__all__ = ["MegatronIterator", "microbatch"]


def microbatch(batch: TrainingBatch, *, attention_mask: bool = False) -> dict[str, Any]:
    """Return a batch under Megatron's names.

    Args:
        batch: Batch of a mix with shifted labels.
        attention_mask: Whether to add the mask ``[R, 1, T, T]``, true where a token may *not* attend; varlen attention
            takes ``cu_seqlens`` instead.

    Returns:
        ``tokens``, ``labels``, ``position_ids`` ``[R, T]``; ``loss_mask`` ``[R, T]``, 0.0 where the label does not
        count (and is 0); ``cu_seqlens`` ``[D + 1]``, ``max_seqlen``; ``attention_mask`` or ``None``. Values that the
        rank's stage of a pipeline does not get are ``None``, as in Megatron's own ``get_batch``.

    Raises:
        ConfigError: The labels are not shifted, but Megatron's loss compares in place.
    """
    if batch.label_form != "shifted":
        raise ConfigError(
            f"the labels are {batch.label_form}, and Megatron compares each output with the label at its place; "
            "open the mix with labels='shifted'"
        )
    counts = batch.labels >= 0 if batch.has("labels") else None
    return {
        "tokens": batch.tokens if batch.has("tokens") else None,
        "labels": None if counts is None else batch.labels * counts,
        "loss_mask": None if counts is None else counts.float(),
        "position_ids": batch.position_ids,
        "cu_seqlens": batch.cu_seqlens,
        "max_seqlen": batch.max_seqlen,
        "attention_mask": ~batch.attention_mask if attention_mask else None,
    }


class MegatronIterator(Iterator[Any]):
    """The training iterator of one data-parallel rank (``dataloader_type="external"``)."""

    def __init__(self, loader: DataLoader, *, attention_mask: bool = False) -> None:
        """Hand out the batches of ``loader``: those of a mix under Megatron's names, others unchanged.

        A loader over a dataset, or over a split, begins its next epoch by itself, because Megatron asks for steps and
        not for epochs; a mix ends.
        """
        self._loader, self._attention_mask = loader, attention_mask
        self._batches: Iterator[Any] | None = None

    @property
    def iterable(self) -> Self:
        """The object that Megatron's hook asks for the state, whether or not this iterator is wrapped."""
        return self

    @override
    def __iter__(self) -> Self:
        return self

    @override
    def __next__(self) -> Any:
        # Made with the first batch, so that a wrapper that calls iter() early does not fix the position.
        if self._batches is None:
            self._batches = self._loader.loop(self._taken)
        # A named method: after a call of ``next``, or any C function, an interrupt would lose a batch handed out.
        try:
            return self._batches.__next__()
        except StopIteration:
            if self._loader.is_mix and not self._loader.is_held_out:
                raise
        self._batches = self._loader.loop(self._taken)
        return self._batches.__next__()

    def _taken(self, batch: Any) -> Any:
        """Return a batch of a mix in the trainer's form; ``collate_fn`` may have made anything of it."""
        if isinstance(batch, TrainingBatch):
            return microbatch(batch, attention_mask=self._attention_mask)
        return batch

    def save_state(self) -> dict[str, Any]:
        """Return the position after the microbatches handed out."""
        return self._loader.state_dict()

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """Continue where ``save_state`` was called; before the first microbatch or later."""
        self._loader.load_state_dict(state)
        self._batches = None

    # NeMo and VeOmni use torch's names.
    state_dict = save_state
    load_state_dict = restore_state
