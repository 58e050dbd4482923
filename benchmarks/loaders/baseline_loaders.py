"""Loaders with which such a mix is usually read today, written with due care: rows from torch loaders.

Every stream yields the tokens of one batch of rows at a time. Rows are concatenated documents, and the source of each
document is a weighted random choice.
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchdata import nodes
from typing_extensions import override

from benchmarks.loaders.mixed_sources import MixedSources

__all__ = ["Rows", "dataloader", "dataloader_rows", "torchdata_nodes", "torchdata_nodes_rows"]

Tokens = NDArray[np.int32]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The files of a stream, and the shape of its rows."""

    folder: Path
    corpus: MixedSources
    length: int
    """Tokens in a row."""
    rows: int
    """Rows of a batch."""
    step_rows: int = 0
    """Rows of a step of the data plane, in microbatches of ``rows``; 0 means the rows of a batch."""

    def files(self, name: str) -> list[Path]:
        """Return the shards of one source."""
        return sorted((self.folder / name).glob("*.parquet"))


def lists_of(files: Sequence[Path], batch_rows: int) -> Iterator[list[int]]:
    """Yield documents as lists of ids, for ever, in the way of tutorials."""
    for file in itertools.cycle(files):
        for batch in pq.ParquetFile(file).iter_batches(batch_rows, columns=["tokens"]):
            yield from batch.column(0).to_pylist()


def arrays_of(files: Sequence[Path], batch_rows: int) -> Iterator[Tokens]:
    """Yield documents as views of the column, for ever, without copies."""
    for file in itertools.cycle(files):
        for batch in pq.ParquetFile(file).iter_batches(batch_rows, columns=["tokens"]):
            yield from slices_of(batch.column(0))


def slices_of(column: pa.ListArray) -> list[Tokens]:
    """Return the lists of an Arrow column as views of its values."""
    values, offsets = column.values.to_numpy(), column.offsets.to_numpy().tolist()
    return [values[a:b] for a, b in itertools.pairwise(offsets)]


def packed(documents: Iterator[Tokens], length: int) -> Iterator[torch.Tensor]:
    """Lay documents end to end and cut at row boundaries; every token is copied once."""
    row, filled = np.empty(length, np.int32), 0
    for document in documents:
        at = 0
        while at < len(document):
            count = min(len(document) - at, length - filled)
            row[filled : filled + count] = document[at : at + count]
            at, filled = at + count, filled + count
            if filled == length:
                yield torch.from_numpy(row)
                row, filled = np.empty(length, np.int32), 0


class MixedRows(IterableDataset[torch.Tensor]):
    """Rows of a mix; every worker reads its own shards of every source."""

    def __init__(self, work: Rows, style: Literal["lists", "arrays"]) -> None:
        super().__init__()
        self._work, self._style = work, style

    @override
    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        chosen = random.Random(worker)
        shards = [self._work.files(name)[worker::workers] for name in self._work.corpus.names]
        group = self._work.corpus.group_rows
        if self._style == "arrays":
            arrays = [arrays_of(files, group) for files in shards]
            return packed(map(next, self._choices(chosen, arrays)), self._work.length)
        return self._from_lists(chosen, [lists_of(files, group) for files in shards])

    def _from_lists(
        self, chosen: random.Random, streams: list[Iterator[list[int]]]
    ) -> Iterator[torch.Tensor]:
        buffer: list[int] = []
        length = self._work.length
        for stream in self._choices(chosen, streams):
            buffer.extend(next(stream))
            while len(buffer) >= length:
                yield torch.tensor(buffer[:length])
                del buffer[:length]

    def _choices(self, chosen: random.Random, streams: list[Iterator[T]]) -> Iterator[Iterator[T]]:
        while True:
            yield from chosen.choices(streams, self._work.corpus.weights, k=1_000)


def dataloader(work: Rows, style: Literal["lists", "arrays"], num_workers: int) -> Iterator[int]:
    """Read through ``torch.utils.data.DataLoader``."""
    for rows in dataloader_rows(work, style, num_workers):
        yield rows.numel()


def dataloader_rows(
    work: Rows, style: Literal["lists", "arrays"], num_workers: int
) -> Iterator[torch.Tensor]:
    """Yield the output of ``torch.utils.data.DataLoader``: the rows of a step, ``[R, T]``."""
    yield from DataLoader(MixedRows(work, style), batch_size=work.rows, num_workers=num_workers)


class _Packer(nodes.BaseNode[torch.Tensor]):
    """Rows from a node of documents."""

    def __init__(self, documents: nodes.BaseNode[Tokens], length: int) -> None:
        super().__init__()
        self._documents, self._length = documents, length
        self._rows: Iterator[torch.Tensor] = iter(())

    @override
    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self._documents.reset(None)
        self._rows = packed(self._documents, self._length)

    @override
    def next(self) -> torch.Tensor:
        return next(self._rows)

    @override
    def get_state(self) -> dict[str, Any]:
        return {}  # the state for a resume is left out, which only saves the baseline work


def torchdata_nodes(work: Rows) -> Iterator[int]:
    """Read through ``torchdata.nodes``."""
    for rows in torchdata_nodes_rows(work):
        yield rows.numel()


def torchdata_nodes_rows(work: Rows) -> Iterator[torch.Tensor]:
    """Yield the rows of a step, ``[R, T]``: a decoding thread for every source, and one thread that packs ahead."""

    def decode(address: tuple[Path, int]) -> list[Tokens]:
        file, group = address
        table = pq.ParquetFile(file).read_row_group(group, columns=["tokens"])
        return [part for chunk in table["tokens"].chunks for part in slices_of(chunk)]

    sources: dict[str, nodes.BaseNode[Tokens]] = {}
    for name in work.corpus.names:
        groups = [
            (file, group)
            for file in work.files(name)
            for group in range(pq.ParquetFile(file).num_row_groups)
        ]
        decoded = nodes.ParallelMapper(
            nodes.IterableWrapper(groups), decode, num_workers=1, method="thread"
        )
        sources[name] = nodes.Unbatcher(decoded)
    mixed = nodes.MultiNodeWeightedSampler(
        sources,
        dict(zip(work.corpus.names, work.corpus.weights, strict=True)),
        stop_criteria=nodes.StopCriteria.CYCLE_FOREVER,
    )
    batches = nodes.Batcher(_Packer(mixed, work.length), work.rows)
    yield from nodes.Loader(nodes.Prefetcher(nodes.Mapper(batches, torch.stack), 4))
