"""Files of a store that stay open between reads, because each open asks a name node, or an object store."""

from collections.abc import Callable
from typing import Generic, TypeVar

from fusefs.stores.deadlines import left_s
from fusefs.stores.protocol import RESERVED
from omniload.base.concurrency.single_flight import SingleFlight
from omniload.base.lru import Lru

__all__ = ["HandleCache", "never_changes"]

File = TypeVar("File")
_OBJECTS = f"{RESERVED}/objects/"


def never_changes(path: str) -> bool:
    """Return whether a path is an object of a striped file, which is written once and never replaced."""
    # Names of objects are random and never used again (docs/design/fusefs/0010).
    return path.startswith(_OBJECTS)


class HandleCache(Generic[File]):
    """Open files by path; the least recently read file is closed first. Safe in threads.

    Objects are written once and never changed, so an open object stays valid. Other
    files are kept open only if a read of an open file returns what is at its path at that time.
    A file that leaves the cache closes when its last reader is done with it.

    Args:
        open_file: Opens a file whose positional reads may overlap.
        most: Most files that are open at a time.
        any_path: Whether an open file reads what is at its path now, so that any file may be kept open;
            a short read then shows that the file has another length now.
    """

    def __init__(
        self, open_file: Callable[[str], File], *, most: int = 256, any_path: bool = False
    ) -> None:
        self._open_file = open_file
        self._any_path = any_path
        self._files: Lru[str, File] = Lru(most)
        self._opening: SingleFlight[str, File] = SingleFlight()

    def held(self, path: str) -> File | None:
        """Return the open file of a path, if the cache has it."""
        return self._files.get(path)

    def opened(self, path: str) -> File:
        """Open a file, and keep it open if it can stay; concurrent callers share one opening."""
        if not (self._any_path or never_changes(path)):
            return self._open_file(path)
        if (held := self._files.get(path)) is not None:
            return held
        # A hanging open does not show that the next one will hang, so a waiting caller then opens the file itself.
        left = left_s()
        # Wait for half of the remaining time, so that there is time for an opening of its own.
        within_s = None if left is None else left / 2
        return self._opening.call(path, lambda: self._opened_now(path), within_s=within_s)

    def _opened_now(self, path: str) -> File:
        if (held := self._files.get(path)) is not None:
            return held  # opened by a thread that finished a moment ago
        file = self._open_file(path)
        self._files.put(path, file)
        return file

    def put(self, path: str, file: File) -> None:
        """Keep a file that was opened elsewhere, instead of the file in the cache."""
        self._files.put(path, file)

    def drop(self, path: str) -> None:
        """Release a file after it was removed, or reading it failed."""
        self._files.pop(path)

    def clear(self) -> None:
        """Release all files."""
        self._files.clear()
