"""Files of a store that stay open between reads: opening asks a name node, or an object store's head."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from fusefs.stores.protocol import RESERVED

__all__ = ["HeldFiles"]

File = TypeVar("File")
_OBJECTS = f"{RESERVED}/objects/"


class HeldFiles(Generic[File]):
    """Open files by path, the least recently read let go first. Safe in threads.

    Only objects are held: they are written once and never changed, so what was opened is
    what is there. A file that is let go closes when its last reader is done with it.

    Args:
        open_file: Opens a file whose positional reads may overlap.
        most: Files held at a time.
    """

    def __init__(self, open_file: Callable[[str], File], *, most: int = 256) -> None:
        self._open_file = open_file
        self._most = most
        self._lock = threading.Lock()
        self._files: OrderedDict[str, File] = OrderedDict()

    def held(self, path: str) -> File | None:
        """Return the open file of a path, if it is held."""
        with self._lock:
            found = self._files.get(path)
            if found is not None:
                self._files.move_to_end(path)
            return found

    def opened(self, path: str) -> File:
        """Open a file, and hold it if it is an object."""
        file = self._open_file(path)
        if path.startswith(_OBJECTS):
            with self._lock:
                self._files[path] = file
                while len(self._files) > self._most:
                    self._files.popitem(last=False)
        return file

    def drop(self, path: str) -> None:
        """Let a file go: it was removed, or reading it failed."""
        with self._lock:
            self._files.pop(path, None)

    def clear(self) -> None:
        """Let all files go."""
        with self._lock:
            self._files.clear()
