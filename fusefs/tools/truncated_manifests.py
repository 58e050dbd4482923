"""Manifests that were cut short, which a size alone makes plain files.

A manifest says by its size that it is one. Cut, or with bytes behind its end, it has the
size of a plain file, whose head nobody looks at; what it named is named by nothing then.
"""

from collections.abc import Iterator, Sequence
from functools import partial

from fusefs.base.thread_pools import StorePool
from fusefs.format.manifest_header import MAGIC, TAIL
from fusefs.stores.protocol import Store
from omniload.base.errors import IntegrityError

__all__ = ["cut_manifests"]

_AT_ONCE = 1024
"""Files handed to the threads together: a store may hold millions."""
_WHOLE_BYTES = 8192
"""Up to here both ends of a file are read by one request."""
_END = b" " + TAIL
"""Nearly every manifest is padded in front of its tail; a user's text may well end with a line ``omnifs``."""
_REMEDY = "restore it from another copy, or remove it and repair: that deletes what it named"


def cut_manifests(
    store: Store, plain: Sequence[tuple[str, int]], *, streams: int
) -> Iterator[tuple[str, str]]:
    """Yield those of the plain files that look like what is left of a manifest.

    One that was cut within its first 10 bytes, or emptied, cannot be distinguished from a user's file.

    Args:
        store: The store.
        plain: Path and size, in bytes, of each; of sizes that no manifest has.
        streams: Files that are read side by side.

    Yields:
        The path, and what is wrong with it and to be done about it.
    """
    look = partial(_found_wrong, store)
    long = [item for item in plain if item[1] >= len(MAGIC)]
    with StorePool(streams, "fusefs-heads") as pool:
        for at in range(0, len(long), _AT_ONCE):
            some = long[at : at + _AT_ONCE]
            for (path, _), wrong in zip(some, pool.map(look, some), strict=True):
                if wrong is not None:
                    yield path, wrong


def _found_wrong(store: Store, file: tuple[str, int]) -> str | None:
    path, size_bytes = file
    try:
        head, end = _ends(store, path, size_bytes)
    except FileNotFoundError:
        return None  # moved on: a second walk finds out
    except IntegrityError as error:
        return None if _size_of(store, path) != size_bytes else str(error)
    if head == MAGIC:
        return (
            f"begins like a manifest and has {size_bytes} bytes, which no manifest has: "
            f"it was cut short or grew; {_REMEDY}"
        )
    if end == _END:
        return f"ends like a manifest and begins with {head!r}; {_REMEDY}"
    return None


def _ends(store: Store, path: str, size_bytes: int) -> tuple[bytes, bytes]:
    """Return the first and last bytes of a file, as many as a manifest needs to be known by."""
    if size_bytes <= _WHOLE_BYTES:
        data = store.read(path, 0, size_bytes)
        return data[: len(MAGIC)], data[-len(_END) :]
    head = store.read(path, 0, len(MAGIC))
    return head, store.read(path, size_bytes - len(_END), len(_END))


def _size_of(store: Store, path: str) -> int | None:
    try:
        return store.stat(path).size_bytes
    except FileNotFoundError:
        return None
