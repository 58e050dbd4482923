"""Distributed checkpoints (DCP) on a striped namespace, without a mount.

::

    files, folder = open_striped("omnifs://ckpt/step-20::hdfs://namenode:9000/jobs")
    save_striped(state, files, folder)
    load_striped(state, files, folder)

or, where DCP is called already::

    dcp.save(state, storage_writer=StripedWriter(files, folder))
    dcp.load(state, storage_reader=StripedReader(files, folder))

Every rank writes one striped safetensors file, units straight from the tensors' memory;
rank 0 commits the index last. See ``docs/design/trainer/0014-striped-checkpoints.md``.

``StripedCheckpoints`` has those of a run, as ``Checkpoints`` has them in a folder::

    step-00000020/
      shard-00001-of-00002.safetensors   what rank 0 wrote, striped; tensors are spread over the ranks
      shard-00002-of-00002.safetensors
      index.json                         commits: where every tensor lies, the model's configuration
                                         and the data plane's state at the same step
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future
from typing_extensions import override

from fusefs.stores.protocol import checked_path
from fusefs.tree.namespace import StripedFiles
from omniload.base.errors import ConfigError, StateError
from omniload.base.log import get_logger
from omniload.base.state import Json, JsonObject
from trainer_integration.checkpoint.place import StorePlace
from trainer_integration.checkpoint.save_errors import NoRoomError, own_errors, require_room
from trainer_integration.checkpoint.saving import ALONE, Saving
from trainer_integration.checkpoint.striped.index import (
    INDEX,
    ITEM_BYTES,
    Chunk,
    ChunkToSave,
    Index,
    SavedTensor,
    ShardFile,
    lay_out,
    shard_name,
)
from trainer_integration.checkpoint.striped.place import is_path, location_of, read_index, within
from trainer_integration.checkpoint.striped.reader import StripedReader
from trainer_integration.checkpoint.striped.tensors import bytes_of, dtype_name, units_of
from trainer_integration.checkpoint.tensors import (
    NOTHING,
    Optimizer,
    Restored,
    require_same_model,
    tensors_of,
)
from trainer_integration.moe.parallel.process_groups import ProcessGroups

__all__ = ["StripedCheckpoints", "StripedWriter", "load_striped", "save_striped"]

_Results = list[WriteResult]


def save_striped(
    tensors: Mapping[str, Tensor],
    files: StripedFiles,
    folder: str,
    group: dist.ProcessGroup | None = None,
    *,
    about: Mapping[str, Json] | None = None,
) -> None:
    """Save tensors by name; when this returns on any rank, the checkpoint is on the store.

    Args:
        tensors: All ranks save sharded tensors (DTensor); one rank saves each other tensor.
        files: The namespace.
        folder: Path within the namespace; it must not hold a checkpoint.
        group: The ranks, all of which call this; None for one process.
        about: Plain JSON of rank 0 to commit with the tensors; ``load_striped`` returns it.

    Raises:
        ConfigError: An entry cannot be saved without pickle.
        StateError: A checkpoint is there already, or DCP cannot plan the save.
        NoRoomError: It does not fit the store, as far as the store can tell.
        UnavailableError: The store does not answer. No loadable checkpoint is left behind.
    """

    def room() -> int | None:
        usage = files.store.usage()
        return None if usage is None else usage.free_bytes

    where = location_of(files, folder)
    # An entry that is no tensor takes no room; the writer refuses it by name.
    need = sum(tensor.nbytes for tensor in tensors.values() if isinstance(tensor, Tensor))
    require_room(where, need, room, group)
    with own_errors(where, "nothing was saved", need=need, room=room):
        dcp_save(
            dict(tensors),
            storage_writer=StripedWriter(files, folder, about=about),
            process_group=group,
            no_dist=group is None,
        )


def load_striped(
    tensors: Mapping[str, Tensor],
    files: StripedFiles,
    folder: str,
    group: dist.ProcessGroup | None = None,
) -> Mapping[str, Json]:
    """Load tensors in place, with their present sharding, whatever their sharding was when they were saved.

    Args:
        tensors: The tensors to fill.
        files: The namespace.
        folder: Path within the namespace.
        group: The ranks, all of which call this; None for one process.

    Returns:
        The JSON that was saved as ``about``.

    Raises:
        IntegrityError: A piece is missing or has changed since the save; raised on all ranks.
        StateError: There is no checkpoint, another release wrote it, or a tensor is missing from it or has another
            size.
        UnavailableError: The store does not answer.
    """
    # DCP would turn any error of the index into an AssertionError.
    about = read_index(files, folder).about
    remedy = "load into tensors of the names and sizes saved"
    with own_errors(location_of(files, folder), remedy):
        dcp_load(
            dict(tensors),
            storage_reader=StripedReader(files, folder),
            process_group=group,
            no_dist=group is None,
        )
    return about


class StripedWriter(StorageWriter):
    """Writes a checkpoint into a folder of a striped namespace. One save per instance or ``reset``.

    Args:
        files: The namespace; its striping decides how many streams a rank writes.
        folder: Path within the namespace.
        about: Plain JSON to commit with the tensors.
    """

    def __init__(
        self, files: StripedFiles, folder: str, *, about: Mapping[str, Json] | None = None
    ) -> None:
        self._files = files
        self._about = dict(about or {})
        self._folder = checked_path(folder)

    @override
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._folder = checked_path(os.fspath(checkpoint_id))

    @override
    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **__: Any) -> None:
        """Make the folder and clear the remains of an interrupted save.

        Raises:
            StateError: A checkpoint is there already.
        """
        if not is_coordinator:
            return
        # The root of a namespace exists already, and cannot be created.
        if self._folder:
            try:
                self._files.names.make_directory(self._folder)
            except FileExistsError:
                pass
            else:
                return
        names = [info.name for info in self._files.listing(self._folder)]
        # Without an index, the files here were never committed, so an interrupted save may be overwritten.
        if INDEX in names:
            raise StateError(
                f"{location_of(self._files, self._folder)} holds a checkpoint; load it, or save into another folder"
            )
        for name in names:
            # The folder may contain unrelated files, because it may be the root of the namespace.
            if name.startswith("shard-"):
                self._files.names.remove(within(self._folder, name))

    @override
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuse entries that are not tensors, because DCP would pickle them.

        Raises:
            ConfigError: An entry is not a tensor, or has a type that safetensors does not know.
        """
        for item in plan.items:
            if item.tensor_data is None:
                raise ConfigError(
                    f"{item.index.fqn!r} is no tensor, and a checkpoint holds no pickle; "
                    "keep it as JSON beside the tensors"
                )
            dtype_name(item.tensor_data.properties.dtype, tensor=item.index.fqn)
        return plan

    @override
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        # By the position in the list, which is the rank, so that no two ranks write one file.
        names = (shard_name(i, len(plans)) for i in range(1, len(plans) + 1))
        return [replace(plan, storage_data=name) for plan, name in zip(plans, names, strict=True)]

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[_Results]:
        done: Future[_Results] = Future()
        done.set_result(self._write_shard(plan, planner) if plan.items else [])
        return done

    @override
    def finish(self, metadata: Metadata, results: list[_Results]) -> None:
        """Commit: from now on there is a checkpoint."""
        # By offsets: with a planner that keeps copies of replicated tensors, several ranks saved the same chunk.
        chunks: dict[str, dict[tuple[int, ...], Chunk]] = {}
        files: dict[str, ShardFile] = {}
        for result in (result for of_rank in results for result in of_rank):
            chunk, file = result.storage_data
            chunks.setdefault(result.index.fqn, {})[chunk.offsets] = chunk
            files[chunk.file] = file
        tensors = {}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata), "prepare_local_plan refused others"
            dtype = dtype_name(entry.properties.dtype, tensor=name)
            tensors[name] = SavedTensor(
                dtype=dtype, sizes=tuple(entry.size), chunks=tuple(chunks[name].values())
            )
        index = Index(files=files, tensors=tensors, about=self._about)
        # Last: all ranks have published their shards by now, because DCP calls this only then.
        self._files.write_file(within(self._folder, INDEX), index.encoded())

    @classmethod
    @override
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_path(checkpoint_id)

    def _write_shard(self, plan: SavePlan, planner: SavePlanner) -> _Results:
        # Wide types first, so that every tensor is aligned to its own elements.
        items = sorted(plan.items, key=lambda i: (-ITEM_BYTES[_chunk_of(i).dtype], i.index.fqn))
        chunks = [_chunk_of(item) for item in items]
        head, starts = lay_out(chunks)
        name = cast("str", plan.storage_data)
        path = within(self._folder, name)
        writer = self._files.writers.segment(path)

        def parts() -> Iterator[bytes | memoryview]:
            yield head
            for item in items:
                tensor = cast("Tensor", planner.resolve_data(item))
                # One after another, so that only one copy of a tensor on a GPU, or of scattered memory, exists.
                yield bytes_of(tensor.detach().cpu().contiguous())

        try:
            for unit in units_of(parts(), self._files.config.striping_of(path).unit):
                writer.append(unit)
            segment = writer.finish()
        except BaseException:
            # If a segment is not completed, no manifest names its objects.
            writer.abandon()
            raise
        # Its units are on the store already. The name comes last, so that a reader finds all of them.
        self._files.publish(path, (segment,))
        file = ShardFile(size_bytes=segment.size_bytes)
        results = []
        for item, chunk, at in zip(items, chunks, starts, strict=True):
            place = Chunk(offsets=chunk.offsets, sizes=chunk.sizes, file=name, at=at)
            results.append(WriteResult(item.index, chunk.size_bytes, (place, file)))
        return results


