"""Limits the time for which cached listings of a store's client are used.

Clients of object stores answer from a listing for as long as the process lives. A shard that is replaced during a run
would silently be read on, and opening its source again would find the old one. An answer is therefore used for half a
minute, here and for listings. Then the store is asked again, once per file that is read.
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
"""Longest use of an answer. A request takes some 20 ms, and a unit takes seconds."""

_KEEP_LISTINGS = frozenset({"s3", "gs", "abfs"})
"""Protocols of clients that cache listings for ever; other clients ask each time."""
_MOST_FILES = 1 << 16


@dataclass(slots=True)
class _Kept:
    """Knowledge of a store: when it was listed, and its answers for paths."""

    listed_s: float = -LISTED_S
    seen: Lru[str, tuple[float, dict[str, Any]]] = field(default_factory=lambda: Lru(_MOST_FILES))


_lock = threading.Lock()
_of_store: dict[int, _Kept] = {}


def _kept_of(store: "fsspec.AbstractFileSystem") -> _Kept | None:
    """Return the knowledge of a store; ``None`` if its client does not cache listings for ever."""
    protocols = {store.protocol} if isinstance(store.protocol, str) else {*store.protocol}
    if not protocols & _KEEP_LISTINGS:
        return None
    with _lock:
        # By the client's identity, because a client with the same settings compares equal, but has its own listings.
        if (kept := _of_store.get(id(store))) is None:
            kept = _of_store[id(store)] = _Kept()
            weakref.finalize(store, _of_store.pop, id(store), None)
        return kept


def list_anew(store: "fsspec.AbstractFileSystem") -> None:
    """Make a client list again, unless it listed within ``LISTED_S``; the sources of a run share this."""
    kept, now_s = _kept_of(store), time.monotonic()
    if kept is not None and now_s - kept.listed_s >= LISTED_S:
        kept.listed_s = now_s
        store.invalidate_cache()


def noted(store: "fsspec.AbstractFileSystem", path: str, entry: dict[str, Any]) -> dict[str, Any]:
    """Return a store's answer for a file when its source was opened, and use it from now on, for ``LISTED_S``."""
    kept = _kept_of(store)
    # The same answer given again does not extend its use.
    if kept is not None and ((found := kept.seen.get(path)) is None or found[1] is not entry):
        kept.seen.put(path, (time.monotonic(), entry), 1)
    return entry


def entry_lately(store: "fsspec.AbstractFileSystem", path: str) -> dict[str, Any]:
    """Return a store's answer for a path, which may be up to ``LISTED_S`` old.

    Raises:
        FileNotFoundError: Nothing is there.
        Exception: Any other error of the store's client.
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
    """Make the next look at a path ask the store, because the file may have changed since it was listed."""
    store.invalidate_cache(path)
    if (kept := _kept_of(store)) is not None:
        kept.seen.pop(path)
