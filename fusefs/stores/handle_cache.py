"""Files of a store that stay open between reads: opening asks a name node, or an object store's head."""

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
    """Return whether what is at a path is written once and never replaced: an object of a striped file."""
    # Their names are random and never given again (docs/design/fusefs/0010).
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
        """Return the open file of a path, if it is held."""
        return self._files.get(path)

    def opened(self, path: str) -> File:
        """Open a file, and hold it if that may be; threads that ask at once share one opening."""
        if not (self._any_path or never_changes(path)):
            return self._open_file(path)
        if (held := self._files.get(path)) is not None:
            return held
        # One that hangs says nothing of the next: each call then makes its own experience.
        left = left_s()
        # Half of what is left: after one that hangs there is time for an opening of its own.
        within_s = None if left is None else left / 2
        return self._opening.call(path, lambda: self._opened_now(path), within_s=within_s)

    def _opened_now(self, path: str) -> File:
        if (held := self._files.get(path)) is not None:
            return held  # opened by a thread that finished a moment ago
        file = self._open_file(path)
        self._files.put(path, file)
        return file

    def put(self, path: str, file: File) -> None:
        """Hold a file that was opened elsewhere, in place of the one that is held."""
        self._files.put(path, file)

    def drop(self, path: str) -> None:
        """Let a file go: it was removed, or reading it failed."""
        self._files.pop(path)

    def clear(self) -> None:
        """Let all files go."""
        self._files.clear()
