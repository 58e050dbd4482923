"""Small models, microbatches and batches for the tests of the included trainer."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from omniload.batch.microbatch import IGNORE_LABEL, Batch, CpSlice, Microbatch
from trainer_integration.config import OptimizerConfig
from trainer_integration.moe.config import MoEConfig
from trainer_integration.moe.model import MoETransformer
from trainer_integration.training.optimizer import FlatAdamW
from trainer_integration.training.step import StepResult, train_step, use_one_thread

use_one_thread()

Document = NDArray[np.int32]
Row = Sequence[Document]


def a_config(**changes) -> MoEConfig:
    defaults = {
        "vocab_size": 50,
        "dim": 16,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "hidden": 24,
        "num_experts": 4,
        "top_k": 2,
    }
    return MoEConfig(**(defaults | changes))


def a_model(*, seed: int = 0, **changes) -> MoETransformer:
    # Larger weights than in a real start make the router choose clearly, so faults show.
    return MoETransformer(a_config(**({"init_std": 0.2} | changes)), seed=seed)


def an_optimizer(model: MoETransformer, *, steps: int = 100, **changes) -> FlatAdamW:
    return FlatAdamW(model, OptimizerConfig(**({"warmup_steps": 2} | changes)), steps)


def documents_of(lengths: Sequence[int], *, seed: int = 0, vocab_size: int = 50) -> list[Document]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, length).astype(np.int32) for length in lengths]


def a_microbatch(rows: Sequence[Row], length: int = 32) -> Microbatch:
    """Build a microbatch as the data plane would: whole documents, padding at the end of each row."""
    tokens = np.zeros((len(rows), length), np.int32)
    bounds, sources = [0], []
    for r, row in enumerate(rows):
        at = 0
        for document in row:
            stop = at + len(document)
            tokens[r, at:stop] = document
            bounds.append(r * length + stop)
            sources.append(0)
            at = stop
        if at < length:
            bounds.append((r + 1) * length)
            sources.append(-1)
    return Microbatch(
        tokens_RT=tokens,
        cu_seqlens=np.array(bounds, np.int32),
        sources_D=np.array(sources, np.int16),
        next_D=np.full(len(sources), IGNORE_LABEL, np.int32),
        keys_K4=np.zeros((0, 4), np.int64),
    )


def a_batch(
    step: int, microbatches: Sequence[Microbatch | CpSlice], *, loss_tokens: int = 0
) -> Batch:
    if not loss_tokens:
        loss_tokens = sum(int(m.loss_mask_RT.sum()) for m in microbatches)
    return Batch(
        step=step,
        microbatches=tuple(microbatches),
        loss_tokens=loss_tokens,
        imbalance=1.0,
        bound=1.0,
    )


def rows_of(step: int, *, num_rows: int = 4, vocab_size: int = 50) -> list[Row]:
    """Return rows of documents of mixed lengths, the same in every run."""
    lengths = ((20, 12), (7, 9, 3), (32,), (1, 2, 25))
    return [
        documents_of(lengths[r % 4], seed=100 * step + r, vocab_size=vocab_size)
        for r in range(num_rows)
    ]


def train_on(model: MoETransformer, optimizer: FlatAdamW, step: int) -> StepResult:
    return train_step(model, optimizer, a_batch(step, [a_microbatch(rows_of(step))]))


def a_run(*, seed: int = 0, steps: int = 1) -> tuple[MoETransformer, FlatAdamW]:
    """Return a model and its optimiser after ``steps`` steps."""
    model = a_model(seed=seed)
    optimizer = an_optimizer(model)
    for step in range(steps):
        train_on(model, optimizer, step)
    return model, optimizer


def a_text(length: int, *, vocab_size: int = 50) -> Document:
    """Return a text that can be learnt: each token decides the next."""
    text = np.empty(length, np.int32)
    text[0] = 1
    for i in range(1, length):
        text[i] = (3 * text[i - 1] + 7) % vocab_size
    return text


def all_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> bool:
    return torch.allclose(found, expected, rtol=tolerance, atol=tolerance)
