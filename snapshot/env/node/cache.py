"""Extracted snapshots of a node, shared by every environment on it.

::

    <cache>/trees/<key>/layers/<n>/...      files of target n, as they shall appear
    <cache>/trees/<key>/whiteouts/<n>/...   overlayfs marks of what was deleted in it
    <cache>/trees/<key>/manifest            as on the store
    <cache>/trees/<key>/head.json           the little of it that a mount needs
    <cache>/trees/<key>/listing.json        what links and copies need
    <cache>/trees/<key>/boot                start of the kernel under which it was written; empty: to be compared
    <cache>/trees/<key>/linked, mounted     whether environments share its inodes, or show it
    <cache>/partial/<key>/                  the same, being made
    <cache>/shared                          if its owner made it: other users may read all this
    <cache>/locks/<key>                     held while it is made; shared while it is used

A tree appears by one rename, whole. Files are not synced to disk one by one (that would
cost more than all the rest), so after a crash of the machine, which shows in another
boot id, every file is compared with its digest before the tree is used again.
"""

import errno
import os
import random
import shutil
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omniload.base.errors import ConfigError, IntegrityError, StateError
from omniload.base.log import get_logger
from omniload.base.reading import read_kept_file
from snapshot.env.format.digests import file_digest
from snapshot.env.format.entries import Entry, Kind
from snapshot.env.format.listing import (
    Listing,
    changed_in,
    decode_listing,
    encode_listing,
    listing_of,
)
from snapshot.env.node.tree_head import TreeHead, decode_head, encode_head

if TYPE_CHECKING:
    from snapshot.env.format.manifest import Manifest
from snapshot.private_folder import private_folder, put_file, readable_folder

__all__ = [
    "CACHE_VARIABLE",
    "NodeCache",
    "Tree",
    "boot_id",
    "default_cache",
    "discard",
]

_LOG = get_logger(__name__)
CACHE_VARIABLE = "OMNILOAD_ENV_CACHE"
_LARGEST_BYTES = 2 << 30
"""Of one file beside a tree, which holds at most the tables of a manifest."""
_UNREADABLE = frozenset({errno.EIO, errno.EUCLEAN, errno.EBADMSG})
"""What a disk or a file system says of bytes that it has lost."""
SHARED = "shared"
"""A file of this name in a node cache says that other users may read what lies there."""


def default_cache() -> Path:
    """Return where the node cache lies: ``OMNILOAD_ENV_CACHE``, else below the user's cache.

    Raises:
        ConfigError: Nothing names it, and the user has no home.
    """
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named)
    above = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(above) if above else Path.home() / ".cache") / "omniload" / "env"
    except RuntimeError as error:
        raise ConfigError(
            f"user {os.geteuid()} has no home to keep a node cache in; name one in {CACHE_VARIABLE}"
        ) from error


