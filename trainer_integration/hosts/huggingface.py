"""Hugging Face ``Trainer``: one changed import, and the place in the data is part of its checkpoints.

The Trainer resumes by making a loader that passes over what was trained on. The one of this
module keeps the place of ours in the checkpoint's folder, one file per rank, and goes on there.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import transformers

from omniload.base.errors import ConfigError
from omniload.batch.microbatch import IGNORE_LABEL
from omniload.front.batches.training_batch import TrainingBatch
from trainer_integration.hosts.accelerate import keep_place, prepare_mix
from trainer_integration.hosts.rank_states import has_states, load_states, save_states
from trainer_integration.loader.data_loader import DataLoader

__all__ = ["ExactResume", "Trainer", "model_inputs"]


def model_inputs(batch: TrainingBatch) -> dict[str, Any]:
    """Return what a causal model of Hugging Face is called with.

    Labels are the tokens themselves: the model shifts them. ``position_ids`` begin anew with each
    document, which is how such models know the documents of a row and keep attention inside them;
    that needs no cache of keys, hence ``use_cache``. Columns of yours come under their names, for a
    ``compute_loss`` that takes them out before it calls the model. Of a batch without rows, as a rank
    has where an evaluation ends in fewer rows than ranks, it is one row of padding: models take none at all.

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


# Object as it runs, so that it stands before whatever Trainer a class is made of.
if TYPE_CHECKING:
    _Base: Any = transformers.Trainer
else:
    _Base = object


class ExactResume(_Base):
    """What makes a Trainer keep its place: put it before the class, ``class Mine(ExactResume, SFTTrainer)``.

    ``train_dataset`` and ``eval_dataset`` are datasets as always, or the ``DataLoader`` of a mix. A
    checkpoint that another Trainer wrote resumes as there, by passing over what was trained on.
    """

    _kept: Any = None
    """The training loader, with ours below it."""
    _resuming = False
    """Whether the next epoch begins at a place that was loaded."""
    _given: Any = None
    """The iterator that the Trainer made for this epoch."""
    _taken: Any = None
    """The iterator that batches are taken from in its place."""
    _sums: Any = None
    """Of an evaluation of a mix: the loss summed over this rank's labels, and how many there were."""

    def get_train_dataloader(self) -> Any:
        """Return the training loader as the Trainer makes it, with ours below; that of a mix as it is."""
        if isinstance(self.train_dataset, DataLoader):
            _require_mix(self.train_dataset, "train_dataset")
            self._kept = prepare_mix(self.train_dataset, self.args.device)
        else:
            self._kept = super().get_train_dataloader()
            keep_place(self._kept)
        return self._kept

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the evaluation loader as the Trainer makes it; a mix from where it stood, at each evaluation.

        Raises:
            ConfigError: It is the loader that is trained on, or a loader over a dataset.
        """
        found = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(found, str):  # of several data sets
            found = self.eval_dataset[found]
        if not isinstance(found, DataLoader):
            return super().get_eval_dataloader(eval_dataset)
        _require_mix(found, "eval_dataset")
        if found is self.train_dataset:
            raise ConfigError(
                "eval_dataset is the loader that is trained on, and training would go on behind what was evaluated; "
                "open the mix once more"
            )
        # A mix of its own too, as of files that are held out.
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
        """Evaluate as the Trainer does; the loss of a mix is the mean over the labels of all ranks.

        The Trainer's own is a mean of batches, in which one of few labels, or of a rank without any, counts as others.
        """
        # Of accelerate: what is not prepared by it has none.
        is_mix = isinstance(getattr(dataloader, "base_dataloader", None), DataLoader)
        self._sums = (
            torch.zeros(2, device=self.args.device, dtype=torch.float32) if is_mix else None
        )
        try:
            found = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
        finally:
            # A training that goes on behind an evaluation that failed is the Trainer's own again.
            sums, self._sums = self._sums, None
        name = f"{metric_key_prefix}_loss"
        if sums is not None and name in (found.metrics or {}):
            loss, labels = self.accelerator.reduce(sums, reduction="sum").tolist()
            # A collate function may leave labels out, and the loss is what the Trainer made of it.
            if labels:
                found.metrics[name] = loss / labels
        return found

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], *args: Any, **keywords: Any
    ) -> tuple[Any, Any, Any]:
        """Predict as the Trainer does, and note how many labels the loss is a mean of."""
        # Before the step: a label smoother takes them out. The model shifts them, so the first of a row is none.
        given = inputs.get("labels") if self._sums is not None else None
        labels = None if given is None else given[:, 1:].ne(IGNORE_LABEL).sum()
        loss, logits, found = super().prediction_step(model, inputs, *args, **keywords)
        if labels is not None and loss is not None and labels:
            self._sums += torch.stack((loss.detach().float() * labels, labels.float()))
        return loss, logits, found

    def _get_num_items_in_batch(self, *args: Any, **keywords: Any) -> Any:
        # The Trainer would divide by the labels of all ranks, and a rank without any has no mean.
        if self._sums is not None:
            return None
        return super()._get_num_items_in_batch(*args, **keywords)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], *args: Any, **keywords: Any) -> Any:
        """Take the batches of an optimiser's step; after a resume from our place, not from a loader that skips."""
        # The Trainer makes one iterator an epoch, and hands it over with every step of that.
        if epoch_iterator is not self._given:
            self._given, self._taken = epoch_iterator, epoch_iterator
            if self._resuming:
                # The Trainer's iterator has not begun: nothing is passed over.
                self._resuming, self._taken = False, iter(self._kept)
        return super().get_batch_samples(self._taken, *args, **keywords)

    def _save_rng_state(self, output_dir: str) -> None:
        # Every rank comes here with the checkpoint's folder, as each keeps random states of its own.
        super()._save_rng_state(output_dir)
        if self._kept is not None and hasattr(self._kept.base_dataloader, "state_dict"):
            save_states(output_dir, [self._kept.state_dict()], **self._rank())

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        # A Trainer may be trained twice: what the first run left is not of the second.
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


def _require_mix(loader: DataLoader[Any], argument: str) -> None:
    if not loader.is_mix:
        raise ConfigError(
            f"{argument} is a loader over {type(loader.dataset).__name__}; hand over the dataset, the Trainer's "
            "arguments set the batches"
        )


class Trainer(ExactResume, transformers.Trainer):
    """``transformers.Trainer`` that resumes at its place in the data."""
