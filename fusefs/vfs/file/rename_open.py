"""Renaming and removing files that are open here, so that no flush publishes at a path that the file lost.

A flush holds the lock of its body while it publishes. So a call that takes a path away holds the
locks of all bodies concerned from before the store's call until the bodies know.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from fusefs.stores.protocol import is_at_or_below, parent_of
from fusefs.tree.namespace import StripedFiles
from fusefs.tree.version_location import stale_suppressed
from fusefs.vfs.file.file_content import FileContent
from fusefs.vfs.file.open_file import OpenFile

__all__ = ["LeavingPaths", "moved", "remove_open", "rename_open"]


class LeavingPaths:
    """Paths that this mount is renaming, removing or replacing at this moment. Used on one thread."""

    def __init__(self) -> None:
        self._paths: list[str] = []

    def __contains__(self, path: str) -> bool:
        return any(is_at_or_below(path, left) for left in self._paths)

    @contextmanager
    def changing(self, *paths: str) -> Iterator[None]:
        """While this mount changes the paths, ignore looks that find another mount's file at them."""
        # A list, not a set, because two changes of one path may overlap.
        self._paths += paths
        try:
            yield
        finally:
            for path in paths:
                self._paths.remove(path)


def remove_open(files: StripedFiles, path: str, body: OpenFile | None) -> None:
    """Remove a file that may be open, or that the store does not show yet."""
    with ExitStack() as locks:
        pending = False
        if body is not None:
            locks.enter_context(body.lock)
            _keep_content(body)
            pending = not body.pending.published
        try:
            files.names.remove(path)
        except FileNotFoundError:
            if not pending:
                raise
            files.directories.names_changed(parent_of(path))
        if body is not None:
            body.pending.unlinked()


def rename_open(
    files: StripedFiles,
    source: str,
    target: str,
    moving: Sequence[OpenFile],
    replaced: OpenFile | None,
) -> None:
    """Rename a file or directory with open bodies below it, replacing a file that may be open.

    A source that the store does not show yet is renamed only here: its flush will
    replace the target.
    """
    # Lock in a fixed order, so that two concurrent renames cannot wait for each other.
    bodies = sorted({*moving, *([replaced] if replaced is not None else [])}, key=id)
    with ExitStack() as locks:
        for body in bodies:
            locks.enter_context(body.lock)
        if source == target:
            return
        if replaced is not None:
            _keep_content(replaced)
        pending = any(body.pending.path == source and not body.pending.published for body in moving)
        if pending:
            # The source may have been renamed over a file before, which must not reappear at the path.
            with suppress(FileNotFoundError):
                files.names.remove(source)
            for above in {parent_of(source), parent_of(target)}:
                files.directories.names_changed(above)
        else:
            for body in moving:
                _check_place(body)
            files.names.rename(source, target)
        if replaced is not None:
            replaced.pending.unlinked()
        for body in moving:
            if (path := body.pending.path) is not None:
                moved(body, target + path[len(source) :])


def moved(body: OpenFile, path: str) -> None:
    """Note that the file was renamed. May ask the store."""
    with body.lock:
        body.pending.path = path
        if body.content.opened is not None:
            body.content.opened.moved(path, was_there=True)


def _keep_content(body: OpenFile) -> None:
    """Copy a plain version before its path is taken away, unless it has already left the path."""
    with body.lock, stale_suppressed():
        if _reads_path(body.content):
            body.content.spooled(body.pending.path or "").hold_all()


def _check_place(body: OpenFile) -> None:
    """Before a rename, leave a path that shows another version, which is the one renamed. May ask the store."""
    opened = body.content.opened
    if _reads_path(body.content) and opened is not None and opened.place.is_gone():
        body.pending.replaced_elsewhere()


def _reads_path(content: FileContent) -> bool:
    """Return whether reads use the plain file at its path, and so depend on its staying there."""
    opened = content.opened
    return content.bytes.needs_version and opened is not None and opened.reads_path
