"""Processor time of a training step of the included model over that of Hugging Face's Mixtral at equal weights.

python -m benchmarks.trainer.moe_speed --help      needs transformers: run it by .venv-frameworks/bin/python
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import click
import torch
from transformers import MixtralForCausalLM

from benchmarks.report import Table, print_table, write_report
from tests.support.trainer.moe_builders import a_microbatch, documents_of
from trainer_integration.mixtral.folder import write_mixtral
from trainer_integration.moe.config import MoEConfig
from trainer_integration.moe.inputs import ModelInputs
from trainer_integration.moe.model import MoETransformer

__all__ = ["main"]

CONFIG = MoEConfig(
    vocab_size=8192,
    dim=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    hidden=256,
    num_experts=8,
    top_k=2,
    balance_weight=0.0,
)


def timed(step: Callable[[], float]) -> tuple[float, float]:
    """Return the processor seconds of a step, and its loss."""
    began_s = time.process_time()
    loss = step()
    return time.process_time() - began_s, loss


def steps_of(
    ours: MoETransformer, theirs: MixtralForCausalLM, lengths: list[int]
) -> tuple[Callable[[], float], Callable[[], float]]:
    """Return a forward and backward of each over documents of these lengths; both leave the mean loss of a label."""
    documents = documents_of(lengths, vocab_size=CONFIG.vocab_size)
    rows = a_microbatch([documents], sum(lengths))
    ids = torch.cat([torch.from_numpy(document).long() for document in documents])[None]
    labels, positions = ids.clone(), torch.cat([torch.arange(n) for n in lengths])[None]
    numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    labels[
        0, positions[0] == 0
    ] = -100  # Mixtral shifts labels: no document predicts the next one's first
    seen = (numbers[:, None] == numbers) & torch.ones(len(numbers), len(numbers)).tril().bool()
    mask = torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))[None, None]

    def own() -> float:
        ours.zero_grad()
        loss = ours(ModelInputs.of(rows)).token_loss / int(rows.loss_mask_RT.sum())
        loss.backward()
        return float(loss.detach())

    def other() -> float:
        theirs.zero_grad()
        given = {"input_ids": ids, "position_ids": positions, "labels": labels}
        if len(lengths) > 1:  # of one document it makes the mask, and knows that it is causal
            given["attention_mask"] = mask
        loss = theirs(**given, use_cache=False).loss
        loss.backward()
        return float(loss.detach())

    return own, other


@click.command()
@click.option("--repetitions", default=7, show_default=True)
@click.option("--report/--no-report", default=True, show_default=True)
@click.option("--loaded", is_flag=True, help="Say in the report that the machine was busy.")
def main(repetitions: int, report: bool, loaded: bool) -> None:
    """Train on one document of 1,024 tokens, and on 16 documents packed into a row."""
    torch.set_num_threads(1)
    ours = MoETransformer(CONFIG)
    with tempfile.TemporaryDirectory() as folder:
        write_mixtral(ours, Path(folder) / "model", longest=2048)
        theirs = MixtralForCausalLM.from_pretrained(Path(folder) / "model")
    theirs.train()
    packed = [700, 20, 150, 60, 30, 300, 90, 10, 200, 45, 80, 120, 33, 66, 99, 45]
    rows = []
    for name, lengths in (("one document", [1024]), ("16 documents", packed)):
        own, other = steps_of(ours, theirs, lengths)
        own(), other()
        pairs = [(timed(own), timed(other)) for _ in range(repetitions)]
        own_s, other_s = (median(pair[i][0] for pair in pairs) for i in (0, 1))
        ratio = median(b[0] / a[0] for a, b in pairs)
        loss, expected = pairs[0][0][1], pairs[0][1][1]
        rows.append(
            (
                f"{name}, {sum(lengths)} tokens",
                f"{1000 * own_s:.0f}",
                f"{1000 * other_s:.0f}",
                f"{ratio:.2f}",
                f"{abs(loss - expected):.1e}",
            )
        )
    table = Table(
        columns=("row", "ours, ms", "Mixtral, ms", "times as fast", "losses differ by"),
        rows=tuple(rows),
        caption="Processor time of forward and backward, float32, one thread; medians, ratio of neighbours",
    )
    print_table(table)
    if report:
        said = " The machine was busy: trust the ratio alone." if loaded else ""
        reading = (
            "Both have the same weights and take the same packed row; Mixtral keeps its documents apart by a mask of "
            f"tokens by tokens, ours computes attention within them alone.{said}"
        )
        command = f"python -m benchmarks.trainer.moe_speed --repetitions {repetitions}"
        title = "The included model beside Hugging Face's Mixtral, on a CPU"
        click.echo(write_report("moe_speed", title, command, (table,), reading))


if __name__ == "__main__":
    main()
