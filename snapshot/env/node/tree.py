"""One extracted snapshot in a node cache: its files, and checks that they are still as extracted."""

import errno
import hashlib
import json
import os
import random
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from omniload.base.errors import IntegrityError, StateError
from omniload.base.reading import read_kept_file
from snapshot.env.format.digests import file_digest
from snapshot.env.format.entries import Entry, Kind, Place
from snapshot.private_folder import put_file

if TYPE_CHECKING:
    from snapshot.env.format.manifest import Manifest

__all__ = [
    "VERSION",
    "Folder",
    "Listing",
    "Tree",
    "TreeHead",
    "boot_id",
    "changed_in",
    "decode_head",
    "discard",
    "encode_head",
    "listing_of",
]

VERSION = 2


class TreeHead(NamedTuple):
    """The facts about a snapshot that a mount needs."""

    key: str
    document: dict[str, Any]
    """Document whose digest is the key."""
    targets: list[str]
    """Names of the targets."""
    used: list[int]
    """Numbers of the targets that hold an entry."""
    raw_bytes: int
    """Bytes of all files."""

    @classmethod
    def of(cls, manifest: "Manifest") -> Self:
        """Return the head of a manifest."""
        return cls(
            manifest.head.key,
            manifest.head.document,
            [target.name for target in manifest.head.targets],
            sorted({entry.target for entry in manifest.entries}),
            manifest.raw_bytes,
        )


def encode_head(head: TreeHead) -> bytes:
    """Return the bytes of a head: version and digest in a line, then JSON."""
    text = json.dumps(head._asdict()).encode()
    return _mark(text) + b"\n" + text


def decode_head(data: bytes) -> TreeHead:
    """Read a head.

    Raises:
        StateError: It is damaged, or of another version.
    """
    mark, _, text = data.partition(b"\n")
    # Fields are not checked: a writer who could forge the digest could write into the tree itself.
    if mark != _mark(text):
        raise StateError("head of a tree is damaged, or of another version; fetch the tree again")
    return TreeHead(**json.loads(text))


def _mark(text: bytes) -> bytes:
    return f"{VERSION} {hashlib.sha256(text).hexdigest()}".encode()


class Folder(NamedTuple):
    """One directory of a tree, and the files and links in it."""

    own: Entry
    """Entry of the directory."""
    names: list[str]
    """Names of its files and links, sorted."""
    entries: list[Entry]
    """Entries of the names, in their order."""

    @property
    def place(self) -> Place:
        """Target and path of the directory."""
        return self.own.target, self.own.path

    def path_of(self, name: str) -> str:
        """Return the path of a file in it, relative to the target."""
        return f"{self.own.path}/{name}" if self.own.path else name


class Listing(NamedTuple):
    """The content of a tree folder by folder, each after the one above it, and the snapshot's deletions."""

    folders: list[Folder]
    deleted: list[Place]


def listing_of(entries: Iterable[Entry]) -> Listing:
    """Return the listing of entries that have been checked and are in order."""
    folders: dict[Place, Folder] = {}
    deleted = list[Place]()
    for entry in entries:
        if entry.kind is Kind.DIRECTORY:
            folders[entry.target, entry.path] = Folder(entry, [], [])
        elif entry.kind is Kind.DELETED:
            deleted.append((entry.target, entry.path))
        else:
            above, _, name = entry.path.rpartition("/")
            # Entries are in order, so the folder above came before.
            _, names, inside = folders[entry.target, above]
            names.append(name)
            inside.append(entry)
    return Listing(list(folders.values()), deleted)


def changed_in(root: str, folder: Folder) -> list[str]:
    """Return the paths of a folder below ``root`` whose kind, size, mode or time has changed since the extraction."""
    own, names, entries = folder
    try:
        # Do not follow a link, because its target is not the folder that was written.
        flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(f"{root}/{own.path}", flags)
    except (FileNotFoundError, NotADirectoryError):
        return [own.path, *map(folder.path_of, names)]
    try:
        found = [] if stat.S_IMODE(os.fstat(file).st_mode) == own.mode else [own.path]
        for name, entry in zip(names, entries, strict=True):
            try:
                # Stat by the name alone: a third of the cost of a walk by whole paths.
                seen = os.stat(name, dir_fd=file, follow_symlinks=False)
            except FileNotFoundError:
                found.append(folder.path_of(name))
                continue
            if entry.kind is Kind.LINK:  # a link has no mode of its own
                same = stat.S_ISLNK(seen.st_mode)
            else:
                same = seen.st_mode == stat.S_IFREG | entry.mode
                same = same and seen.st_size == entry.size_bytes
            if not same or seen.st_mtime_ns != entry.mtime_ns:
                found.append(folder.path_of(name))
    finally:
        os.close(file)
    return found


# Limit of one file next to a tree; the largest holds the tables of a manifest.
_LARGEST_BYTES = 2 << 30
# Errnos of a disk or file system that has lost bytes; any other error is no rot.
_UNREADABLE = frozenset({errno.EIO, errno.EUCLEAN, errno.EBADMSG})