def boot_id() -> str:
    """Return what names this start of the kernel."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return "unknown"


def discard(path: Path) -> None:
    """Remove a file, a link or a tree, if it is there; folders without write permission too."""

    def again(function: Callable[[str], object], failed: str, raised: Any) -> None:  # noqa: ANN401
        if not os.path.lexists(failed):
            return
        folders = [os.path.dirname(failed)]  # noqa: PTH120
        if stat.S_ISDIR(os.lstat(failed).st_mode):
            folders.append(failed)
        closed = [each for each in folders if os.lstat(each).st_mode & 0o700 != 0o700]
        if not closed or not isinstance(raised[1], PermissionError):
            raise raised[1]
        for each in closed:
            os.chmod(each, 0o700)  # noqa: PTH101
        if failed in folders:
            shutil.rmtree(failed, onerror=again)
        else:
            function(failed)

    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, onerror=again)
    else:
        path.unlink(missing_ok=True)


class Tree:
    """One extracted snapshot."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._manifest: Manifest | None = None
        self._head: TreeHead | None = None

    @property
    def head(self) -> TreeHead:
        """What a mount needs to know; tables of tens of thousands of entries stay unread while it is whole."""
        if self._head is None:
            try:
                self._head = decode_head(self._kept("head.json"))
            except (FileNotFoundError, IntegrityError, StateError):
                self._head = TreeHead.of(self.manifest)
        return self._head

    @property
    def manifest(self) -> "Manifest":
        """The manifest it was made from."""
        if self._manifest is None:
            # Imported here: a mount is there before the decoder would be loaded.
            from snapshot.env.format.manifest import decode_manifest  # noqa: PLC0415

            name = str(self.folder / "manifest")
            self._manifest = decode_manifest(self._kept("manifest"), name=name)
        return self._manifest

    @property
    def listing(self) -> Listing:
        """What it holds, folder by folder; made from the manifest where it was not kept."""
        try:
            return decode_listing(self._kept("listing.json"))
        except (FileNotFoundError, IntegrityError, StateError):
            return listing_of(self.manifest.entries, self._manifest_digest())

    def keep(self, manifest: "Manifest") -> None:
        """Write beside the manifest what is read of it at every restore."""
        listing = listing_of(manifest.entries, self._manifest_digest())
        put_file(self.folder / "head.json", encode_head(TreeHead.of(manifest)).encode())
        put_file(self.folder / "listing.json", encode_listing(listing).encode())

    def _kept(self, name: str) -> bytes:
        return read_kept_file(
            self.folder / name, most_bytes=_LARGEST_BYTES, what=f"the {name} of a tree"
        )

    def _manifest_digest(self) -> str:
        return file_digest(self.folder / "manifest").hex()

    def layer(self, number: int) -> Path:
        """Return where the files of target ``number`` lie."""
        return self.folder / "layers" / str(number)

    def whiteouts(self, number: int) -> Path:
        """Return where the deletions of target ``number`` are marked for overlayfs."""
        return self.folder / "whiteouts" / str(number)

    @property
    def boot(self) -> str:
        """Start of the kernel under which the tree was written or last compared."""
        return (self.folder / "boot").read_text(encoding="ascii")

    def invalidate(self) -> None:
        """Have every file compared with its digest before the tree is used again."""
        put_file(self.folder / "boot")

    @property
    def used_ns(self) -> int:
        """When it was last placed into an environment."""
        with suppress(FileNotFoundError):
            return (self.folder / "head.json").stat().st_mtime_ns
        return 0

    def mark_used(self) -> None:
        """Note that it is placed now."""
        with suppress(PermissionError):
            os.utime(self.folder / "head.json")

    def mark_linked(self) -> None:
        """Note that environments share inodes with the tree, so that it is looked at before use."""
        put_file(self.folder / "linked")

    def mark_mounted(self) -> None:
        """Note that a mount may show the tree until the machine starts again."""
        with suppress(PermissionError):  # a user that may not note it may not drop it either
            put_file(self.folder / "mounted", boot_id().encode())

    def mark_unmounted(self) -> None:
        """Take the note back, where the first mount failed."""
        with suppress(PermissionError):
            (self.folder / "mounted").unlink(missing_ok=True)

    @property
    def may_be_mounted(self) -> bool:
        """Whether a mount of this start of the kernel may show the tree."""
        with suppress(FileNotFoundError):
            return (self.folder / "mounted").read_text(encoding="ascii") == boot_id()
        return False

    @property
    def hides_deletions(self) -> bool:
        """Whether marks for overlayfs could be made for all that was deleted."""
        return not (self.folder / "unmarked").exists()

    def rotted_file(self, within_s: float) -> str | None:
        """Compare files picked at random with their digests for a while; return one that is not what it was.

        A disk that gives back other bytes changes neither size nor time.
        """
        files = [entry for entry in self.manifest.entries if entry.kind is Kind.FILE]
        random.shuffle(files)
        until_s = time.monotonic() + within_s
        for entry in files:
            if not self._has_digest(entry):
                return entry.path
            if time.monotonic() >= until_s:
                break
        return None

    def changed_files(self, *, digests: bool) -> list[str]:
        """Return the files that are not what the manifest says.

        Args:
            digests: Read them all; else compare kind, size, mode and time only.

        Raises:
            IntegrityError: The manifest beside them is damaged.
        """
        listing = self.listing
        if listing.manifest != self._manifest_digest():
            raise IntegrityError(f"{self.folder / 'manifest'} is damaged; fetch the tree again")
        found = [
            path
            for folder in listing.folders
            for path in changed_in(f"{self.folder}/layers/{folder.target}", folder)
        ]
        if found or not digests:
            return found
        return [
            entry.path
            for entry in self.manifest.entries
            if entry.kind is Kind.FILE and not self._has_digest(entry)
        ]

    def _has_digest(self, entry: Entry) -> bool:
        """Return whether a file is what it was; what the disk cannot read is not."""
        try:
            return file_digest(self.layer(entry.target) / entry.path) == entry.digest
        except OSError as error:
            if error.errno not in _UNREADABLE:
                raise
            return False


class NodeCache:
    """The trees of a node.

    Raises:
        ConfigError: The folder belongs to another user: one that could change what we import.
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
        return self.folder / "locks" / key

    def tree(self, key: str) -> Tree | None:
        """Return the tree of a key if it is there and can be relied on.

        A tree whose files share inodes with environments, or that was written before
        the machine last started, is looked at first. The caller holds the lock of the tree
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
                tree.keep(tree.manifest)  # as little synced as the files
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
        """Let a filled tree appear, in one rename.

        Args:
            key: Of the snapshot.
            tree: As ``partial`` gave it.
            manifest: Of the snapshot.
            data: The bytes of the manifest on the store.
        """
        put_file(tree.folder / "manifest", data)
        tree.keep(manifest)
        put_file(tree.folder / "boot", boot_id().encode())
        final = self.folder / "trees" / key
        tree.folder.rename(final)
        return Tree(final)

    def drop(self, key: str) -> None:
        """Remove a tree; it disappears in one rename, under the lock of the key.

        What a mount may still show stays on the disk until the machine has started again,
        or running programs would lose their files.
        """
        aside = self.folder / "partial" / f"{key}.dropped.{os.urandom(4).hex()}"
        with suppress(FileNotFoundError):
            (self.folder / "trees" / key).rename(aside)
        for folder in aside.parent.glob(f"{key}.dropped*"):
            if not Tree(folder).may_be_mounted:
                discard(folder)

    def free_bytes(self) -> int:
        """Return the space left on its disk."""
        found = os.statvfs(self.folder)
        return found.f_bavail * found.f_frsize
