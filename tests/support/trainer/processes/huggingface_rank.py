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
torch.distributed.destroy_process_group()