def boot_id() -> str:
    """Return the id of this boot of the kernel."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return "unknown"


def discard(path: Path) -> None:
    """Remove a file, a link or a tree, if it exists; folders without write permission, too."""

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
        self._listing: Listing | None = None
        self._head: TreeHead | None = None

    @property
    def head(self) -> TreeHead:
        """Facts that a mount needs; while the head is intact, tables of tens of thousands of entries stay unread."""
        if self._head is None:
            try:
                self._head = decode_head(self._kept("head.json"))
            except (FileNotFoundError, IntegrityError, StateError):
                self._head = TreeHead.of(self.manifest)
        return self._head

    @property
    def manifest(self) -> "Manifest":
        """Manifest that the tree was made from."""
        if self._manifest is None:
            # Import it lazily, because a mount is finished before the decoder would be loaded.
            from snapshot.env.format.manifest import decode_manifest  # noqa: PLC0415

            name = str(self.folder / "manifest")
            self._manifest = decode_manifest(self._kept("manifest"), name=name)
        return self._manifest

    @property
    def listing(self) -> Listing:
        """Content of the tree, folder by folder."""
        if self._listing is None:
            self._listing = listing_of(self.manifest.entries)
        return self._listing

    def keep(self, manifest: "Manifest") -> None:
        """Write the part of the manifest that a mount reads to a file next to it."""
        put_file(self.folder / "head.json", encode_head(TreeHead.of(manifest)))

    def _kept(self, name: str) -> bytes:
        return read_kept_file(
            self.folder / name, most_bytes=_LARGEST_BYTES, what=f"the {name} of a tree"
        )

    def layer(self, number: int) -> Path:
        """Return the folder of the files of target ``number``."""
        return self.folder / "layers" / str(number)

    def whiteouts(self, number: int) -> Path:
        """Return the folder that marks the deletions of target ``number`` for overlayfs."""
        return self.folder / "whiteouts" / str(number)

    @property
    def boot(self) -> str:
        """Boot of the kernel under which the tree was written or last compared."""
        return (self.folder / "boot").read_text(encoding="ascii")

    def invalidate(self) -> None:
        """Require that every file is compared with its digest before the tree is used again."""
        put_file(self.folder / "boot")

    @property
    def used_ns(self) -> int:
        """Time at which it was last placed into an environment."""
        with suppress(FileNotFoundError):
            # Not the time of the last read, because many disks are mounted without it.
            return (self.folder / "head.json").stat().st_mtime_ns
        return 0

    def mark_used(self) -> None:
        """Note that the tree is being placed now."""
        with suppress(PermissionError):
            os.utime(self.folder / "head.json")

    def mark_linked(self) -> None:
        """Note that environments share inodes with the tree, so that it is checked before use."""
        put_file(self.folder / "linked")

    def mark_mounted(self) -> None:
        """Note that a mount may show the tree until the machine restarts."""
        # a user who cannot write the note cannot drop the tree either
        with suppress(PermissionError):
            # Record the boot, because no mount outlives it.
            put_file(self.folder / "mounted", boot_id().encode())

    def mark_unmounted(self) -> None:
        """Remove the note, because the first mount failed."""
        with suppress(PermissionError):
            (self.folder / "mounted").unlink(missing_ok=True)

    @property
    def may_be_mounted(self) -> bool:
        """Whether a mount of this boot of the kernel may show the tree."""
        with suppress(FileNotFoundError):
            return (self.folder / "mounted").read_text(encoding="ascii") == boot_id()
        return False

    @property
    def hides_deletions(self) -> bool:
        """Whether overlayfs marks could be made for all deletions."""
        return not (self.folder / "unmarked").exists()

    def rotted_file(self, within_s: float) -> str | None:
        """Compare random files with their digests for a while; return the first one that differs."""
        files = [entry for entry in self.manifest.entries if entry.kind is Kind.FILE]
        # Take another sample each time, or the same files would be checked for ever.
        random.shuffle(files)
        until_s = time.monotonic() + within_s
        for entry in files:
            # Compare the content: a disk that returns wrong bytes changes neither size nor time.
            if not _is_as_written(f"{self.layer(entry.target)}/{entry.path}", entry):
                return entry.path
            if time.monotonic() >= until_s:
                break
        return None

    def changed_files(self, *, digests: bool, roots: Sequence[str] = ()) -> list[str]:
        """Return the paths that differ from the snapshot; paths that it does not name are ignored.

        Args:
            digests: Read all files; else compare kind, size, mode and time only. Times of folders
                are not compared, because every file that is added to a folder changes them.
            roots: Roots of the targets: those of an environment, or the tree's own.

        Raises:
            IntegrityError: The manifest of the tree is damaged.
        """
        roots = roots or [str(self.layer(number)) for number in range(len(self.head.targets))]
        found = [
            path
            for folder in self.listing.folders
            for path in changed_in(roots[folder.own.target], folder)
        ]
        found += [path for n, path in self.listing.deleted if os.path.lexists(f"{roots[n]}/{path}")]
        if found or not digests:
            return found
        return [
            entry.path
            for entry in self.manifest.entries
            if not _is_as_written(f"{roots[entry.target]}/{entry.path}", entry)
        ]


def _is_as_written(path: str, entry: Entry) -> bool:
    """Return whether the content of a file or link is unchanged; an unreadable file counts as changed."""
    try:
        if entry.kind is Kind.LINK:
            return os.readlink(path) == entry.link  # noqa: PTH115 -- thousands of paths
        return entry.kind is not Kind.FILE or file_digest(path) == entry.digest
    except OSError as error:
        if error.errno not in _UNREADABLE:
            raise
        return False
