"""The few calls that a store needs of a client library; pyarrow, fsspec and others are adapted to them.

``Backend`` declares them in two parts: files, and their names. All adapters share ``RootedBackend`` and
``ClientWriter``.
"""

from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from typing_extensions import override

from fusefs.stores.protocol import Entry, ObjectWriter

__all__ = [
    "Backend",
    "ClientWriter",
    "FileClient",
    "NameClient",
    "ReplacingBackend",
    "ReplacingNames",
    "RootedBackend",
]


class FileClient(Protocol):
    """Calls that look at paths, read files and write new ones."""

    @property
    def location(self) -> str:
        """URL for people."""
        ...

    def find(self, path: str) -> Entry | None:
        """Describe ``path``; ``None`` only if the store positively says that nothing is there."""
        ...

    def glimpse(self, path: str) -> Entry | None:
        """Like ``find``, with fewer requests on some clients; None may mean an outage, too."""
        return self.find(path)

    def is_file(self, path: str) -> bool:
        """Return whether a file is there; for clients that need fewer requests for this than for ``find``."""
        found = self.find(path)
        return found is not None and not found.is_directory

    def listing(self, path: str) -> list[Entry]:
        """Return the entries of a directory.

        For a file, the result is the file itself, nothing or an error, depending on the client.

        Raises:
            FileNotFoundError: The store positively says that no directory is there.
        """
        ...

    def read(self, path: str, offset: int, size_bytes: int) -> bytes:
        """Return up to ``size_bytes`` bytes."""
        ...

    def read_large(self, path: str, offset: int, size_bytes: int) -> bytes | memoryview:
        """Like ``read``, into ``fusefs.base.huge_pages`` memory; for clients that can fill given memory."""
        return self.read(path, offset, size_bytes)

    def open_new(self, path: str) -> ObjectWriter:
        """Open a file for writing; the caller knows that it does not exist."""
        ...

    def close(self) -> None:
        """Close the connections."""
        ...


class NameClient(Protocol):
    """Calls that move and remove entries, and make directories."""

    def move(self, source: str, target: str) -> None:
        """Rename a file or directory to a free name, or copy and remove it."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file."""
        ...

    def make_directory(self, path: str) -> None:
        """Make a directory and its parents."""
        ...

    def remove_directory(self, path: str) -> None:
        """Remove a directory that the caller knows to be empty."""
        ...


class Backend(FileClient, NameClient, Protocol):
    """The calls of a client library, with the errors of ``fusefs.stores.protocol``."""


class ReplacingNames(NameClient, Protocol):
    """A client whose rename can replace a file."""

    def replace(self, source: str, target: str) -> None:
        """Rename a file over another, so that at any moment one of them is at the target."""
        ...


class ReplacingBackend(Backend, ReplacingNames, Protocol):
    """All calls of a client whose rename can replace a file."""


class RootedBackend(Backend):
    """A client whose paths begin at a root.

    Args:
        root: Path in the form of the client; empty for the client's own root.
        url: URL for people.
    """

    def __init__(self, root: str, url: str) -> None:
        self._root = root.rstrip("/")
        self._url = url

    @property
    @override
    def location(self) -> str:
        return self._url

    def _at(self, path: str) -> str:
        """Return a path in the form of the client."""
        return f"{self._root}/{path}" if path else self._root or "/"


class ClientWriter(ObjectWriter):
    """An object written by a client's stream; each client defines how it aborts one.

    Args:
        stream: Stream with ``write`` and ``close``.
        backend: Backend that opened the stream.
        path: Path of the object.
        translating: Turns the client's errors into those of ``fusefs.stores.protocol``.
    """

    def __init__(
        self,
        stream: Any,  # noqa: ANN401 -- of any client
        backend: Backend,
        path: str,
        translating: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._stream, self._backend, self._path = stream, backend, path
        self._translating = translating

    @override
    def write(self, data: bytes | bytearray | memoryview) -> None:
        with self._translating(self._path):
            self._stream.write(data)

    @override
    def close(self) -> None:
        with self._translating(self._path):
            self._stream.close()

    @override
    @abstractmethod
    def abort(self) -> None: ...