def _chunk_of(item: WriteItem) -> ChunkToSave:
    data = item.tensor_data
    assert data is not None, "prepare_local_plan refused what is no tensor"
    return ChunkToSave(
        tensor=item.index.fqn,
        dtype=dtype_name(data.properties.dtype, tensor=item.index.fqn),
        offsets=tuple(data.chunk.offsets),
        sizes=tuple(data.chunk.sizes),
    )


_LOG = get_logger(__name__)


class StripedCheckpoints(Saving[str]):
    """Checkpoints on a striped namespace."""

    def __init__(
        self,
        place: StorePlace,
        model_config: Mapping[str, Json],
        *,
        keep: int = 3,
        groups: ProcessGroups = ALONE,
    ) -> None:
        """Use ``place``, which all ranks of ``groups`` open; ``model_config`` must not change."""
        super().__init__(model_config, keep, groups)
        self._place = place

    @override
    def write(
        self,
        step: int,
        tensors: dict[str, Tensor],
        loader_state: Mapping[str, Json],
        progress: Mapping[str, Json] = NOTHING,
    ) -> str:
        """Save and commit tensors; see ``save``."""
        if self._rank == 0:
            # No rank writes meanwhile: ``save_striped`` begins with a message of rank 0, for which the others wait.
            self._sweep()
        about: JsonObject = {
            "step": step,
            "model": self._model_config,
            "loader": dict(loader_state),
            "progress": dict(progress),
        }
        path = self._place.path_of(step)
        try:
            save_striped(tensors, self._place.files, path, self._group, about=about)
        except NoRoomError:
            if self._rank == 0:  # all ranks leave a save together, so none still writes
                self._sweep()
            raise
        if self._rank == 0:
            # After the new one is committed, so that there are never fewer checkpoints than must be kept.
            for old in self._place.steps()[: -self._keep]:
                self._place.remove(old)
        if self._group is not None:
            # Otherwise a rank could begin the next save, or end, while rank 0 removes the replaced checkpoint.
            dist.barrier(group=self._group)
        return path

    def _sweep(self) -> None:
        for left in self._place.unfinished():
            _LOG.warning("removing step %d, left by an interrupted save", left)
            self._place.remove(left)

    @override
    def load(
        self, model: nn.Module, optimizer: Optimizer, *, step: int | None = None
    ) -> Restored | None:
        """Every byte is checked as it is read; see ``Saving.load``."""
        step = max(self._place.steps(), default=None) if step is None else step
        if step is None:
            return None
        path = self._place.path_of(step)
        about = read_index(self._place.files, path).about
        location = location_of(self._place.files, path)
        # This comes before a tensor is read; for another model, DCP would only report that sizes differ.
        require_same_model(location, about.get("model", {}), self._model_config)
        loader_state = self._place.loader_state_of(step)
        tensors = tensors_of(model, optimizer, self._groups)
        load_striped(tensors, self._place.files, path, self._group)
        return Restored(step=step, loader_state=loader_state, progress=about.get("progress", {}))
