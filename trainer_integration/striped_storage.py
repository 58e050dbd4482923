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

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from fusefs.namespace import StripedFiles
from omniload.base.errors import OmniloadError, StateError, UnavailableError
from omniload.base.state import Json
from trainer_integration.striped_storage_place import read_index
from trainer_integration.striped_storage_reader import StripedReader
from trainer_integration.striped_storage_writer import StripedWriter

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
        UnavailableError: The store does not answer. Nothing that loads is left behind.
    """
    with _own_errors():
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
    with _own_errors():
        dcp_load(
            dict(tensors),
            storage_reader=StripedReader(files, folder),
            process_group=group,
            no_dist=group is None,
        )


@contextmanager
def _own_errors() -> Iterator[None]:
    """Raise what went wrong on a rank as it was; DCP wraps it in an exception of its own."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as failure:
        rank, (error, _) = min(failure.failures.items(), key=lambda item: item[0])
        if isinstance(error, OmniloadError):
            error.add_note(f"on rank {rank}")
            raise error from failure
        said = f"rank {rank}: {type(error).__name__}: {error}"
        if isinstance(error, OSError):
            raise UnavailableError(f"{said}; try again when the store answers") from failure
        raise StateError(f"{said}; load into tensors of the names and sizes saved") from failure
