"""Datasets for measurements of a loader, and one turn of a loader over them."""

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]
from typing_extensions import override

from trainer_integration import DataLoader

__all__ = ["CONTENDERS", "WORK", "Dicts", "Images", "Labelled", "Tokens", "Turn", "turn_of"]

CONTENDERS: dict[str, Callable[..., Any]] = {
    "torch": TorchLoader,
    "torchdata": StatefulDataLoader,
    "ours": DataLoader,
}
_SAMPLES = 4_096
_LENGTH = 1_024


class Tokens(Dataset[Any]):
    """Samples of 1,024 token ids as int64, cut from an array of uint16."""

    def __init__(self, samples: int = _SAMPLES) -> None:
        """Make ids for ``samples`` samples; a longer epoch reads them again."""
        self._samples = samples
        self._ids = np.random.default_rng(0).integers(0, 50_000, _SAMPLES * _LENGTH, np.uint16)

    def __len__(self) -> int:
        return self._samples

    @override
    def __getitem__(self, index: int) -> Any:
        at = index % _SAMPLES * _LENGTH
        return torch.from_numpy(self._ids[at : at + _LENGTH].astype(np.int64))


class Labelled(Tokens):
    """The same as a mapping of ids and labels, the usual form for language models."""

    @override
    def __getitem__(self, index: int) -> Any:
        ids = super().__getitem__(index)
        return {"input_ids": ids, "labels": ids.clone()}


class Images(Dataset[Any]):
    """Decoded images of 3 x 224 x 224 float32 with a class: a slice of memory, no decoding."""

    def __init__(self, samples: int = _SAMPLES) -> None:
        """Hold 64 images; a longer epoch reads them again."""
        self._samples = samples
        self._pixels = torch.rand(64, 3, 224, 224)

    def __len__(self) -> int:
        return self._samples

    @override
    def __getitem__(self, index: int) -> Any:
        return self._pixels[index % 64], index % 1_000


class Dicts(Dataset[Any]):
    """Small dictionaries in a list: objects whose reference counts make every worker copy their pages."""

    def __init__(self, samples: int) -> None:
        """Make ``samples`` dictionaries of a number and a text."""
        self._rows: list[dict[str, Any]] = [
            {"id": n, "text": f"document {n}"} for n in range(samples)
        ]

    def __len__(self) -> int:
        return len(self._rows)

    @override
    def __getitem__(self, index: int) -> Any:
        row = self._rows[index]
        return row["id"], len(row["text"])


WORK: dict[str, Callable[[int], Dataset[Any]]] = {
    "tokens": Tokens,
    "tokens and labels": Labelled,
    "images": Images,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Result of one loader in one turn."""

    rate: float
    """Batches per second, once the workers have started."""
    cpu_ms: float
    """CPU milliseconds for a batch, of this process and its workers, including their start."""


def turn_of(contender: str, work: str, *, workers: int, batches: int, read: bool) -> Turn:
    """Take ``batches`` batches of 32 and time them from the first eighth on.

    With ``read`` each batch is copied once, as a trainer copies it to its device.
    """
    skipped = max(1, batches // 8)
    dataset: Any = WORK[work](32 * (batches + skipped))
    loader: Any = CONTENDERS[contender](dataset, 32, shuffle=True, num_workers=workers)
    room: dict[int, torch.Tensor] = {}
    used_s, began_s = _cpu_s(), 0.0
    for number, batch in enumerate(loader):
        if number == skipped:
            began_s = time.perf_counter()
        if read:
            _copy(batch, room)
    waited_s = time.perf_counter() - began_s
    return Turn(
        rate=(batches - 1) / waited_s, cpu_ms=1e3 * (_cpu_s() - used_s) / (batches + skipped)
    )


def _copy(batch: object, room: dict[int, torch.Tensor]) -> None:
    parts: Any = batch.values() if isinstance(batch, dict) else batch
    for place, part in enumerate([batch] if isinstance(batch, torch.Tensor) else parts):
        if place not in room or room[place].shape != part.shape:
            room[place] = torch.empty_like(part)
        room[place].copy_(part)


def _cpu_s() -> float:
    """Return the CPU seconds of this process and of its ended children."""
    own, ended = (
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime
