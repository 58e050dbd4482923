"""Distributed checkpoints (DCP) on a striped namespace, without a mount.

::

    files, folder = open_striped("omnifs://ckpt/step-20::hdfs://namenode:9000/jobs")
    save_striped(state, files, folder)
    load_striped(state, files, folder)

or, where DCP is called already::

    dcp.save(state, storage_writer=StripedWriter(files, folder))
    dcp.load(state, storage_reader=StripedReader(files, folder))

Every rank writes one striped safetensors file, units straight from the tensors' memory;
rank 0 commits the index last. See ``docs/design/0014-striped-checkpoints.md``.
"""

from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from fusefs.tree.namespace import StripedFiles
from omniload.base.state import Json
from trainer_integration.checkpoint.save_errors import own_errors, require_room
from trainer_integration.checkpoint.striped.place import location_of, read_index
from trainer_integration.checkpoint.striped.reader import StripedReader
from trainer_integration.checkpoint.striped.writer import StripedWriter

__all__ = ["load_striped", "save_striped"]


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
        tensors: Sharded ones (DTensor) are saved by all ranks, others by one each.
        files: The namespace.
        folder: Path within it; without a checkpoint.
        group: The ranks, which all call this; None for one process.
        about: Plain JSON, rank 0's of which is committed with the tensors: ``read_index(...).about``.

    Raises:
        ConfigError: An entry cannot be saved without pickle.
        StateError: A checkpoint is there, or DCP cannot plan the save.
        NoRoomError: It does not fit the store, as far as the store can tell.
        UnavailableError: The store does not answer. Nothing that loads is left behind.
    """

    def room() -> int | None:
        usage = files.store.usage()
        return None if usage is None else usage.free_bytes

    where = location_of(files, folder)
    # What is no tensor takes no room: the writer refuses it by name.
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
) -> None:
    """Load tensors in place; sharded as they are here, whatever they were when saved.

    Args:
        tensors: What to fill.
        files: The namespace.
        folder: Path within it.
        group: The ranks, which all call this; None for one process.

    Raises:
        IntegrityError: A piece is missing or not what was saved; raised on all ranks.
        StateError: There is no checkpoint, another release wrote it, or a tensor is not in it
            or has another size there.
        UnavailableError: The store does not answer.
    """
    # DCP turns whatever is wrong with the index into an AssertionError.
    read_index(files, folder)
    remedy = "load into tensors of the names and sizes saved"
    with own_errors(location_of(files, folder), remedy):
        dcp_load(
            dict(tensors),
            storage_reader=StripedReader(files, folder),
            process_group=group,
            no_dist=group is None,
        )
