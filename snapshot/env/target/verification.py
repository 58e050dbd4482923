"""Compare an environment with its snapshot."""

import os
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple

from snapshot.env.format.digests import file_digest
from snapshot.env.format.entries import Entry, Kind, Target
from snapshot.env.format.manifest import Manifest

__all__ = ["Fault", "faults_of"]


class Fault(NamedTuple):
    """One path that is not as the snapshot has it."""

    kind: Literal["missing", "changed", "returned"]
    """``returned``: the command had deleted it."""
    path: str
    detail: str


def faults_of(manifest: Manifest, targets: Sequence[Target], *, digests: bool) -> list[Fault]:
    """Return what differs between an environment and its snapshot, in order of the entries.

    Paths that the snapshot does not name are nobody's fault. Times of directories are not compared:
    they move with every file beside. Without ``digests`` no file is read, and times of files are
    compared.
    """

    def look(entry: Entry) -> Fault | None:
        path = Path(targets[entry.target].path) / entry.path
        try:
            seen = path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            if entry.kind is Kind.DELETED:
                return None
            return Fault("missing", str(path), "not there")
        if entry.kind is Kind.DELETED:
            return Fault("returned", str(path), "the installation had deleted it")
        detail = _difference(entry, path, seen, digests=digests)
        return Fault("changed", str(path), detail) if detail else None

    if not digests:
        return [fault for fault in map(look, manifest.entries) if fault]
    threads = (os.cpu_count() or 1) + 1
    with ThreadPoolExecutor(threads, thread_name_prefix="omniload-env") as pool:
        return [fault for fault in pool.map(look, manifest.entries) if fault]


def _difference(entry: Entry, path: Path, seen: os.stat_result, *, digests: bool) -> str:
    """Say how a path differs; empty where it does not."""
    is_kind = {Kind.DIRECTORY: stat.S_ISDIR, Kind.FILE: stat.S_ISREG, Kind.LINK: stat.S_ISLNK}
    if not is_kind[entry.kind](seen.st_mode):
        return f"is no {entry.kind.name.lower()}"
    if entry.kind is Kind.LINK:
        link = str(path.readlink())
        return "" if link == entry.link else f"leads to {link!r}, not {entry.link!r}"
    mode = stat.S_IMODE(seen.st_mode)
    if mode != entry.mode:
        return f"mode {mode:o}, not {entry.mode:o}"
    return "" if entry.kind is Kind.DIRECTORY else _file_difference(entry, path, seen, digests)


def _file_difference(entry: Entry, path: Path, seen: os.stat_result, digests: bool) -> str:
    if seen.st_size != entry.size_bytes:
        return f"{seen.st_size} bytes, not {entry.size_bytes}"
    if digests:
        return "" if file_digest(path) == entry.digest else "other bytes"
    return "" if seen.st_mtime_ns == entry.mtime_ns else "another time"
