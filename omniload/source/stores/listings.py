"""For how long what a client of a store keeps of a listing stands for what is there.

Clients of object stores answer from a listing that they made once, as long as the process lives. A shard that is
replaced under a run would be read on unsaid, and whoever opens its source again would find the one of before. So an
answer stands for half a minute, here and for who lists; then the store is asked anew, once a file that is read.
"""

import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from omniload.base.lru import Lru
from omniload.source.stores.asking import entry_of

if TYPE_CHECKING:
    import fsspec

__all__ = ["LISTED_S", "entry_lately", "list_anew", "look_anew", "noted"]

LISTED_S = 30.0
"""Longest that an answer stands. Asking takes a request, of some 20 ms where units take seconds."""

_KEEP_LISTINGS = frozenset({"s3", "gs", "abfs"})
"""Protocols of clients that keep listings for good; others are asked each time."""
_MOST_FILES = 1 << 16


@dataclass(slots=True)
class _Kept:
    """What is known of a store: when it was listed, and what it said of each path."""

    listed_s: float = -LISTED_S
    seen: Lru[str, tuple[float, dict[str, Any]]] = field(default_factory=lambda: Lru(_MOST_FILES))


_lock = threading.Lock()
_of_store: dict[int, _Kept] = {}


def _kept_of(store: "fsspec.AbstractFileSystem") -> _Kept | None:
    """Return what is known of a store; ``None`` where its client keeps no listing for good."""
    protocols = {store.protocol} if isinstance(store.protocol, str) else {*store.protocol}
    if not protocols & _KEEP_LISTINGS:
        return None
    with _lock:
        # By the client itself: another one of the same settings is equal to it, and has listings of its own.
        if (kept := _of_store.get(id(store))) is None:
            kept = _of_store[id(store)] = _Kept()
            weakref.finalize(store, _of_store.pop, id(store), None)
        return kept


def list_anew(store: "fsspec.AbstractFileSystem") -> None:
    """Have a client list anew, but for what it listed in the last ``LISTED_S``: sources of one run share that."""
    kept, now_s = _kept_of(store), time.monotonic()
    if kept is not None and now_s - kept.listed_s >= LISTED_S:
        kept.listed_s = now_s
        store.invalidate_cache()


def noted(store: "fsspec.AbstractFileSystem", path: str, entry: dict[str, Any]) -> dict[str, Any]:
    """Return what a store said of a file as its source was opened; it stands from now on, and no longer."""
    kept = _kept_of(store)
    # The same answer twice is no new one.
    if kept is not None and ((found := kept.seen.get(path)) is None or found[1] is not entry):
        kept.seen.put(path, (time.monotonic(), entry), 1)
    return entry


def entry_lately(store: "fsspec.AbstractFileSystem", path: str) -> dict[str, Any]:
    """Return what a store says of a path, or said in the last ``LISTED_S``.

    Raises:
        FileNotFoundError: Nothing is there.
        Exception: What else the store's client raises.
    """
    kept, now_s = _kept_of(store), time.monotonic()
    if kept is None:
        return entry_of(store, path)
    found = kept.seen.get(path)
    if found is not None and now_s - found[0] < LISTED_S:
        return found[1]
    store.invalidate_cache(path)
    entry = entry_of(store, path)
    kept.seen.put(path, (now_s, entry), 1)
    return entry


def look_anew(store: "fsspec.AbstractFileSystem", path: str) -> None:
    """Have the next look at a path ask the store: it may have changed since it was listed."""
    store.invalidate_cache(path)
    if (kept := _kept_of(store)) is not None:
        kept.seen.pop(path)
