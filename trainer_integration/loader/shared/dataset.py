"""Parts of a dataset that a machine's processes share: a dataset made at the first read, and packed lists.

A forked worker that reads an object counts references in it, and so copies the object's page. In time, each worker
holds a second copy of a long list of small objects. A list stored as two arrays of bytes has no reference counts.
"""

import mmap
import os
import pickle
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.reduction import DupFd
from typing import Any, overload

import numpy as np
from torch.utils.data import Dataset
from typing_extensions import override

from omniload.base.errors import ConfigError

__all__ = ["PackedList", "SharedDataset", "pack_lists"]

_LONG = 10_000
"""Least number of items; shorter lists stay as they are."""
_DEPTH = 4
_PIECE_BYTES = 1 << 24


class SharedDataset(Dataset[Any]):
    """A map dataset that ``make`` returns. It is made in the first process that reads a sample."""

    def __init__(self, make: Callable[[], Any], length: int) -> None:
        """Declare a dataset to be made later.

        Args:
            make: Makes the dataset. It is pickled if the start method is not fork.
            length: Number of samples, which samplers ask for in processes that have not made the dataset.
        """
        self.make, self.length = make, length
        self._made: Any = None

    def __len__(self) -> int:
        return self.length

    @property
    def made(self) -> Any:
        """The dataset itself, which is made now if it was not made before.

        Raises:
            ConfigError: It has another length.
        """
        if self._made is None:
            made = self.make()
            if len(made) != self.length:
                raise ConfigError(
                    f"make() returned a {type(made).__name__} of {len(made)} samples, the SharedDataset was promised "
                    f"{self.length}; give length={len(made)}"
                )
            self._made = made
        return self._made

    @override
    def __getitem__(self, index: Any) -> Any:
        return self.made[index]

    def __getitems__(self, indices: list[Any]) -> list[Any]:
        """Return samples, all at once if the dataset supports that."""
        bulk = getattr(self.made, "__getitems__", None)
        return bulk(indices) if callable(bulk) else [self.made[index] for index in indices]

    @override
    def __getstate__(self) -> dict[str, Any]:
        """Leave the dataset behind, because another process makes its own."""
        return {**vars(self), "_made": None}


class PackedList(Sequence[Any]):
    """An immutable list; each access returns a copy of the item."""

    def __init__(self, items: Sequence[Any]) -> None:
        """Pickle ``items`` into memory without a name."""
        handle = os.memfd_create("omniload-list", os.MFD_CLOEXEC)
        try:
            ends_N = _written(handle, items)
            os.pwrite(handle, ends_N.tobytes(), 0)
        except BaseException:
            os.close(handle)
            raise
        self._load(handle, len(items), int(ends_N[-1]))

    def _load(self, handle: int, items: int, size_bytes: int) -> None:
        self._handle = handle
        weakref.finalize(self, os.close, handle).atexit = False
        memory = mmap.mmap(handle, size_bytes, prot=mmap.PROT_READ)
        self._ends_N = np.frombuffer(memory, np.int64, items + 1)
        self._bytes = memoryview(memory)

    @override
    def __len__(self) -> int:
        return len(self._ends_N) - 1

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    @override
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[n] for n in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        begin, end = self._ends_N[at : at + 2]
        return pickle.loads(self._bytes[begin:end])  # noqa: S301 -- pickled by this job, in memory that only it has

    @override
    def __iter__(self) -> Iterator[Any]:
        return (self[n] for n in range(len(self)))

    @override
    def __reduce__(self) -> Any:
        """Pickle for a process that is being started: the memory is shared, not copied."""
        return _mapped, (DupFd(self._handle), len(self), len(self._bytes))


def _mapped(handle: Any, items: int, size_bytes: int) -> PackedList:
    made = PackedList.__new__(PackedList)
    made._load(handle.detach(), items, size_bytes)
    return made


def _written(handle: int, items: Sequence[Any]) -> Any:
    """Write pickled items after space for their ends, in pieces; return the ends, ``[N + 1]``."""
    ends_N = np.empty(len(items) + 1, np.int64)
    at = ends_N[0] = ends_N.nbytes
    # A duplicate, because the file closes its descriptor, and the memory is mapped from the original later.
    with os.fdopen(os.dup(handle), "wb", _PIECE_BYTES) as file:
        file.seek(int(at))
        for number, item in enumerate(items, 1):
            at += file.write(pickle.dumps(item, pickle.HIGHEST_PROTOCOL))
            ends_N[number] = at
    return ends_N


def pack_lists(dataset: Any, depth: int = _DEPTH) -> int:
    """Replace long lists among the attributes of a dataset, and of datasets inside it.

    A list whose items cannot be pickled, or whose attribute cannot be set, stays as it is.

    Returns:
        Number of lists that were replaced.
    """
    if depth == 0 or not hasattr(dataset, "__dict__"):
        return 0
    count = 0
    for name, value in list(vars(dataset).items()):
        if type(value) is list and len(value) >= _LONG:
            count += _pack(dataset, name, value)
        elif isinstance(value, list | tuple):
            # A short list may contain datasets, as in a ``ConcatDataset``.
            count += sum(pack_lists(each, depth - 1) for each in value[:_LONG])
        # Datasets within this one, as in a ``Subset``.
        elif hasattr(type(value), "__getitem__") and not isinstance(value, dict | str | bytes):
            count += pack_lists(value, depth - 1)
    return count


def _pack(dataset: Any, name: str, value: list[Any]) -> bool:
    try:
        setattr(dataset, name, PackedList(value))
    # Such a list stays as it is, and its pages are copied as without this function: slower, but correct.
    except (pickle.PicklingError, TypeError, AttributeError):
        return False
    return True
