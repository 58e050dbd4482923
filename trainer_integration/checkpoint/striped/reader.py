"""The reading half of distributed checkpoints on a striped namespace.

Sizes are checked here, and the index in ``place``. Each unit is compared with its checksum where the namespace reads it
(``fusefs.format.unit_check``).
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future as TorchFuture
from typing_extensions import override

from fusefs.base.serial_executor import wait_all
from fusefs.stores.protocol import checked_path
from fusefs.tree.namespace import OpenVersion, StripedFiles
from omniload.base.errors import IntegrityError, OmniloadError
from trainer_integration.checkpoint.striped.index import Box, Chunk, Index, Slab
from trainer_integration.checkpoint.striped.place import is_path, location_of, read_index, within
from trainer_integration.checkpoint.striped.tensors import DTYPES, bytes_of

__all__ = ["StripedReader"]

_SHORTEST_RUN_BYTES = 16 << 10
"""Length of a box's runs above which reading each run directly is faster than reading the bytes that enclose them."""
_STAGING_BYTES = 64 << 20
"""Memory for boxes that cannot be read directly into their tensors."""

_Places = dict[MetadataIndex, tuple[Chunk, torch.dtype]]


@dataclass(frozen=True, slots=True)
class _Read:
    """A box of a chunk, and the tensor it is read into."""

    item: ReadItem
    target: Tensor
    box: Box
    at: int
    """First byte of the chunk within its file."""
    dtype: torch.dtype

    @property
    def is_straight(self) -> bool:
        """Whether the box is read into the tensor's own memory."""
        target = self.target
        # Bytes are read unchanged, so another type, a GPU or a strided window needs a copy in between.
        if target.dtype != self.dtype or target.device.type != "cpu" or not target.is_contiguous():
            return False
        run = self.box.run_elements
        return run == self.box.num_elements or run * self.dtype.itemsize >= _SHORTEST_RUN_BYTES

    def spans(self) -> Iterator[tuple[int, memoryview]]:
        """Yield ranges of the file and their destinations."""
        view, itemsize = bytes_of(self.target), self.dtype.itemsize
        size = self.box.run_elements * itemsize
        for i, start in enumerate(self.box.runs()):
            yield self.at + start * itemsize, view[i * size : (i + 1) * size]

    def take(self, slab: Slab, staged: Tensor) -> None:
        """Copy the rows of a slab out of the memory that encloses them."""
        lengths = list(self.box.lengths_D)
        target = self.target
        if lengths:
            lengths[slab.dimension] = slab.num_rows
            target = target.narrow(slab.dimension, slab.first_row, slab.num_rows)
        # The slab has the gaps of the chunk, so the chunk's own strides find its elements.
        target.copy_(staged.as_strided(lengths, self.box.strides_D))


