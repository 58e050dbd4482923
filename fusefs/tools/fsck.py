"""Checks of a store: every manifest readable, every object it names present and whole, nothing left over.

Repair removes an object only if it can prove that no manifest names it: the object is listed before two walks
over all manifests that found the same tree, is named in neither, and is older than a
grace that outlasts any write under way. A single unreadable manifest stops the
removal of objects, because it may name any of them. A truncated manifest has the size of a
plain file, whose head no other check reads. So if there are objects that nothing names, the heads of plain
files are read, too.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from fusefs.base.thread_pools import StorePool
from fusefs.format.manifest import Manifest
from fusefs.format.manifest_header import MAGIC, TAIL, has_manifest_size
from fusefs.stores.protocol import RESERVED, TEMPORARY, Entry, Store, name_of, parent_of
from fusefs.stores.remote.rename_intents import (
    INTENTS,
    MAX_INTENT_BYTES,
    Intent,
    decode_intent,
    intent_path,
)
from fusefs.tree.directory_attributes import (
    MARKERS,
    is_attributes,
    mark,
    marker_of,
    read_attributes,
)
from fusefs.tree.namespace import StripedFiles
from omniload.base.errors import IntegrityError, OmniloadError, StateError

__all__ = ["Fault", "Report", "cut_manifests", "verify"]

FaultKind = Literal[
    "unreadable",
    "missing",
    "wrong size",
    "corrupt",
    "orphan",
    "left over",
    "interrupted",
    "unmarked",
]
HARMFUL: frozenset[FaultKind] = frozenset({"unreadable", "missing", "wrong size", "corrupt"})
"""Faults that cost data or attributes; the others cost space, or hide something for now."""
_AT_ONCE = 1024
"""Files that are passed to the threads together, because a store may hold millions."""
_WHOLE_BYTES = 8192
"""Size up to which one request reads both ends of a file."""
_END = b" " + TAIL
"""Nearly every manifest has padding before its tail; a user's text may well end with a line ``omnifs``."""
_REMEDY = "restore it from another copy, or remove it and repair: that deletes what it named"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of a store."""

    kind: FaultKind
    path: str
    detail: str


@dataclass(slots=True)
class Report:
    """The findings of a check."""

    files: int = 0
    manifests: int = 0
    objects: int = 0
    bytes_verified: int = 0
    faults: list[Fault] = field(default_factory=list)
    repaired: list[str] = field(default_factory=list)
    """Paths that were removed or completed."""

    @property
    def harmful(self) -> list[Fault]:
        """Faults that cost data."""
        return [fault for fault in self.faults if fault.kind in HARMFUL]


@dataclass(frozen=True, slots=True)
class _Walk:
    named: frozenset[str]
    tree: frozenset[tuple[str, int, int]]
    unreadable: list[str]
    """Manifests that cannot be read."""
    plain: list[tuple[str, int]]
    """Path and size of files whose size alone shows that they are no manifests."""
    directories: list[str]
    """Places of the attributes of directories."""


def verify(
    files: StripedFiles,
    *,
    read_data: bool = False,
    repair: bool = False,
    grace_s: float = 3600.0,
) -> Report:
    """Check a store and, if asked, make repairs that cost no data.

    Args:
        files: The store's files.
        read_data: Read every unit and compare its checksum, instead of sizes alone; and the head
            of every plain file, which otherwise is read only if there are objects that nothing names.
        repair: Finish or drop interrupted replacements; remove orphans and left-overs.
        grace_s: Age from which an object that no manifest names is an orphan rather than
            part of a write under way. By the local clock, compared with the store's time stamps.

    Raises:
        StateError: Orphans stay: a manifest cannot be read, or the tree changed meanwhile.
    """
    report = Report()
    # List objects before the walk, so that an object that is written meanwhile is no orphan.
    objects = dict(_objects(files.store))
    report.objects = len(objects)
    walk = _walk(files, objects, report, read_data=read_data)
    if read_data or not walk.named.issuperset(objects):
        _find_cut(files, walk, report)
    before_ns = time.time_ns() - int(grace_s * 1e9)
    orphans = sorted(
        path
        for path, entry in objects.items()
        if path not in walk.named and entry.mtime_ns <= before_ns
    )
    unmarked = _check_directories(files.store, walk.directories, report)
    report.faults += [Fault("orphan", path, "no manifest names it") for path in orphans]
    left_over = sorted(p for p, e in _below(files.store, TEMPORARY) if e.mtime_ns <= before_ns)
    report.faults += [Fault("left over", path, "its writer is gone") for path in left_over]
    intents, no_intents = _intents(files.store, before_ns)
    report.faults += [Fault("interrupted", i.target, "replacement not ended") for i in intents]
    report.faults += [Fault("left over", path, why) for path, why in no_intents.items()]
    if repair:
        for path in unmarked:
            mark(files.store, path)
            report.repaired.append(path)
        # Before left-overs are removed, because an intent may name one as the only copy of a file.
        _finish_intents(files.store, intents, report)
        _remove(files.store, sorted(no_intents), report)
        _remove(
            files.store,
            [p for p in left_over if _found(files.store, p) and not _promised(p, files.store)],
            report,
        )
        _remove_orphans(files, orphans, walk, report)
    return report


def _remove_orphans(files: StripedFiles, orphans: list[str], walk: _Walk, report: Report) -> None:
    if not orphans:
        return
    if walk.unreadable:
        some = ", ".join(map(repr, walk.unreadable[:3]))
        raise StateError(
            f"{len(orphans)} orphans stay: {len(walk.unreadable)} manifests cannot be read and "
            f"may name them ({some}); restore or remove them first"
        )
    # The first walk may have missed a file at both paths if it was renamed during the walk.
    again = _walk(files, None, Report(), read_data=False)
    if again.tree != walk.tree:
        raise StateError(
            f"{len(orphans)} orphans stay: the tree changed while it was walked; "
            "repair when nobody writes or renames"
        )
    _remove(files.store, [path for path in orphans if path not in again.named], report)


def _find_cut(files: StripedFiles, walk: _Walk, report: Report) -> None:
    """Report plain files that are truncated manifests, and make them stop the removal of objects."""
    for path, wrong in cut_manifests(files.store, walk.plain, streams=files.config.read_streams):
        report.faults.append(Fault("unreadable", path, wrong))
        walk.unreadable.append(path)


def _walk(
    files: StripedFiles, objects: dict[str, Entry] | None, report: Report, *, read_data: bool
) -> _Walk:
    """Walk over all manifests; without ``objects``, only to learn which objects they name."""
    named: set[str] = set()
    tree: set[tuple[str, int, int]] = set()
    directories: list[str] = []
    unreadable: list[str] = []
    plain: list[tuple[str, int]] = []
    for path, entry in _below(files.store, ""):
        if is_attributes(path):
            directories.append(path)
            continue
        report.files += 1
        # Two walks are compared by this set: it shows what was added, removed or replaced between them.
        tree.add((path, entry.size_bytes, entry.mtime_ns))
        try:
            manifest = files.manifest(path)
        except (FileNotFoundError, NotADirectoryError):
            continue  # it was moved, which the second walk notices
        except PermissionError as error:
            unreadable.append(path)
            report.faults.append(Fault("unreadable", path, f"{error}; verify as the store's owner"))
            continue
        except (IntegrityError, StateError) as error:
            unreadable.append(path)
            report.faults.append(Fault("unreadable", path, str(error)))
            continue
        if manifest is None:
            if not has_manifest_size(entry.size_bytes):
                plain.append((path, entry.size_bytes))
            continue
        report.manifests += 1
        named.update(manifest.object_paths())
        if objects is not None:
            faults = _faults_of(path, manifest, objects, files.store)
            report.faults += faults
            if read_data and not faults:
                _read_all(files, path, report)
    return _Walk(frozenset(named), frozenset(tree), unreadable, plain, directories)


def _check_directories(store: Store, places: list[str], report: Report) -> list[str]:
    """Check that attributes of directories can be read; return directories that no look-up would find."""
    marked = {entry.name for _, entry in _below(store, MARKERS)}
    unmarked = []
    for place in places:
        path = parent_of(place)
        try:
            read_attributes(store, path)
        except (IntegrityError, StateError) as error:
            report.faults.append(Fault("unreadable", place, str(error)))
        if name_of(marker_of(path)) not in marked:
            unmarked.append(path)
            report.faults.append(Fault("unmarked", path, "its attributes are not shown"))
    return unmarked


def _faults_of(
    path: str, manifest: Manifest, objects: dict[str, Entry], store: Store
) -> list[Fault]:
    faults = []
    for segment in manifest.distinct_segments():
        for number, object_path in enumerate(segment.object_paths()):
            # Ask the store for an unlisted object, which may have been written since the listing.
            entry = objects.get(object_path) or _found(store, object_path)
            wanted = segment.layout.object_size(number, segment.stored_bytes)
            if entry is None:
                faults.append(Fault("missing", object_path, f"manifest {path!r} names it"))
            elif entry.size_bytes != wanted:
                detail = f"has {entry.size_bytes} bytes, manifest {path!r} says {wanted}"
                faults.append(Fault("wrong size", object_path, detail))
    return faults


def _read_all(files: StripedFiles, path: str, report: Report) -> None:
    step = files.longest_read * 4
    with files.open(path) as file:
        for at in range(0, file.reader.size_bytes, step):
            try:
                report.bytes_verified += len(file.reader.read(at, step))
            except IntegrityError as error:
                report.faults.append(Fault("corrupt", path, str(error)))


def _below(store: Store, path: str) -> Iterator[tuple[str, Entry]]:
    """Yield every file below a directory; files that vanish meanwhile are left out."""
    # Iterate instead of recursing, because users make trees that are deeper than Python's stack.
    pending = [path]
    while pending:
        above = pending.pop()
        try:
            entries = store.listing(above)
        except (FileNotFoundError, NotADirectoryError):
            continue
        for entry in entries:
            child = f"{above}/{entry.name}" if above else entry.name
            # The store's own directories have walks of their own.
            if child == RESERVED:
                continue
            if entry.is_directory:
                pending.append(child)
            else:
                yield child, entry


def _objects(store: Store) -> Iterator[tuple[str, Entry]]:
    yield from _below(store, f"{RESERVED}/objects")


def _found(store: Store, path: str) -> Entry | None:
    try:
        return store.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None  # a folder of the path may have become a file


def _intents(store: Store, before_ns: int) -> tuple[list[Intent], dict[str, str]]:
    """Return the intents of dead writers, and the paths of malformed ones with their faults."""
    found, wrong = [], {}
    for path, entry in _below(store, INTENTS):
        if entry.mtime_ns > before_ns:
            continue
        try:
            data = store.read(path, 0, min(entry.size_bytes, MAX_INTENT_BYTES))
            found.append(decode_intent(data, path=path))
        except FileNotFoundError:
            continue
        except IntegrityError as error:
            wrong[path] = str(error)
    return found, wrong


def _promised(path: str, store: Store) -> bool:
    return any(intent.source == path for intent in _intents(store, time.time_ns())[0])


def _finish_intents(store: Store, intents: list[Intent], report: Report) -> None:
    """Finish interrupted replacements, which the store does when their target is looked up; then drop the intent."""
    for intent in intents:
        there = _found(store, intent.target) is not None
        if not there and _found(store, intent.source) is not None:
            detail = (
                f"its content still lies at {intent.source!r}; make its directory and repair again"
            )
            report.faults.append(Fault("missing", intent.target, detail))
        else:
            _remove(store, [intent_path(intent.target)], report)


def _remove(store: Store, paths: list[str], report: Report) -> None:
    for path in paths:
        try:
            store.remove(path)
        except FileNotFoundError:
            continue
        except OmniloadError as error:
            error.add_note(f"repair stopped at {path!r}, after {len(report.repaired)} repairs")
            raise
        report.repaired.append(path)


def cut_manifests(
    store: Store, plain: Sequence[tuple[str, int]], *, streams: int
) -> Iterator[tuple[str, str]]:
    """Yield those plain files that look like the rest of a manifest.

    A manifest that was cut within its first 10 bytes, or emptied, cannot be distinguished from a user's file.

    Args:
        store: The store.
        plain: Path and size, in bytes, of each file; no manifest has such a size.
        streams: Files that are read concurrently.

    Yields:
        The path, and the fault with its remedy.
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
        return None  # it was moved, which a second walk finds out
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
    """Return the first and last bytes of a file, as many as identify a manifest."""
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
