"""Copies of striped files as plain files in any place: for readers that do not know stripes.

Ranges are read in parallel, every unit is verified, and the target appears under its name
when it is complete. An interrupted copy leaves at most ``.NAME.<8 digits>.partial``.
"""

import os
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import orjson
import xxhash

from fusefs.base.serial_executor import wait_all
from fusefs.read.file_reader import FileReader
from fusefs.stores.protocol import RESERVED, ObjectWriter, Store, checked_path, name_of, parent_of
from fusefs.stores.url import parts_of
from fusefs.tree.namespace import StripedFiles
from omniload.base.errors import ConfigError, IntegrityError, OmniloadError, StateError
from omniload.base.reading import open_file
from omniload.base.secrets import HIDDEN

__all__ = [
    "Copy",
    "Exported",
    "copies_of",
    "export_file",
    "parted",
    "place_on_mount",
    "require_free",
    "require_no_mount",
    "require_no_others",
]

_WINDOW_BYTES = 32 << 20
"""Bytes that are read in parallel while as many are written: two windows are in memory."""
_MOST_STATISTICS_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A file to copy."""

    source: str
    """Path in the namespace."""
    target: str
    """Path in the target store."""
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """The result of a copy."""

    size_bytes: int
    xxh3: str
    """xxh3-128 of the content, 32 hexadecimal digits."""


def parted(target: str) -> tuple[str, str]:
    """Split a path or URL into the store, which is its folder, and the name in it.

    If some folders of a local path do not exist yet, the store is the lowest one that
    exists, and the missing ones belong to the name: the copy makes them, as on any
    other store.

    Raises:
        StateError: There is no name at its end, or a name that no store takes, or a file stands where a folder
            has to be.
    """
    folder, name = _parted(target)
    try:
        checked_path(name)
    except ValueError as error:
        raise StateError(f"target {target!r}: {error}") from error
    return folder, name


def _parted(target: str) -> tuple[str, str]:
    folder, slash, name = target.rstrip("/").rpartition("/")
    if not name or (parts_of(target).scheme and folder.endswith(":/")):
        raise StateError(f"target {target!r} ends with no name; give the name of the copy")
    folder = folder if folder or not slash else "/"
    if parts_of(target).scheme:
        return folder, name
    while folder and folder != "/" and not os.path.isdir(folder):  # noqa: PTH112 -- text in, text out
        if os.path.lexists(folder):
            raise StateError(f"target {target!r} leads through {folder!r}, which is no folder")
        above, _, missing = folder.rpartition("/")
        name = f"{missing}/{name}"
        folder = above or ("/" if folder.startswith("/") else "")
    return folder or ".", name


def place_on_mount(file: Path) -> tuple[str, str]:
    """Return the store of a file on a mount, and the file's path in it.

    Raises:
        StateError: It is on no mount of ours, or the mount's URL has secrets.
    """
    path = Path(os.path.abspath(file))  # noqa: PTH100 -- resolve() would follow links of the mount
    # From the file upwards, because one mount may be below another.
    for root in (path, *path.parents):
        if (store := _store_shown_at(root)) is not None:
            # The URL shows stars in place of secrets, so it opens no store.
            if f"{HIDDEN}@" in store or f"={HIDDEN}" in store:
                raise StateError(
                    f"{str(root)!r} is a mount of {store}, and does not show the secrets of that URL; "
                    "give --store and the path in it"
                )
            return store, "" if path == root else str(path.relative_to(root))
    raise StateError(f"{str(file)!r} lies on no mount of ours; give --store and the path in it")


def _store_shown_at(root: Path) -> str | None:
    """Return the store that the mount at ``root`` shows; None if no mount of ours is there."""
    try:
        # Below /tmp, for example, another user may have put a pipe there, so open only regular files.
        with open_file(root / RESERVED / "stats.json") as view:
            numbers = orjson.loads(view.read(_MOST_STATISTICS_BYTES))
    except (OSError, StateError, orjson.JSONDecodeError):
        return None
    store = numbers.get("store") if isinstance(numbers, dict) else None
    return store if isinstance(store, str) else None


def require_no_mount(store: str) -> None:
    """Refuse a mount where its store is wanted.

    Raises:
        StateError: It is a mount.
    """
    if parts_of(store).scheme:
        return
    with suppress(StateError):
        url, path = place_on_mount(Path(store))
        below = f"/{path}" if path else ""
        raise ConfigError(f"{store!r} is a mount of {url}{below}; give that store")


def copies_of(files: StripedFiles, path: str, target: str) -> Iterator[Copy]:
    """Yield the files to copy: the file at ``path``, or all files below a directory.

    Symbolic links below a directory are left out, because few stores know them.

    Raises:
        FileNotFoundError: Nothing is there.
        StateError: ``path`` itself is a symbolic link.
    """
    info = files.stat(path)
    if info.kind == "symlink":
        raise StateError(f"{path!r} is a link to {files.names.read_link(path)!r}; export that")
    if info.kind == "directory":
        for inner in files.listing(path):
            if inner.kind != "symlink":
                below = f"{path}/{inner.name}" if path else inner.name
                yield from copies_of(files, below, f"{target}/{inner.name}")
    else:
        yield Copy(source=path, target=target, size_bytes=info.size_bytes)


def require_free(store: Store, copies: list[Copy]) -> None:
    """Refuse existing targets before anything is copied.

    Raises:
        StateError: Some targets exist.
    """
    taken = [copy.target for copy in copies if _exists(store, copy.target)]
    if taken:
        raise StateError(
            f"{store.location} holds {taken[0]!r} already, and {len(taken) - 1} more of the "
            f"{len(copies)} targets; give --force to replace them"
        )


def require_no_others(store: Store, copies: list[Copy]) -> None:
    """Refuse to replace anything but files, before anything is copied: root could even replace ``/dev/null``.

    Raises:
        StateError: A folder, a link, a pipe or a device is there.
    """
    for copy in copies:
        try:
            found = store.stat(copy.target)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise StateError(f"target {copy.target!r}: {error.strerror}") from error
        if found.is_directory:
            raise StateError(f"target {copy.target!r} is a folder; name the copy in it")


def export_file(
    files: StripedFiles, source: str, store: Store, target: str, report: Callable[[int], None]
) -> Exported:
    """Copy one file; a file at the target is replaced when the copy is complete.

    Args:
        files: The namespace.
        source: Path in the namespace.
        store: Store of the copy.
        target: Path in that store.
        report: Called with the bytes just written.

    Raises:
        IntegrityError: A unit does not match its checksum, or the store kept another size.
        UnavailableError: A store does not answer.
    """
    target = checked_path(target)
    folder, name = parent_of(target), name_of(target)
    # A random name, so that two exports to one target do not write into the same file.
    partial = f".{name}.{uuid.uuid4().hex[:8]}.partial"
    partial = f"{folder}/{partial}" if folder else partial
    out = store.create(partial)
    try:
        with files.open(source) as file:
            exported = _copied(file.reader, out, report)
        out.close()
        # Check before the rename, because a store that cut it short must not show it as complete.
        _require_size(store, partial, exported.size_bytes)
        store.rename(partial, target)
    except BaseException:
        out.abort()
        with suppress(OSError, OmniloadError):
            store.remove(partial)
        raise
    return exported


def _copied(reader: FileReader, out: ObjectWriter, report: Callable[[int], None]) -> Exported:
    """Write all bytes in order, while one window ahead is being read."""
    size, digest = reader.size_bytes, xxhash.xxh3_128()
    window = min(_WINDOW_BYTES, size)
    # Two buffers, used alternately: one is filled while the other is written.
    views = (memoryview(bytearray(window)), memoryview(bytearray(window)))
    reads: dict[int, list[Future[None]]] = {}

    def start(number: int) -> None:
        at = number * window
        if at < size:
            reads[number] = reader.start_into([(at, views[number % 2][: size - at])])

    try:
        start(0)
        for number in range(-(-size // window) if size else 0):
            start(number + 1)
            wait_all(reads.pop(number))
            view = views[number % 2][: size - number * window]
            out.write(view)
            digest.update(view)
            report(len(view))
    finally:
        for futures in reads.values():
            for future in futures:
                # The buffers end with this call: cancel reads that have not begun, and wait for the others.
                future.cancel()
            with suppress(OSError, OmniloadError):
                wait_all(futures)
    return Exported(size_bytes=size, xxh3=digest.hexdigest())


def _require_size(store: Store, path: str, size_bytes: int) -> None:
    if (found := store.stat(path).size_bytes) != size_bytes:
        raise IntegrityError(
            f"{store.location} kept {found} of the {size_bytes} bytes of {path!r}; export it again"
        )


def _exists(store: Store, path: str) -> bool:
    try:
        store.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
