"""Extracted snapshots of a node, shared by every environment on it.

::

    <cache>/trees/<key>/layers/<n>/...      files of target n, in their final form
    <cache>/trees/<key>/whiteouts/<n>/...   overlayfs marks of deletions in it
    <cache>/trees/<key>/manifest            same as on the store
    <cache>/trees/<key>/head.json           the part of the manifest that a mount needs
    <cache>/trees/<key>/boot                boot of the kernel under which it was written; empty: to be compared
    <cache>/trees/<key>/linked, mounted     whether environments share its inodes, or show it
    <cache>/partial/<key>/                  the same, while it is being made
    <cache>/shared                          if its owner made it: other users may read everything here
    <cache>/locks/<key>                     held while it is made; shared while it is used

A tree appears as a whole, by one rename. Files are not synced to disk one by one, which would
cost more than everything else. So after a crash of the machine, which shows in another
boot id, every file is compared with its digest before the tree is used again.

A tree is pruned under the lock of its key, which every restore holds while it reads the
tree; a locked tree is skipped. Files that environments link to stay there. A tree that a mount
shows stays, too. If all processes of the machine are visible, each is asked for its mounts;
otherwise the tree's mark counts, until the machine restarts.
"""

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from omniload.base.errors import ConfigError, IntegrityError, OmniloadError, StateError
from omniload.base.linux.file_lock import locked
from omniload.base.log import get_logger
from snapshot.env.node.overlay import keys_mounted
from snapshot.env.node.tree import Tree, boot_id, discard
from snapshot.private_folder import cache_folder, private_folder, put_file, readable_folder

if TYPE_CHECKING:
    from snapshot.env.format.manifest import Manifest

__all__ = [
    "CACHE_VARIABLE",
    "Found",
    "NodeCache",
    "default_cache",
    "exclusively",
    "locked_now",
    "prune_cache",
    "together",
]


@contextmanager
def exclusively(path: Path) -> Iterator[None]:
    """Hold the lock file at ``path``; missing folders above it are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path):
        yield


@contextmanager
def locked_now(path: Path) -> Iterator[bool]:
    """Hold the lock file at ``path`` like ``exclusively`` if nobody holds it; yield whether it is held."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(path, waits=False))
        except BlockingIOError:
            yield False
            return
        yield True


@contextmanager
def together(path: Path) -> Iterator[None]:
    """Exclude holders of ``exclusively``, but let others in, if this user may make the file."""
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(path, shared=True))
        except OSError as error:
            # In a cache of root, no lock is held here, and only root removes its trees.
            if error.errno not in {errno.EACCES, errno.EROFS}:
                raise
        yield


_LOG = get_logger(__name__)
CACHE_VARIABLE = "OMNILOAD_ENV_CACHE"
SHARED = "shared"
"""Name of a file in a node cache that lets other users read its content."""


def default_cache() -> Path:
    """Return the folder of the node cache: ``OMNILOAD_ENV_CACHE``, else a folder in the user's cache.

    Raises:
        ConfigError: The variable is not set, and the user has no home.
    """
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named) if named else cache_folder("env", remedy=f"name one in {CACHE_VARIABLE}")


