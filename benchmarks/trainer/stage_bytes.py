"""Bytes over the wire to each rank of a pipeline for a batch, compared with the whole batch for each.

python -m benchmarks.trainer.stage_bytes --help
"""

import json
import multiprocessing
import os
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import mean
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import omniload
from benchmarks.report import Table, print_table, write_report
from benchmarks.trainer.vision_corpus import write_documents
from omniload.batch.microbatch import Batch
from omniload.batch.wire import Parts, Routes, to_bytes, to_parts
from omniload.front import peers
from tests.support.ports import free_port

__all__ = ["CASES", "main", "mix_of", "table_of"]

_STAGES, _TENSOR = 3, 2
_NAMES = ("first", "middle", "last")
_TEXT, _PATCH, _MERGE = 4_096, 14, 2
CASES = {
    "text": "Text with a loss mask, {tokens:,} tokens a step",
    "images": "Text and images of its rows, {tokens:,} tokens a step",
    "dealt": "The same, images dealt to all ranks (`balance.strategy: hybrid`)",
}

READING = """\
One data-parallel rank with {stages} stages and {tensor} tensor-parallel peers each, as processes that fetch from
threads of the first; mean of {steps} steps. "Whole" is the batch as one buffer, with the images of all ranks, as
each peer received it before stages declared the parts that they use. "By stage" is the data that gloo delivered to
the rank in broadcasts and scatters, including headers and states. The peer of the first stage is the one that does
not fetch. Scattered data has the length of the largest share, and the rest of it is padding."""


def mix_of(case: str, folder: Path) -> dict[str, Any]:
    """Write a corpus, and return the mix over it for a case."""
    length = _TEXT if case == "text" else 2_048
    mix: dict[str, Any] = {
        "version": 1,
        "seed": 1,
        "mix": {"stages": [{"from_step": 0, "weights": {"documents": 1.0}}]},
        "pack": {"length": length},
        "batch": {"tokens": 16 * length, "micro_tokens": 4 * length},
    }
    path = str(folder / "documents.parquet")
    if case == "text":
        rng = np.random.default_rng(0)
        sizes = np.clip(rng.lognormal(6.2, 1.0, 600), 8, _TEXT).astype(int)
        tokens = [rng.integers(0, 50_000, size, np.int32) for size in sizes]
        masks = [np.arange(size) > size // 3 for size in sizes]
        pq.write_table(pa.table({"tokens": tokens, "mask": masks}), path, row_group_size=32)
        columns = {"loss_mask": "mask"}
        source = {"type": "parquet", "path": path, "tokens": "tokens", "columns": columns}
        return mix | {"sources": {"documents": source}}
    write_documents(folder, 600)
    images = {"type": "images", "patch": _PATCH, "merge": _MERGE}
    images |= {"max_patches": 4_096, "placeholder": 7}
    source = {"type": "parquet", "path": path, "text": "text", "images": "images"}
    return mix | {
        "tokenizer": {"type": "bytes"},
        "sources": {"documents": source | {"transforms": [images]}},
        "balance": {"strategy": "hybrid" if case == "dealt" else "balanced"},
    }


def _serve(folder: Path, rank: int, steps: int) -> None:
    """Act as one rank: count received bytes, and at the fetching rank the bytes that each peer would have received."""
    os.environ["RANK"] = str(rank)
    torch.set_num_threads(1)
    came = {"bytes": 0, "whole": 0}
    gloo = dist.ProcessGroupGloo

    def counted(call: Any) -> Any:  # noqa: ANN401 -- methods of torch
        def wrapped(group: Any, tensor: torch.Tensor, *others: Any) -> Any:  # noqa: ANN401
            came["bytes"] += tensor.nbytes if group.rank() else 0
            return call(group, tensor, *others)

        return wrapped

    def parts_of(batch: Batch, routes: Routes) -> Parts:
        came["whole"] += len(to_bytes(batch))
        return to_parts(batch, routes)

    gloo.broadcast, gloo.scatter = counted(gloo.broadcast), counted(gloo.scatter)
    peers.to_parts = parts_of  # type: ignore[attr-defined]
    mesh = init_device_mesh("cpu", (_STAGES, _TENSOR), mesh_dim_names=("pp", "tp"))
    with omniload.open(folder / "mix.yaml", mesh=mesh, steps=steps) as loader:
        taken = sum(1 for _ in loader)
    told = {name: count / taken for name, count in came.items()}
    (folder / f"{rank}.json").write_text(json.dumps(told | {"stage": mesh.get_local_rank("pp")}))
    dist.destroy_process_group()


def _ranks(case: str, steps: int) -> tuple[int, list[dict[str, float]]]:
    """Return the tokens of a step, and the counts of each rank of a job, in their order."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    os.environ |= place | {"WORLD_SIZE": str(_STAGES * _TENSOR)}
    # Forked, so torch is loaded once. This process has started no thread.
    forked = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _run([forked.Process(target=_write, args=(case, folder))])
        numbers = range(_STAGES * _TENSOR)
        _run([forked.Process(target=_serve, args=(folder, rank, steps)) for rank in numbers])
        content = json.loads((folder / "mix.yaml").read_text())
        told = [json.loads((folder / f"{rank}.json").read_text()) for rank in numbers]
    return int(content["batch"]["tokens"]), told


def _run(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        if process.exitcode:
            raise RuntimeError(f"a process ended with {process.exitcode}; see its message above")


def _write(case: str, folder: Path) -> None:
    (folder / "mix.yaml").write_text(json.dumps(mix_of(case, folder)))


def table_of(caption: str, ranks: Sequence[Mapping[str, float]]) -> Table:
    """Return the bytes of the ranks of each stage, and the whole batch that the first of them counted."""
    whole = ranks[0]["whole"]
    rows = []
    for stage, name in enumerate(_NAMES):
        came = mean(rank["bytes"] for rank in ranks[1:] if rank["stage"] == stage)
        rows.append((name, f"{whole / 1e3:,.0f}", f"{came / 1e3:,.1f}", f"{came / whole:.3f}"))
    columns = ("stage", "KB a step, whole", "KB a step, by stage", "of the whole")
    return Table(columns=columns, rows=tuple(rows), caption=caption)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--steps", default=8, show_default=True, type=click.IntRange(1))
@click.option("--report/--no-report", default=True, show_default=True, help="Write the report.")
def main(steps: int, report: bool) -> None:
    """Measure the bytes that each stage of a pipeline receives.

    \b
    Example:
      python -m benchmarks.trainer.stage_bytes --steps 2 --no-report
    """  # noqa: D301 -- click's own marker
    tables = []
    for case, title in CASES.items():
        tokens, ranks = _ranks(case, steps)
        tables.append(table_of(title.format(tokens=tokens), ranks))
        print_table(tables[-1])
    if report:
        reading = READING.format(stages=_STAGES, tensor=_TENSOR, steps=steps)
        path = write_report(
            __file__,
            "stage_bytes",
            "What comes to each stage of a pipeline",
            f"python -m benchmarks.trainer.stage_bytes --steps {steps}",
            tables,
            reading.replace("\n", " "),
        )
        click.echo(f"wrote {path.name}")


if __name__ == "__main__":
    main()
