"""What a store needs of a client library: a few calls, which pyarrow, fsspec and others are adapted to."""

from typing import Protocol

from fusefs.stores.protocol import Entry, ObjectWriter

__all__ = ["Backend", "ReplacingBackend"]


class Backend(Protocol):
    """The calls of a client library, with errors as ``fusefs.stores.protocol`` wants them."""

    @property
    def location(self) -> str:
        """URL for people."""
        ...

    def find(self, path: str) -> Entry | None:
        """Describe ``path``; ``None`` only where the store positively says nothing is there."""
        ...

    def glimpse(self, path: str) -> Entry | None:
        """As ``find``, for clients that ask less for this; ``None`` may stand for an outage, too."""
        return self.find(path)

    def is_file(self, path: str) -> bool:
        """Tell whether a file is there; for clients that ask less for this than for ``find``."""
        found = self.find(path)
        return found is not None and not found.is_directory

    def listing(self, path: str) -> list[Entry]:
        """Return what lies directly in a directory.

        Of a file: the file itself, nothing or an error, as the client does.

        Raises:
            FileNotFoundError: The store positively says that no directory is there.
        """
        ...

    def read(self, path: str, offset: int, size_bytes: int) -> bytes:
        """Return up to ``size_bytes`` bytes."""
        ...

    def open_new(self, path: str) -> ObjectWriter:
        """Open a file for writing; the caller knows that it does not exist."""
        ...

    def move(self, source: str, target: str) -> None:
        """Rename a file or directory to a name that is free, or copy and remove it."""
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

    def close(self) -> None:
        """Let go of connections."""
        ...


class ReplacingBackend(Backend, Protocol):
    """A client whose rename can replace a file."""

    def replace(self, source: str, target: str) -> None:
        """Rename a file over another: at any moment one of them is at the target."""
        ...
