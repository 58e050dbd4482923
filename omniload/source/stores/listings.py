"""Limits the time for which cached listings of a store's client are used.

Clients of object stores answer from a listing for as long as the process lives. A shard that is replaced during a run
would silently be read on, and opening its source again would find the old one. An answer is therefore used for half a
minute, here and for listings. Then the store is asked again, once per file that is read.
"""

import glob
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import IO, TYPE_CHECKING, Any

from omniload.base.concurrency.threads import DaemonPool
from omniload.base.lru import Lru
from omniload.source.stores.asking import entry_of, opened

if TYPE_CHECKING:
    import fsspec

__all__ = [
    "LISTED_S",
    "asked_ahead",
    "entry_lately",
    "list_anew",
    "listed_entry",
    "look_anew",
    "noted",
    "opened_lately",
]

LISTED_S = 30.0
"""Longest use of an answer. A request takes some 20 ms, and a unit takes seconds."""

_KEEP_LISTINGS = frozenset({"s3", "gs", "abfs"})
"""Protocols of clients that cache listings for ever; other clients ask each time."""
_MOST_FILES = 1 << 16
_MOST_FOLDERS = 64
_AT_ONCE, _AHEAD = 32, 512


@dataclass(slots=True)
class _Kept:
    """Knowledge of a store: when it was listed, and its answers for paths."""

    listed_s: float = -LISTED_S
    seen: Lru[str, tuple[float, dict[str, Any]]] = field(default_factory=lambda: Lru(_MOST_FILES))
    folders: Lru[str, tuple[object, Mapping[str, dict[str, Any]]]] = field(
        default_factory=lambda: Lru(_MOST_FOLDERS)
    )
    """Of folders: the client's listing of each, and its entries by name."""


_lock = threading.Lock()
_of_store: dict[int, _Kept] = {}


def _protocols_of(store: "fsspec.AbstractFileSystem") -> set[str]:
    return {store.protocol} if isinstance(store.protocol, str) else {*store.protocol}


def _kept_of(store: "fsspec.AbstractFileSystem") -> _Kept | None:
    """Return what is known of a store; ``None`` where its client keeps no listing for good."""
    if not _protocols_of(store) & _KEEP_LISTINGS:
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


def listed_entry(store: "fsspec.AbstractFileSystem", path: str) -> dict[str, Any]:
    """Return a store's answer for a path, from the listing of its folder if the client has cached one.

    The client would also answer from its listing, but searches all of it for each path: minutes for 28,000 files.

    Raises:
        FileNotFoundError: Nothing is there.
        Exception: What else the store's client raises.
    """
    kept, (folder, _, _) = _kept_of(store), path.rpartition("/")
    listing = None if kept is None else getattr(store, "dircache", {}).get(folder)
    if kept is None or listing is None:
        if kept is not None:
            kept.folders.pop(folder)
        return entry_of(store, path)
    held = kept.folders.get(folder)
    # Compared by identity, because a newer listing of the client is another object.
    if held is None or held[0] is not listing:
        held = listing, {each["name"]: each for each in listing if each["type"] == "file"}
        kept.folders.put(folder, held, 1)
    return held[1].get(path) or entry_of(store, path)


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


def asked_ahead(patterns: Sequence[str]) -> Iterator[str]:
    """Yield patterns, after asking stores about the files that the next patterns name, many at a time.

    Braces name files one by one: 1,024 of C4 took half a minute. An error is ignored here, because the caller's own
    look at the file gets it again. The caller limits the time of the whole listing.
    """
    if not any("://" in each for each in patterns):
        yield from patterns
        return
    with DaemonPool(_AT_ONCE, "omniload-asking", reads=True) as pool:
        for first in range(0, len(patterns), _AHEAD):
            some = patterns[first : first + _AHEAD]
            # Made in this thread, because fsspec makes a separate client for each thread that asks.
            places = [place for each in some if (place := _kept_place(each)) is not None]
            wait([pool.submit(partial(_look, *place)) for place in places])
            yield from some


def _kept_place(pattern: str) -> "tuple[fsspec.AbstractFileSystem, str] | None":
    """Return the store and the path of a pattern that names a file, if its answer can be reused; ``None`` otherwise."""
    if "://" not in pattern or glob.has_magic(pattern):
        return None
    # Imported here, because a mix of local files never needs it, and it takes a twentieth of a check to load.
    from fsspec.core import url_to_fs  # noqa: PLC0415

    with suppress(Exception):
        store, path = url_to_fs(pattern)
        if _kept_of(store) is not None:
            list_anew(store)
            return store, path
    return None


def _look(store: "fsspec.AbstractFileSystem", path: str) -> None:
    with suppress(Exception):
        noted(store, path, listed_entry(store, path))


def opened_lately(store: "fsspec.AbstractFileSystem", path: str) -> IO[bytes]:
    """Open a file of a store for reading.

    A client of S3 gets the known answer for the file. Otherwise it would ask again, or search its listing of the
    folder. It refuses bytes of a version other than that of the answer.

    Raises:
        FileNotFoundError: Nothing is there.
        Exception: What else the store's client raises.
    """
    if "s3" not in _protocols_of(store):
        return opened(store, path)
    entry = entry_lately(store, path)
    file = opened(store, path, size=entry["size"])
    file.details = entry  # type: ignore[attr-defined]  # every file of fsspec has it
    return file


def look_anew(store: "fsspec.AbstractFileSystem", path: str) -> None:
    """Make the next look at a path ask the store, because the file may have changed since it was listed."""
    store.invalidate_cache(path)
    if (kept := _kept_of(store)) is not None:
        kept.seen.pop(path)