class NodeCache:
    """The trees of a node.

    Raises:
        ConfigError: The folder belongs to another user, who could change the modules that we import.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or default_cache()
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        readable_folder(self.folder)
        details = self.folder.stat()
        if details.st_uid not in {0, os.geteuid()} or details.st_mode & stat.S_IWOTH:
            raise ConfigError(
                f"node cache {self.folder} belongs to user {details.st_uid} or may be written by "
                f"all; name another one in {CACHE_VARIABLE}"
            )
        for name in ("trees", "partial", "locks"):
            if details.st_uid == os.geteuid() and not (self.folder / SHARED).exists():
                private_folder(self.folder / name)
                continue
            readable_folder(self.folder / name)
            if not os.access(self.folder / name, os.R_OK | os.X_OK):
                raise ConfigError(
                    f"node cache {self.folder} is closed to user {os.geteuid()}; its owner opens it "
                    f"with an empty file {SHARED!r} in it, or name another one in {CACHE_VARIABLE}"
                )

    def lock(self, key: str) -> Path:
        """Return the lock file of a key."""
        # Never remove it: one process could hold the removed file, another a new one of the same name.
        return self.folder / "locks" / key

    def tree(self, key: str) -> Tree | None:
        """Return the tree of a key if it is there and can be relied on.

        A tree whose files share inodes with environments, or that was written before
        the machine last started, is checked first. The caller holds the lock of the tree
        ``together``, so that it is not dropped meanwhile.
        """
        tree = Tree(self.folder / "trees" / key)
        try:
            sound = self._is_sound(tree)
        except FileNotFoundError:
            return None
        except (IntegrityError, StateError):
            sound = False
        if not sound:
            _LOG.warning("%s is not what was extracted; it is fetched again", tree.folder)
            return None
        return tree

    def _is_sound(self, tree: Tree) -> bool:
        if tree.boot != boot_id():
            with suppress(PermissionError):
                tree.keep(tree.manifest)  # no more durable than the files
            if tree.changed_files(digests=True):
                return False
            with suppress(PermissionError):
                put_file(tree.folder / "boot", boot_id().encode())
            return True
        shared = (tree.folder / "linked").exists()
        return not shared or not tree.changed_files(digests=False)

    def partial(self, key: str) -> Tree:
        """Return an empty tree to fill, under the lock of the key."""
        folder = self.folder / "partial" / key
        discard(folder)
        readable_folder(folder)
        return Tree(folder)

    def complete(self, key: str, tree: Tree, manifest: "Manifest", data: bytes) -> Tree:
        """Make a filled tree of ``partial`` appear, in one rename; ``data`` are the bytes of its manifest."""
        put_file(tree.folder / "manifest", data)
        tree.keep(manifest)
        put_file(tree.folder / "boot", boot_id().encode())
        final = self.folder / "trees" / key
        tree.folder.rename(final)
        return Tree(final)

    def drop(self, key: str) -> None:
        """Remove a tree; it disappears in one rename, under the lock of the key."""
        # A new name each time, because a former tree may still be mounted under its name.
        aside = self.folder / "partial" / f"{key}.dropped.{os.urandom(4).hex()}"
        with suppress(FileNotFoundError):
            (self.folder / "trees" / key).rename(aside)
        for folder in aside.parent.glob(f"{key}.dropped*"):
            # A tree that a mount shows stays until the machine restarts: running programs would lose their files.
            if not Tree(folder).may_be_mounted:
                discard(folder)

    def free_bytes(self) -> int:
        """Return the free space on the disk of the cache."""
        return shutil.disk_usage(self.folder).free


class Found(NamedTuple):
    """One entry of a node cache, and what happens to it."""

    kind: Literal["tree", "leftover"]
    name: str
    outcome: Literal["removed", "used", "mounted", "busy", "damaged"]
    """Outcome for a tree; a damaged tree is removed, so that it is fetched again."""
    freed_bytes: int = 0
    fault: str = ""
    """Fault of a damaged tree: the first path that differs from the extracted one, or the manifest's fault."""


def prune_cache(
    cache: NodeCache, *, unused_s: float, now_ns: int, act: bool = True, verify: bool = False
) -> Iterator[Found]:
    """Go through a node cache and yield each entry with its outcome; without ``act``, with the outcome it would have.

    With ``verify``, every file of the remaining trees is compared with its digest.
    """
    latest = now_ns - int(unused_s * 1e9)
    # Trees in use are skipped; a run that removes nothing takes no lock.
    for folder in sorted((cache.folder / "partial").iterdir()):
        key = folder.name.partition(".")[0]
        with locked_now(cache.lock(key)) if act else nullcontext(True) as held:
            yield _leftover(folder, key, held=held, act=act)
    for folder in sorted((cache.folder / "trees").iterdir()):
        with locked_now(cache.lock(folder.name)) if act else nullcontext(True) as held:
            found = _tree(cache, Tree(folder), latest, held=held, act=act)
            stays = found.outcome in {"used", "mounted"}
            if verify and stays and (fault := _fault_of(Tree(folder))):
                found = Found("tree", folder.name, "damaged", _size_of(folder), fault)
                if act:
                    cache.drop(folder.name)
            yield found


def _leftover(folder: Path, key: str, *, held: bool, act: bool) -> Found:
    """Return the outcome for the remains of a killed restore, or a tree set aside while a mount showed it."""
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
        # no mount was found above; with the mark the tree would only be set aside
        tree.mark_unmounted()
        cache.drop(key)
    return Found("tree", key, "removed", size_bytes)


def _fault_of(tree: Tree) -> str:
    """Return the fault of a tree; empty if it is sound, or was removed since it was listed."""
    try:
        changed = tree.changed_files(digests=True)
        # The path of a target's own folder is empty, which would mean that there is no fault.
        return (changed[0] or "the folder of a target") if changed else ""
    except FileNotFoundError:
        return ""
    except OmniloadError as error:
        return str(error)


def _is_shown(tree: Tree, key: str) -> bool:
    """Return whether a mount may show a tree. Call it under the tree's lock, so that nobody mounts it meanwhile."""
    if not tree.may_be_mounted:
        return False
    keys, all_seen = keys_mounted()
    return key in keys or not all_seen


def _size_of(folder: Path) -> int:
    """Return the bytes that removing a folder frees; files that an environment links to stay on the disk."""
    total = 0
    for above, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                seen = os.lstat(f"{above}/{name}")
                total += seen.st_size if seen.st_nlink == 1 else 0
    return total
