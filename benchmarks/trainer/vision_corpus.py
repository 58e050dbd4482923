"""Documents of text and drawn images with uneven work, and the steps that a data plane makes of them."""

import io
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image

from omniload.actors.local.plane import LocalPlane
from omniload.actors.plane import PlaneSpec
from omniload.batch.images import images_of
from omniload.batch.microbatch import Batch, Microbatch
from omniload.client import Client
from omniload.mix.config import MixConfig
from omniload.plan.place_tree import ClientPlaceTree
from trainer_integration.moe.config import MoEConfig
from trainer_integration.moe.flops import cost_of
from trainer_integration.run.model_of import with_cost_of
from trainer_integration.vision.config import VisionConfig
from trainer_integration.vision.flops import encoder_cost_of

__all__ = [
    "LENGTH",
    "MODEL",
    "VISION",
    "Layout",
    "Work",
    "flops_of",
    "imbalance_of",
    "steps_of",
    "works_of",
    "write_documents",
]

LENGTH = 2048
MODEL = MoEConfig(vocab_size=257)
VISION = VisionConfig(patch=14, merge=2, num_layers=4)
"""The default with two more layers: an embedding then costs the encoder about as much as a token costs the backbone."""
_MARKER, _PLACEHOLDER = "<image>", 7
_LEAST_PATCHES, _MOST_PATCHES, _TAIL = 16, 4096, 0.6
_WITH_IMAGES = 0.3
"""Share of the documents that have images."""
_SIDE = VISION.patch * VISION.merge


@dataclass(frozen=True, slots=True)
class Layout:
    """Batch of a rank in a step."""

    ranks: int
    """Number of ranks."""
    microbatches: int
    """Microbatches of each rank."""
    rows: int
    """Rows of each microbatch."""


@dataclass(frozen=True, slots=True)
class Work:
    """Work of a rank in a microbatch."""

    patches_I: NDArray[np.int64]
    """Patches of each image that it encodes."""
    lengths_D: NDArray[np.int64]
    """Tokens of each document of its rows."""


def write_documents(folder: Path, count: int) -> None:
    """Write documents of text (log-normal, median 245 bytes), some with one to three images of Pareto's sizes."""
    rng = np.random.default_rng(0)
    texts, images = [], []
    kept: dict[tuple[int, int], bytes] = {}
    for _ in range(count):
        words = "a" * int(np.clip(rng.lognormal(5.5, 1.0), 8, 1_000))
        num = int(rng.integers(1, 4)) * int(rng.random() < _WITH_IMAGES)
        grids = [_grid(rng) for _ in range(num)]
        # A document is one sample if its images and its text fit into a row.
        while grids and sum(r * c for r, c in grids) + len(words) > LENGTH - 2:
            grids.pop()
        for grid in grids:
            kept[grid] = kept.get(grid) or _png(*grid)
        texts.append(_MARKER * len(grids) + words)
        images.append([kept[grid] for grid in grids])
    folder.mkdir(parents=True, exist_ok=True)
    table = pa.table({"text": texts, "images": pa.array(images, pa.list_(pa.binary()))})
    pq.write_table(table, folder / "documents.parquet", row_group_size=32)


def _grid(rng: np.random.Generator) -> tuple[int, int]:
    """Draw the rows and columns of an image in squares of merged patches, one embedding each."""
    patches = min(_LEAST_PATCHES * (1 + rng.pareto(_TAIL)), _MOST_PATCHES)
    rows = max(1, round(np.sqrt(patches) / VISION.merge))
    return rows, max(1, round(patches / VISION.merge**2 / rows))


def _png(rows: int, columns: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (columns * _SIDE, rows * _SIDE), (80 + rows, 100, 60 + columns)).save(
        out, "PNG"
    )
    return out.getvalue()


def _mix(strategy: str, layout: Layout) -> MixConfig:
    """Return the mix of the documents, balanced as ``omniload train run`` balances it."""
    images = {
        "type": "images",
        "patch": VISION.patch,
        "merge": VISION.merge,
        "max_patches": _MOST_PATCHES,
        "placeholder": _PLACEHOLDER,
    }
    source = {
        "type": "parquet",
        "path": "documents.parquet",
        "text": "text",
        "images": "images",
        "transforms": [images],
    }
    micro_tokens = layout.rows * LENGTH
    content: dict[str, Any] = {
        "version": 1,
        "seed": 1,
        "tokenizer": {"type": "bytes"},
        "sources": {"documents": source},
        "mix": {"stages": [{"from_step": 0, "weights": {"documents": 1.0}}]},
        "pack": {"length": LENGTH},
        "batch": {
            "tokens": layout.ranks * layout.microbatches * micro_tokens,
            "micro_tokens": micro_tokens,
        },
        "balance": {"strategy": strategy},
        "runtime": {"prefetch_steps": 1},
    }
    return with_cost_of(MODEL, MixConfig.model_validate(content), VISION)


def steps_of(folder: Path, strategy: str, layout: Layout) -> Iterator[tuple[Batch, ...]]:
    """Yield the batches of all ranks, step by step; the rows of a step do not depend on the strategy."""
    tree = ClientPlaceTree.of(dp=layout.ranks)
    with (
        LocalPlane(PlaneSpec(mix=_mix(strategy, layout), base_dir=folder, tree=tree)) as plane,
        ExitStack() as opened,
    ):
        clients = [opened.enter_context(Client(plane.handle(rank))) for rank in range(layout.ranks)]
        while True:
            batches = [client.next_batch() for client in clients]
            yield tuple(batch for batch in batches if batch is not None)


def works_of(step: Sequence[Batch]) -> list[list[Work]]:
    """Return the work of each rank of a step in each microbatch."""
    return [
        [_work_of(m) for m in batch.microbatches if isinstance(m, Microbatch)] for batch in step
    ]


def _work_of(microbatch: Microbatch) -> Work:
    grids = [image.grid for image in images_of(microbatch)]
    bounds = microbatch.cu_seqlens.astype(np.int64)
    return Work(
        patches_I=np.array([rows * columns for rows, columns in grids], np.int64),
        lengths_D=np.diff(bounds)[microbatch.sources_D >= 0],
    )


def flops_of(works: Sequence[Work]) -> float:
    """Return the FLOPs of some microbatches, forward and backward."""
    (linear, quadratic), (per_patch, per_pair) = cost_of(MODEL), encoder_cost_of(VISION, MODEL.dim)
    return float(
        sum(
            linear * w.lengths_D.sum()
            + quadratic * (w.lengths_D**2).sum()
            + per_patch * w.patches_I.sum()
            + per_pair * (w.patches_I**2).sum()
            for w in works
        )
    )


def imbalance_of(works_RM: Sequence[Sequence[Work]]) -> float:
    """Return the FLOPs of the heaviest rank over those of the lightest."""
    flops_R = [flops_of(works) for works in works_RM]
    return max(flops_R) / min(flops_R)
