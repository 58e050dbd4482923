"""Remove from the node cache what nobody has used for a while, and what killed restores left.

A tree goes under the lock of its key, which every restore holds while it reads the tree; one
that is held is passed over. What links share stays in the environments. A tree that
a mount shows stays: where all processes of the machine can be seen, by asking each for its
mounts, elsewhere by its mark, until the machine starts again.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, NamedTuple

from snapshot.env.node.cache import NodeCache, Tree, discard
from snapshot.env.node.locks import locked_now
from snapshot.env.node.overlay import keys_mounted

__all__ = ["Found", "prune_cache"]


class Found(NamedTuple):
    """One thing in a node cache, and what becomes of it."""

    kind: Literal["tree", "leftover"]
    name: str
    outcome: Literal["removed", "used", "mounted", "busy"]
    freed_bytes: int = 0


def prune_cache(
    cache: NodeCache, *, unused_s: float, now_ns: int, act: bool = True
) -> Iterator[Found]:
    """Go through a node cache and yield each thing in it, with what became of it.

    Args:
        cache: The node cache.
        unused_s: How long a tree must not have been used.
        now_ns: The time.
        act: Whether anything is removed; else it is only listed.
    """
    latest = now_ns - int(unused_s * 1e9)
    for folder in _folders(cache.folder / "partial"):
        key = folder.name.partition(".")[0]
        with _lock_of(cache, key, act=act) as held:
            yield _leftover(folder, key, held=held, act=act)
    for folder in _folders(cache.folder / "trees"):
        with _lock_of(cache, folder.name, act=act) as held:
            yield _tree(cache, Tree(folder), latest, held=held, act=act)


def _leftover(folder: Path, key: str, *, held: bool, act: bool) -> Found:
    """A restore that died left it, or it was set aside while a mount showed it."""
    if not held:
        return Found("leftover", folder.name, "busy")
    if _is_shown(Tree(folder), key):
        return Found("leftover", folder.name, "mounted")
    size_bytes = _size_of(folder)
    if act:
        discard(folder)
    return Found("leftover", folder.name, "removed", size_bytes)


def _tree(cache: NodeCache, tree: Tree, latest_ns: int, *, held: bool, act: bool) -> Found:
    key = tree.folder.name
    if not held:
        return Found("tree", key, "busy")
    if tree.used_ns > latest_ns:
        return Found("tree", key, "used")
    if _is_shown(tree, key):
        return Found("tree", key, "mounted")
    size_bytes = _size_of(tree.folder)
    if act:
        tree.mark_unmounted()  # seen above; else it would only be set aside
        cache.drop(key)
    return Found("tree", key, "removed", size_bytes)


def _is_shown(tree: Tree, key: str) -> bool:
    """Return whether a mount may show a tree, under its lock: nobody mounts it meanwhile."""
    if not tree.may_be_mounted:
        return False
    keys, all_seen = keys_mounted()
    return key in keys or not all_seen


@contextmanager
def _lock_of(cache: NodeCache, key: str, *, act: bool) -> Iterator[bool]:
    """Hold the lock of a key if it is free; a dry run takes none."""
    if not act:
        yield True
        return
    with locked_now(cache.lock(key)) as held:
        yield held


def _folders(folder: Path) -> list[Path]:
    with suppress(FileNotFoundError):
        return sorted(folder.iterdir())
    return []


def _size_of(folder: Path) -> int:
    """Return the bytes that removing a folder frees: files that an environment links to stay on the disk."""
    total = 0
    for above, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                seen = os.lstat(f"{above}/{name}")
                total += seen.st_size if seen.st_nlink == 1 else 0
    return total
