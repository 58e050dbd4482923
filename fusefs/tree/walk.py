"""All files at or below a path."""

import posixpath
from collections.abc import Iterator
from typing import Protocol

from fusefs.tree.catalog import FileInfo

__all__ = ["files_below"]


class _Listed(Protocol):
    def stat(self, path: str) -> FileInfo: ...

    def listing(self, path: str) -> list[FileInfo]: ...


def files_below(files: _Listed, path: str) -> Iterator[tuple[str, FileInfo]]:
    """Yield a file, or every file below a directory, by path; links are not followed."""
    pending = [(path, files.stat(path))]
    while pending:
        at, info = pending.pop()
        if info.kind == "directory":
            found = [(posixpath.join(at, child.name), child) for child in files.listing(at)]
            # Last in, first out, so that files come in the order of a listing, and few folders wait at a time.
            pending += reversed(found)
        elif info.kind == "file":
            yield at, info