class StripedReader(StorageReader):
    """Reads a checkpoint that ``StripedWriter`` committed, with any number of ranks and any sharding.

    Args:
        files: The namespace.
        folder: Path within the namespace.
    """

    def __init__(self, files: StripedFiles, folder: str) -> None:
        self._files = files
        self._folder = checked_path(folder)
        self._index: Index | None = None
        self._places: _Places = {}

    @override
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._folder = checked_path(os.fspath(checkpoint_id))
        self._index = None

    @override
    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return the content of the checkpoint.

        Raises:
            IntegrityError: The index is not the one that was saved.
            StateError: There is no checkpoint, or another release wrote it.
        """
        self._index = read_index(self._files, self._folder)
        tensors = {}
        places: _Places = {}
        for name, saved in self._index.tensors.items():
            dtype = DTYPES[saved.dtype]
            tensors[name] = TensorStorageMetadata(
                properties=TensorProperties(dtype=dtype),
                size=torch.Size(saved.sizes),
                chunks=[
                    ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes))
                    for c in saved.chunks
                ],
            )
            for chunk in saved.chunks:
                # By offsets, as DCP requires: it plans a read by the chunks that overlap with a rank's part.
                places[MetadataIndex(name, chunk.offsets)] = chunk, dtype
        return Metadata(state_dict_metadata=dict(tensors), storage_data=places)

    @override
    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any
    ) -> None:
        self._places = cast("_Places", metadata.storage_data)

    @override
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    @override
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> TorchFuture[None]:
        """Fill the tensors of ``plan``, from all ranges of all files in parallel.

        Raises:
            IntegrityError: A file, an object or a unit is missing or has changed; the message names it.
            UnavailableError: The store does not answer.
        """
        # Grouped by file, so that each file is opened once, however many tensors are in it.
        by_file: dict[str, list[_Read]] = {}
        for item in plan.items:
            chunk, dtype = self._places[item.storage_index]
            # A window into the rank's own tensor, so filling it is loading.
            target = planner.resolve_tensor(item).detach()
            box = Box(chunk.sizes, tuple(item.storage_offsets), tuple(item.lengths))
            by_file.setdefault(chunk.file, []).append(_Read(item, target, box, chunk.at, dtype))
        with ExitStack() as stack:
            files = {name: stack.enter_context(self._opened(name)) for name in by_file}
            self._fill_straight(files, by_file)
            for name, reads in by_file.items():
                self._fill_staged(name, files[name], [r for r in reads if not r.is_straight])
        for read in (read for reads in by_file.values() for read in reads):
            # Only after all reads, because from here on DCP considers a tensor loaded, and may copy it.
            planner.commit_tensor(read.item, read.target)
        done: TorchFuture[None] = TorchFuture()
        done.set_result(None)
        return done

    @classmethod
    @override
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_path(checkpoint_id)

    def _opened(self, name: str) -> OpenVersion:
        assert self._index is not None, "read_metadata comes first"
        try:
            file = self._files.open(within(self._folder, name))
        except FileNotFoundError as error:
            held = [
                t for t, s in self._index.tensors.items() if any(c.file == name for c in s.chunks)
            ]
            raise IntegrityError(
                f"{self._location}: {name} is missing; it holds {len(held)} tensors, {held[0]!r} among "
                "them; load an earlier checkpoint"
            ) from error
        # The index names positions in the saved file; in another file, they would belong to other tensors.
        found, wanted = file.reader.size_bytes, self._index.files[name].size_bytes
        if found != wanted:
            file.close()
            raise IntegrityError(
                f"{self._location}: {name} has {found} bytes, {wanted} were saved; "
                "load an earlier checkpoint"
            )
        return file

    def _fill_straight(
        self, files: Mapping[str, OpenVersion], by_file: Mapping[str, Sequence[_Read]]
    ) -> None:
        fills = {
            name: files[name].reader.start_into(
                span for read in reads if read.is_straight for span in read.spans()
            )
            for name, reads in by_file.items()
        }
        # All files are requested before any is awaited.
        try:
            for name, of_file in fills.items():
                self._wait(name, of_file)
        finally:
            rest = [future for of_file in fills.values() for future in of_file]
            for future in rest:
                future.cancel()
            # Ranges under way still write into tensors, which the caller may release after an error.
            with suppress(OSError, OmniloadError):
                wait_all(rest)

    def _fill_staged(self, name: str, file: OpenVersion, reads: Sequence[_Read]) -> None:
        """Read boxes through memory that encloses them, some slabs at a time."""
        waiting: list[tuple[_Read, Slab, Tensor]] = []
        staged_bytes = 0
        for read in reads:
            # Quarters, so that several slabs can be read in parallel within the staging memory.
            for slab in read.box.slabs(read.dtype.itemsize, most_bytes=_STAGING_BYTES // 4):
                elements = slab.size_bytes // read.dtype.itemsize
                waiting.append((read, slab, torch.empty(elements, dtype=read.dtype)))
                staged_bytes += slab.size_bytes
                if staged_bytes >= _STAGING_BYTES:
                    self._copy_staged(name, file, waiting)
                    waiting, staged_bytes = [], 0
        self._copy_staged(name, file, waiting)

    def _copy_staged(
        self, name: str, file: OpenVersion, waiting: Sequence[tuple[_Read, Slab, Tensor]]
    ) -> None:
        spans = [(read.at + slab.offset_bytes, bytes_of(staged)) for read, slab, staged in waiting]
        self._wait(name, file.reader.start_into(spans))
        for read, slab, staged in waiting:
            read.take(slab, staged)

    def _wait(self, name: str, fills: Sequence[Future[None]]) -> None:
        try:
            wait_all(fills)
        except IntegrityError as error:
            raise IntegrityError(f"{self._location}: {name}: {error}") from error

    @property
    def _location(self) -> str:
        return location_of(self._files, self._folder)
