"""One rank of two under Hugging Face's Trainer: the loss of a held-out split, of which each rank reads its rows."""

import sys

import pytest
import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel

from tests.support.trainer.evaluated import loss_of_a_label
from trainer_integration import DataLoader
from trainer_integration.hosts.huggingface import Trainer, model_inputs

mix, folder = sys.argv[1:]
form = {"labels": "unshifted", "collate_fn": model_inputs}
torch.manual_seed(1)
config = GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=512, n_positions=512)
arguments = transformers.TrainingArguments(
    output_dir=folder, use_cpu=True, report_to=[], disable_tqdm=True, logging_strategy="no"
)
model = GPT2LMHeadModel(config)
with DataLoader(mix, split="eval", rank=0, world_size=1, **form) as whole:
    batches = list(whole)
assert len(batches[-1]["labels"]) == 1, "a row for two ranks"
with DataLoader(mix, split="eval", **form) as held_out:
    trainer = Trainer(model=model, args=arguments, eval_dataset=held_out)
    losses = [trainer.evaluate()["eval_loss"] for _ in range(2)]
assert losses == pytest.approx([loss_of_a_label(model, batches)] * 2, rel=1e-5)


def counted(predicted):
    """Return how many labels a metric is given, and how many of them have their own scores."""
    labels = torch.as_tensor(predicted.label_ids)
    scores = torch.as_tensor(predicted.predictions)
    assert torch.as_tensor(predicted.inputs).shape == labels.shape == scores.shape[:2]
    return {"labels": int(labels[:, 1:].ne(-100).sum()), "rows": len(labels)}


# Three rows a step: two for one of the ranks, and one for the other.
arguments.include_for_metrics = ["inputs"]
with DataLoader(mix, split="eval", batch_tokens=384, batch_micro_tokens=128, **form) as held_out:
    trainer = Trainer(model=model, args=arguments, eval_dataset=held_out, compute_metrics=counted)
    found = trainer.evaluate()
assert found["eval_labels"] == sum(int(b["labels"][:, 1:].ne(-100).sum()) for b in batches)
assert found["eval_loss"] == pytest.approx(losses[0], rel=1e-5)
torch.distributed.destroy_process_group()
