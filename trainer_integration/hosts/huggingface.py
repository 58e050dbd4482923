"""Hugging Face ``Trainer``: one changed import, and the position in the data becomes part of its checkpoints.

The original Trainer resumes with a new loader that skips the samples already trained on. The Trainer of this module
keeps our loader's position in the checkpoint's folder, one file per rank, and continues there.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers.trainer_utils import has_length

from omniload.base.errors import ConfigError
from omniload.batch.microbatch import IGNORE_LABEL
from omniload.front.batches.training_batch import TrainingBatch
from trainer_integration.hosts.accelerate import keep_place, prepare_mix
from trainer_integration.hosts.rank_states import has_states, load_states, save_states
from trainer_integration.loader.data_loader import DataLoader

__all__ = ["ExactResume", "Trainer", "flat_model_inputs", "model_inputs"]


def model_inputs(batch: TrainingBatch) -> dict[str, Any]:
    """Return the arguments for a causal model of Hugging Face.

    Labels are the tokens themselves, because the model shifts them. ``position_ids`` begin anew with each document,
    which is how such models recognise the documents of a row and keep attention inside them. This needs no cache of
    keys, hence ``use_cache``. Your own columns come under their names, for a ``compute_loss`` that takes them out
    before it calls the model. A rank has a batch without rows if an evaluation ends in fewer rows than ranks. Such a
    batch becomes one row of padding, because models accept no empty input.

    Raises:
        ConfigError: The mix is open with shifted labels; the model would shift them again.
    """
    if batch.label_form != "unshifted":
        raise ConfigError(
            f"the labels are {batch.label_form}, and Hugging Face models shift by themselves; open the mix with "
            "labels='unshifted'"
        )
    tokens, labels, position_ids = batch.tokens, batch.labels, batch.position_ids
    columns = {name: batch.token_column(name) for name in batch.token_columns}
    if len(tokens) == 0:
        columns = {name: column.new_zeros(1, *column.shape[1:]) for name, column in columns.items()}
        row = torch.arange(tokens.shape[1], device=tokens.device)[None]
        tokens, labels, position_ids = row.mul(0), row.mul(0).add(IGNORE_LABEL), row
    return {
        "input_ids": tokens,
        "labels": labels,
        "position_ids": position_ids,
        "use_cache": False,
        **columns,
    }


def flat_model_inputs(batch: TrainingBatch) -> dict[str, Any]:
    """Return the arguments of ``model_inputs`` with all rows end to end in one, and where its documents begin and end.

    For flash attention, which takes documents apart by their positions only in a batch of one row, and for models with
    layers of another kind, such as linear attention, that read the bounds. Names and types are those of transformers'
    ``DataCollatorWithFlattening``. For ``eager`` and ``sdpa`` the one long row has a mask of its square.

    Raises:
        ConfigError: As ``model_inputs``.
    """
    inputs = model_inputs(batch)
    width = inputs["input_ids"].numel()
    is_empty = len(batch.tokens) == 0
    bounds = inputs["input_ids"].new_tensor([0, width]).int() if is_empty else batch.cu_seqlens
    longest = width if is_empty else batch.max_seqlen
    flat = {
        name: value.reshape(1, -1) if isinstance(value, torch.Tensor) else value
        for name, value in inputs.items()
    }
    flat |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    return flat | {"max_length_q": longest, "max_length_k": longest}


# ``object`` at run time, so that it precedes any Trainer that a class is made of.
if TYPE_CHECKING:
    _Base: Any = transformers.Trainer
else:
    _Base = object


class ExactResume(_Base):
    """Makes a Trainer keep its position: put it before the class, ``class Mine(ExactResume, SFTTrainer)``.

    ``train_dataset`` and ``eval_dataset`` are datasets as usual, or the ``DataLoader`` of a mix. A checkpoint of
    another Trainer resumes as there, by skipping the samples already trained on.
    """

    _kept: Any = None
    """The training loader, with ours below it."""
    _resuming = False
    """Whether the next epoch begins at a loaded position."""
    _given: Any = None
    """The iterator that the Trainer made for this epoch."""
    _taken: Any = None
    """The iterator from which batches are taken instead."""
    _sums: Any = None
    """For an evaluation of a mix: the loss summed over this rank's labels, and their number."""

    def get_train_dataloader(self) -> Any:
        """Return the Trainer's training loader, with ours below it; the loader of a mix unchanged."""
        if isinstance(self.train_dataset, DataLoader):
            _require_mix(self.train_dataset, "train_dataset")
            self._kept = prepare_mix(self.train_dataset, self.args.device)
        else:
            self._kept = super().get_train_dataloader()
            keep_place(self._kept)
        return self._kept

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the Trainer's evaluation loader; a mix begins anew at each evaluation.

        Raises:
            ConfigError: It is the loader that is trained on, or a loader over a dataset.
        """
        found = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(found, str):  # one of several data sets
            found = self.eval_dataset[found]
        if not isinstance(found, DataLoader):
            return super().get_eval_dataloader(eval_dataset)
        _require_mix(found, "eval_dataset")
        if found is self.train_dataset:
            raise ConfigError(
                "eval_dataset is the loader that is trained on, and training would go on behind what was evaluated; "
                "open the mix once more"
            )
        # It may also be a mix of its own, such as one of held-out files.
        found.begin_anew()
        return prepare_mix(found, self.args.device)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Evaluate as the Trainer does, but for a mix, return the mean loss over the labels of all ranks.

        The Trainer's own figure is a mean of batches, in which a batch with few labels, or from a rank without any,
        counts as much as the others.
        """
        # An attribute of accelerate, which a loader that it has not prepared lacks.
        is_mix = isinstance(getattr(dataloader, "base_dataloader", None), DataLoader)
        self._sums = (
            torch.zeros(2, device=self.args.device, dtype=torch.float32) if is_mix else None
        )
        try:
            found = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
        finally:
            # A training that continues after a failed evaluation uses the Trainer's own loss again.
            sums, self._sums = self._sums, None
        name = f"{metric_key_prefix}_loss"
        if sums is not None and name in (found.metrics or {}):
            loss, labels = self.accelerator.reduce(sums, reduction="sum").tolist()
            # A collate function may leave labels out; the loss is then the Trainer's own.
            if labels:
                found.metrics[name] = loss / labels
        return found

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], *args: Any, **keywords: Any
    ) -> tuple[Any, Any, Any]:
        """Predict as the Trainer does, and note the number of labels behind the loss."""
        # Before the step, because a label smoother removes labels. The model shifts them, so a row's first is unused.
        given = inputs.get("labels") if self._sums is not None else None
        labels = None if given is None else given[:, 1:].ne(IGNORE_LABEL).sum()
        loss, logits, found = super().prediction_step(model, inputs, *args, **keywords)
        if labels is not None and loss is not None and labels:
            self._sums += torch.stack((loss.detach().float() * labels, labels.float()))
        if self._sums is not None:
            logits, found = self._with_equal_rows(logits), self._with_equal_rows(found)
            if "inputs" in self.args.include_for_metrics:
                name = getattr(self.model, "main_input_name", "input_ids")
                inputs[name] = self._with_equal_rows(inputs[name])
        return loss, logits, found

    def _with_equal_rows(self, values: Any) -> Any:
        """Return what ``compute_metrics`` gets of a batch, with as many rows as the rank with most of them has.

        The Trainer gathers it from all ranks, which takes equal shapes. The rows more have labels of -100.
        """
        if values is None:
            return None
        return self.accelerator.pad_across_processes(values, dim=0, pad_index=IGNORE_LABEL)

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Prepare a batch as the Trainer does.

        Raises:
            ConfigError: The model would attend across the documents of a row.
        """
        _require_apart(self.model, inputs)
        return super()._prepare_inputs(inputs)

    def _get_num_items_in_batch(self, *args: Any, **keywords: Any) -> Any:
        # The Trainer would divide by the labels of all ranks, and a rank without labels has no mean.
        if self._sums is not None:
            return None
        return super()._get_num_items_in_batch(*args, **keywords)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, *args: Any, **keywords: Any
    ) -> Any:
        """Take the batches of an optimiser's step; after a resume from our position, not from a loader that skips.

        If a mix ends within a step, batches without labels follow: they change no gradient, and without them, the
        Trainer would drop the gradients of the batches before them.
        """
        # The Trainer makes one iterator per epoch, and passes it with every step of the epoch.
        if epoch_iterator is not self._given:
            self._given, self._taken = epoch_iterator, epoch_iterator
            if self._resuming:
                # The Trainer's iterator has not begun, so nothing is skipped.
                self._resuming, self._taken = False, iter(self._kept)
        batches, items = super().get_batch_samples(self._taken, num_batches, *args, **keywords)
        # The Trainer steps its optimiser after every ``num_batches`` of a stream, however early that ends.
        if (
            items is not None
            and 0 < len(batches) < num_batches
            and self._trains_on_unknown_length()
        ):
            blank = batches[-1] | {"labels": torch.full_like(batches[-1]["labels"], IGNORE_LABEL)}
            batches += [blank] * (num_batches - len(batches))
        return batches, items

    def _trains_on_unknown_length(self) -> bool:
        return isinstance(self.train_dataset, DataLoader) and not has_length(self._kept)

    def _save_rng_state(self, output_dir: str) -> None:
        # Every rank gets the checkpoint's folder here, because each rank keeps random states of its own.
        super()._save_rng_state(output_dir)
        if self._kept is not None and hasattr(self._kept.base_dataloader, "state_dict"):
            save_states(output_dir, [self._kept.state_dict()], **self._rank())

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        # A Trainer may be trained twice, and leftovers of the first run do not belong to the second.
        self._resuming, self._given, self._taken = False, None, None
        if checkpoint is None or self.args.ignore_data_skip or not has_states(checkpoint):
            return
        mix = isinstance(self.train_dataset, DataLoader)
        (state,) = load_states(checkpoint, 1, **self._rank(), elastic=mix)
        self._kept.load_state_dict(state)
        self._kept.dl_state_dict, self._resuming = dict(state), True

    def _rank(self) -> dict[str, int]:
        arguments = self.args
        return {"rank": arguments.process_index, "world_size": arguments.world_size}


def _require_apart(model: Any, inputs: Any) -> None:
    """Refuse rows of several documents for flash attention, which keeps only those of a single row apart."""
    attention = str(getattr(getattr(model, "config", None), "_attn_implementation", None))
    positions, labels = inputs.get("position_ids"), inputs.get("labels")
    if (
        positions is None
        or labels is None
        or len(positions) < 2
        or "cu_seq_lens_q" in inputs
        or inputs.get("attention_mask") is not None
        or "flash" not in attention
    ):
        return
    # What follows a single document of a row is padding without labels, which no token of the document sees.
    behind = positions.eq(0)[:, 1:].cumsum(1)[:, :-1].gt(0)
    if behind.logical_and(labels[:, 2:].ne(IGNORE_LABEL)).any():
        raise ConfigError(
            f"the model has {attention}, which would attend across the documents of "
            f"{len(positions)} packed rows; use collate_fn=flat_model_inputs, which lays them end to end in one"
        )


def _require_mix(loader: DataLoader[Any], argument: str) -> None:
    if not loader.is_mix:
        raise ConfigError(
            f"{argument} is a loader over {type(loader.dataset).__name__}; hand over the dataset, the Trainer's "
            "arguments set the batches"
        )


class Trainer(ExactResume, transformers.Trainer):
    """``transformers.Trainer`` that resumes at its position in the data."""
