"""Files of a store that stay open between reads: opening asks a name node, or an object store's head."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

from fusefs.stores.deadlines import left_s
from fusefs.stores.protocol import RESERVED

__all__ = ["HandleCache", "RecentNames", "never_changes"]

File = TypeVar("File")
_OBJECTS = f"{RESERVED}/objects/"


def never_changes(path: str) -> bool:
    """Return whether what is at a path is written once and never replaced: an object of a striped file."""
    return path.startswith(_OBJECTS)


class HandleCache(Generic[File]):
    """Open files by path, the least recently read let go first. Safe in threads.

    Objects are written once and never changed, so what was opened is what is there. Other
    files are held only where reading an open one reads what lies at its path by then.
    A file that is let go closes when its last reader is done with it.

    Args:
        open_file: Opens a file whose positional reads may overlap.
        most: Files held at a time.
        any_path: Whether an open file reads what is at its path now, so that any may be held;
            a read that comes back short is the sign that it has another length by now.
    """

    def __init__(
        self, open_file: Callable[[str], File], *, most: int = 256, any_path: bool = False
    ) -> None:
        self._open_file = open_file
        self._most = most
        self._any_path = any_path
        self._lock = threading.Lock()
        self._files: OrderedDict[str, File] = OrderedDict()
        self._opening: dict[str, Future[File]] = {}

    def held(self, path: str) -> File | None:
        """Return the open file of a path, if it is held."""
        with self._lock:
            found = self._files.get(path)
            if found is not None:
                self._files.move_to_end(path)
            return found

    def opened(self, path: str) -> File:
        """Open a file, and hold it if that may be; threads that ask at once share one opening."""
        if not (self._any_path or never_changes(path)):
            return self._open_file(path)
        with self._lock:
            if (held := self._files.get(path)) is not None:
                return held
            theirs = self._opening.get(path)
            opening = theirs or self._opening.setdefault(path, Future())
        if theirs is not None:
            # One that failed says nothing of the next, nor does one that hangs: each makes its own experience.
            left = left_s()
            wait([opening], None if left is None else left / 2)
            opened = opening.done() and opening.exception() is None
            return opening.result() if opened else self._open_file(path)
        return self._open_for_all(path, opening)

    def _open_for_all(self, path: str, opening: Future[File]) -> File:
        try:
            file = self._open_file(path)
        except BaseException as error:
            with self._lock:
                del self._opening[path]
            opening.set_exception(error)
            raise
        with self._lock:
            del self._opening[path]
            self._keep(path, file)
        opening.set_result(file)
        return file

    def _keep(self, path: str, file: File) -> None:
        self._files[path] = file
        self._files.move_to_end(path)
        while len(self._files) > self._most:
            self._files.popitem(last=False)

    def put(self, path: str, file: File) -> None:
        """Hold a file that was opened elsewhere, in place of the one that is held."""
        with self._lock:
            self._keep(path, file)

    def drop(self, path: str) -> None:
        """Let a file go: it was removed, or reading it failed."""
        with self._lock:
            self._files.pop(path, None)

    def clear(self) -> None:
        """Let all files go."""
        with self._lock:
            self._files.clear()


class RecentNames:
    """The last ``most`` names that were added. Safe in threads."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._names: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, name: str) -> bool:
        with self._lock:
            return name in self._names

    def add(self, *names: str) -> None:
        """Add names; those added longest ago go."""
        with self._lock:
            for name in names:
                self._names[name] = None
                self._names.move_to_end(name)
            while len(self._names) > self._most:
                self._names.popitem(last=False)

    def discard(self, name: str) -> None:
        """Remove a name, if it is here."""
        with self._lock:
            self._names.pop(name, None)
