"""Renaming and removing what somebody here has open, so that no flush lands at a path it lost.

A flush holds its body's lock while it publishes. So a call that takes a path away holds the
lock of every body concerned from before the store's call until the body knows.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from fusefs.stores.protocol import is_at_or_below, parent_of
from fusefs.tree.namespace import StripedFiles
from fusefs.vfs.file.open_file import OpenFile

__all__ = ["LeavingPaths", "remove_open", "rename_open"]


class LeavingPaths:
    """Paths that are being renamed, removed or replaced from here just now. Used on one thread."""

    def __init__(self) -> None:
        self._paths: list[str] = []

    def __contains__(self, path: str) -> bool:
        return any(is_at_or_below(path, left) for left in self._paths)

    @contextmanager
    def changing(self, *paths: str) -> Iterator[None]:
        """While paths change hands here, use no look that finds another mount's file at them."""
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
            body.keep_content()
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
    """Rename a file or directory with open bodies below it, over a file that may be open.

    A source that the store does not show yet is renamed here alone: its flush will
    replace the target.
    """
    bodies = sorted({*moving, *([replaced] if replaced is not None else [])}, key=id)
    with ExitStack() as locks:
        for body in bodies:
            locks.enter_context(body.lock)
        if source == target:
            return
        if replaced is not None:
            replaced.keep_content()
        pending = any(body.path == source and not body.pending.published for body in moving)
        if pending:
            # It may have been renamed over a file before, which its path must not bring back.
            with suppress(FileNotFoundError):
                files.names.remove(source)
            for above in {parent_of(source), parent_of(target)}:
                files.directories.names_changed(above)
        else:
            for body in moving:
                body.check_place()
            files.names.rename(source, target)
        if replaced is not None:
            replaced.pending.unlinked()
        for body in moving:
            if body.path is not None:
                body.moved(target + body.path[len(source) :])
