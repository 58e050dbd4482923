"""Tensors as bytes, bytes as stripe units, and paths of a checkpoint's files."""

import os
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from fusefs.namespace import StripedFiles
from fusefs.stores.protocol import checked_path

__all__ = ["bytes_of", "is_path", "location_of", "units_of", "within"]


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor of the CPU; whoever writes it writes the tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def within(folder: str, name: str) -> str:
    """Return the path of a file in a folder; the root is the empty path."""
    return f"{folder}/{name}" if folder else name


def location_of(files: StripedFiles, folder: str) -> str:
    """Return a checkpoint's place for messages."""
    return within(files.store.location.rstrip("/"), folder) if folder else files.store.location


def is_path(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Tell whether a checkpoint's id is a path within a namespace."""
    try:
        checked_path(os.fspath(checkpoint_id))
    except ValueError:
        return False
    return True


def units_of(
    parts: Iterable[bytes | memoryview], unit_bytes: int
) -> Iterator[memoryview | bytearray]:
    """Yield the units of ``parts`` laid side by side.

    Args:
        parts: Buffers of bytes; each must stay as it is until the units made of it are used up.
        unit_bytes: Bytes of a unit.

    Yields:
        Views of ``unit_bytes`` bytes into a part; copies only of units that reach over
        several parts, and of the last, which may be short.
    """
    joined = bytearray()
    for part in parts:
        view = memoryview(part).cast("B")
        if joined:
            room = unit_bytes - len(joined)
            joined += view[:room]
            view = view[room:]
            if len(joined) < unit_bytes:
                continue
            yield joined
            joined = bytearray()
        whole = len(view) // unit_bytes * unit_bytes
        for at in range(0, whole, unit_bytes):
            yield view[at : at + unit_bytes]
        joined += view[whole:]
    if joined:
        yield joined
