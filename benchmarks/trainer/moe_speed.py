"""Time of a training step of the included model over that of Hugging Face's Mixtral at equal weights.

python -m benchmarks.trainer.moe_speed --help      needs transformers: run it by .venv-frameworks/bin/python
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import click
import torch
from transformers import MixtralForCausalLM

from benchmarks.report import Table, print_table, this_machine, write_report
from tests.support.trainer.moe_builders import a_microbatch, documents_of
from trainer_integration.mixtral.folder import write_mixtral
from trainer_integration.moe.config import MoEConfig
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
LARGE = MoEConfig(
    vocab_size=32_000,
    dim=1024,
    num_layers=4,
    num_heads=16,
    num_kv_heads=8,
    hidden=3584,
    num_experts=8,
    top_k=2,
    balance_weight=0.0,
)
"""A configuration for a GPU, in bf16."""
PACKED = (700, 20, 150, 60, 30, 300, 90, 10, 200, 45, 80, 120, 33, 66, 99, 45)
"""Tokens of documents in a row."""


def timed(step: Callable[[], float], device: str) -> tuple[float, float]:
    """Return the seconds of a step, and its loss: processor seconds, or wall seconds until a GPU is done."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    began_s = clock()
    loss = step()
    return clock() - began_s, loss


def steps_of(
    ours: MoETransformer, theirs: MixtralForCausalLM, lengths: Sequence[int], device: str
) -> tuple[Callable[[], float], Callable[[], float]]:
    """Return a forward and backward pass of each model over these documents; both return the mean loss of a label."""
    documents = documents_of(lengths, vocab_size=ours.config.vocab_size)
    rows = a_microbatch([documents], sum(lengths))
    ids = torch.cat([torch.from_numpy(document).long() for document in documents])[None]
    labels, positions = ids.clone(), torch.cat([torch.arange(n) for n in lengths])[None]
    numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    labels[
        0, positions[0] == 0
    ] = -100  # Mixtral shifts labels: no document predicts the next one's first
    seen = (numbers[:, None] == numbers) & torch.ones(len(numbers), len(numbers)).tril().bool()
    dtype = next(theirs.parameters()).dtype
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
    ids, labels, positions, mask = (
        given.to(device) for given in (ids, labels, positions, mask[None, None])
    )

    def done(loss: torch.Tensor) -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return float(loss.detach())

    def own() -> float:
        ours.zero_grad()
        loss = ours(ours.inputs_of(rows)).token_loss / int(rows.loss_mask_RT.sum())
        loss.backward()
        return done(loss)

    def other() -> float:
        theirs.zero_grad()
        given = {"input_ids": ids, "position_ids": positions, "labels": labels}
        if (
            len(lengths) > 1
        ):  # for one document it makes the mask itself, and knows that it is causal
            given["attention_mask"] = mask
        loss = theirs(**given, use_cache=False).loss
        loss.backward()
        return done(loss)

    return own, other


def models_of(device: str) -> tuple[MoETransformer, MixtralForCausalLM]:
    """Return both models with the same weights: float32 on a processor, bf16 on a GPU."""
    config = LARGE if device == "cuda" else CONFIG
    ours = MoETransformer(config)
    with tempfile.TemporaryDirectory() as folder:
        write_mixtral(ours, Path(folder) / "model", longest=8192)
        theirs = MixtralForCausalLM.from_pretrained(Path(folder) / "model")
    if device == "cuda":
        # Both keep their weights in bf16. By default, ours would keep them in float32 and convert them to bf16 in
        # each step.
        ours = ours.bfloat16()
        theirs = theirs.bfloat16()
    theirs.train()
    return ours.to(device), theirs.to(device)


@click.command()
@click.option("--repetitions", default=7, show_default=True)
@click.option("--device", default="cpu", show_default=True, type=click.Choice(["cpu", "cuda"]))
@click.option("--report/--no-report", default=True, show_default=True)
@click.option("--loaded", is_flag=True, help="Mention in the report that the machine was busy.")
def main(repetitions: int, device: str, report: bool, loaded: bool) -> None:
    """Train on one document, and on documents packed into a row: 1,024 and 2,048 tokens, four times that on a GPU."""
    torch.set_num_threads(1)
    ours, theirs = models_of(device)
    scale = 4 if device == "cuda" else 1
    rows = []
    for name, lengths in (("one document", [1024 * scale]), ("documents", PACKED * scale)):
        own, other = steps_of(ours, theirs, lengths, device)
        own(), other()
        pairs = [(timed(own, device), timed(other, device)) for _ in range(repetitions)]
        own_s, other_s = (median(pair[i][0] for pair in pairs) for i in (0, 1))
        ratio = median(b[0] / a[0] for a, b in pairs)
        loss, expected = pairs[0][0][1], pairs[0][1][1]
        rows.append(
            (
                name if len(lengths) == 1 else f"{len(lengths)} {name}",
                f"{sum(lengths):,}",
                f"{1000 * own_s:.1f}",
                f"{1000 * other_s:.1f}",
                f"{ratio:.2f}",
                f"{abs(loss - expected):.1e}",
            )
        )
    how = "bf16, by the clock" if device == "cuda" else "float32, processor time of one thread"
    table = Table(
        columns=("row", "tokens", "ours, ms", "Mixtral, ms", "times as fast", "losses differ by"),
        rows=tuple(rows),
        caption=f"Forward and backward, {how}; medians, ratio of neighbours",
    )
    print_table(table)
    if report:
        said = " The machine was busy: trust the ratio alone." if loaded else ""
        reading = (
            "Both have the same weights and take the same packed row. Mixtral separates its documents by a mask of "
            f"tokens by tokens; ours computes attention only within documents.{said}"
        )
        where = " --device cuda" if device == "cuda" else ""
        command = f"python -m benchmarks.trainer.moe_speed --repetitions {repetitions}{where}"
        title = "The included model beside Hugging Face's Mixtral"
        machine = this_machine(torch.cuda.get_device_name() if device == "cuda" else "")
        click.echo(
            write_report(__file__, "moe_speed", title, command, (table,), reading, machine=machine)
        )


if __name__ == "__main__":
    main()
