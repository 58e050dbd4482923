"""Time of the steps of a training loop on a GPU, by the source of its batches.

python -m benchmarks.trainer.gpu_steps --help
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader
from typing_extensions import override

import omniload
from benchmarks.loaders.baseline_loaders import MixedRows, Rows
from benchmarks.loaders.mixed_sources import MixedSources, build_sources, mix_of
from benchmarks.report import Table, print_table, this_machine, write_report
from trainer_integration.moe.varlen import attend_varlen

__all__ = ["CONTENDERS", "SIZES", "Size", "Times", "main", "table_of"]

_LENGTH = 4_096
_VOCABULARY = 32_000
_HEAD_DIM = 64
_WARM_UP_S = 6.0
"""Warm-up for workers and roles that still start, and for memory that is touched for the first time."""
_KEPT = "one batch, on the GPU already"


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A model and a step."""

    dim: int
    layers: int
    rows: int
    """Rows of a step, 4,096 tokens each."""
    steps: int
    """Steps to time."""

    @property
    def title(self) -> str:
        """The size in words."""
        return f"{self.layers} layers {self.dim:,} wide, {self.rows * _LENGTH:,} tokens a step"


SIZES = (
    Size(dim=512, layers=4, rows=2, steps=150),
    Size(dim=1024, layers=8, rows=2, steps=150),
    Size(dim=1024, layers=8, rows=16, steps=40),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of a contender."""

    running_s: float
    """Time of a step, if the loop runs ahead of the GPU."""
    waiting_s: Sequence[float]
    """Time of each step, if the loop reads its loss before it asks for the next batch."""


Inputs = tuple[Tensor, Tensor, Tensor, Tensor, int]
"""Tokens and labels, ``[R, T]``, positions, bounds of documents, the longest."""


class _Gpt(nn.Module):
    """A dense decoder over packed documents, as small as possible."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        dim = size.dim
        self.embedding = nn.Embedding(_VOCABULARY, dim)
        self.places = nn.Embedding(_LENGTH, dim)
        self.layers = nn.ModuleList(
            nn.ModuleList(
                [
                    nn.LayerNorm(dim),
                    nn.Linear(dim, 3 * dim),
                    nn.Linear(dim, dim),
                    nn.LayerNorm(dim),
                    nn.Linear(dim, 4 * dim),
                    nn.Linear(4 * dim, dim),
                ]
            )
            for _ in range(size.layers)
        )

    @override
    def forward(self, inputs: Inputs) -> Tensor:
        """Return the loss."""
        tokens_RT, labels_RT, positions_RT, bounds_D, longest = inputs
        x_ND = self.embedding(tokens_RT.flatten()) + self.places(positions_RT.flatten())
        for norm1, qkv, output, norm2, up, down in self.layers:
            q, k, v = qkv(norm1(x_ND)).view(len(x_ND), -1, _HEAD_DIM).chunk(3, dim=1)
            attended_NHC = attend_varlen(q, k, v, bounds_D, longest, causal=True)
            x_ND = x_ND + output(attended_NHC.flatten(1))
            x_ND = x_ND + down(functional.gelu(up(norm2(x_ND))))
        logits_NV = x_ND @ self.embedding.weight.t()
        return functional.cross_entropy(logits_NV, labels_RT.flatten(), ignore_index=-100)


def _rows_alone(tokens_RT: Tensor) -> Inputs:
    """Return the inputs of a loop over bare rows: each row is one document."""
    rows, length = tokens_RT.shape
    tokens_RT = tokens_RT.cuda(non_blocking=True).long()
    bounds_D = torch.arange(rows + 1, dtype=torch.int32, device="cuda") * length
    positions_RT = torch.arange(length, device="cuda").expand(rows, -1)
    return tokens_RT, tokens_RT.roll(-1, 1), positions_RT, bounds_D, length


def _kept(work: Rows) -> Iterator[Inputs]:
    inputs = next(_ours(work, "local"))
    while True:
        yield inputs


def _workers(work: Rows) -> Iterator[Inputs]:
    loader = DataLoader(
        MixedRows(work, "arrays"), batch_size=work.rows, num_workers=2, pin_memory=True
    )
    for tokens in loader:
        yield _rows_alone(tokens)


def _ours(work: Rows, runtime: str, *, ahead: bool = True) -> Iterator[Inputs]:
    mix = mix_of(
        work.corpus.names,
        work.corpus.weights,
        rows=work.rows,
        micro_rows=work.rows,
        length=work.length,
    )
    file = work.folder / "mix.json"  # JSON is YAML
    file.write_text(mix.model_dump_json(exclude_defaults=True), encoding="utf-8")
    where = {"device": "cuda"} if ahead else {}
    with omniload.open(file, runtime=runtime, **where) as loader:
        for batch in loader:
            rows = batch if ahead else batch.to("cuda")
            yield rows.tokens, rows.labels, rows.position_ids, rows.cu_seqlens, rows.max_seqlen


CONTENDERS: Mapping[str, Callable[[Rows], Iterator[Inputs]]] = {
    _KEPT: _kept,
    "omniload, threads of the trainer, copied ahead": lambda work: _ours(work, "local"),
    'the same, `batch.to("cuda")`': lambda work: _ours(work, "local", ahead=False),
    "omniload through Ray, copied ahead": lambda work: _ours(work, "ray"),
    "`DataLoader`, 2 workers, pinned numpy views, neither balanced nor resumed": _workers,
}


def times_of(name: str, work: Rows, size: Size) -> Times:
    """Train with one contender."""
    torch.manual_seed(0)
    model = _Gpt(size).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(inputs: Inputs) -> Tensor:
        loss = model(inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    with closing(CONTENDERS[name](work)) as batches:  # type: ignore[type-var]
        until_s = time.perf_counter() + _WARM_UP_S
        while time.perf_counter() < until_s:
            step(next(batches)).item()
        began_s = time.perf_counter()
        for _ in range(size.steps):
            step(next(batches))
        torch.cuda.synchronize()
        running_s = (time.perf_counter() - began_s) / size.steps
        waiting_s = []
        for _ in range(size.steps):
            began_s = time.perf_counter()
            step(next(batches)).item()
            waiting_s.append(time.perf_counter() - began_s)
    return Times(running_s=running_s, waiting_s=waiting_s)


def table_of(size: Size, found: Mapping[str, Times]) -> Table:
    """Return the step times of each, and the increase over those of a batch that is already there."""
    least = found[_KEPT]
    return Table(
        columns=(
            "batches come from",
            "step, ms",
            "over the first",
            "its loss read each step, p50, ms",
            "over the first",
            "p99, ms",
        ),
        rows=tuple(
            (
                name,
                f"{1e3 * times.running_s:.2f}",
                f"{times.running_s / least.running_s - 1:+.1%}",
                f"{1e3 * median(times.waiting_s):.2f}",
                f"{median(times.waiting_s) / median(least.waiting_s) - 1:+.1%}",
                f"{1e3 * float(np.percentile(times.waiting_s, 99)):.2f}",
            )
            for name, times in found.items()
        ),
        caption=size.title,
    )


READING = """\
A dense decoder in bf16 trains on {sources} pre-tokenised sources, rows of {length:,} tokens. The first line trains on
the same batch again, which lies on the GPU. A loader can only add to this time, apart from the effect of other
document lengths. Steps that run ahead are timed all together. If the loss is read in each step, the GPU is idle until
the next batch and its first kernels have come. The rows of `DataLoader` are one document each, so attention in them
costs more."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--size", "sizes", multiple=True, type=click.IntRange(0, len(SIZES) - 1))
@click.option("--report/--no-report", default=True, show_default=True, help="Write the report.")
def main(sizes: tuple[int, ...], report: bool) -> None:
    """Time steps on a GPU by the source of their batches; needs a GPU.

    \b
    Example:
      python -m benchmarks.trainer.gpu_steps --size 0 --no-report
    """  # noqa: D301 -- click's own marker
    if not torch.cuda.is_available():
        raise click.ClickException("no GPU is seen here; benchmarks.loaders.waits needs none")
    corpus = MixedSources(documents=1_000)
    tables = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        build_sources(folder, corpus)
        for size in [SIZES[i] for i in sizes] or SIZES:
            work = Rows(folder=folder, corpus=corpus, length=_LENGTH, rows=size.rows)
            found = {}
            for name in CONTENDERS:
                found[name] = times_of(name, work, size)
                click.echo(f"{size.title}: {name}")
            tables.append(table_of(size, found))
            print_table(tables[-1])
    if report:
        path = write_report(
            __file__,
            "gpu_steps",
            "Steps on a GPU, by where their batches come from",
            "python -m benchmarks.trainer.gpu_steps",
            tables,
            READING.format(sources=corpus.sources, length=_LENGTH).replace("\n", " "),
            machine=this_machine(torch.cuda.get_device_name()),
        )
        click.echo(f"wrote {path.name}")


if __name__ == "__main__":
    main()
