"""A client whose every call ends within the current time limit (``fusefs.stores.deadlines``)."""

from functools import partial

from typing_extensions import override

from fusefs.stores.deadlines import Callers, allowing
from fusefs.stores.protocol import Entry, ObjectWriter
from fusefs.stores.remote.client import FileClient, NameClient, ReplacingNames

__all__ = ["BoundedFiles", "BoundedNames", "BoundedReplacingNames"]


class BoundedFiles(FileClient):
    """The files of another client, whose calls are made in threads that can be abandoned.

    Args:
        inner: The client.
        sends_at_close: Whether closing a stream may have to send everything that was written.
    """

    def __init__(self, inner: FileClient, *, sends_at_close: bool = False) -> None:
        self.inner = inner
        self.callers = Callers(type(inner).__name__.strip("_").removesuffix("Backend"))
        self._sends_at_close = sends_at_close

    @property
    @override
    def location(self) -> str:
        return self.inner.location

    @override
    def find(self, path: str) -> Entry | None:
        return self.callers.call("find", path, partial(self.inner.find, path))

    @override
    def glimpse(self, path: str) -> Entry | None:
        return self.callers.call("find", path, partial(self.inner.glimpse, path))

    @override
    def is_file(self, path: str) -> bool:
        return self.callers.call("find", path, partial(self.inner.is_file, path))

    @override
    def listing(self, path: str) -> list[Entry]:
        return self.callers.call("listing", path, partial(self.inner.listing, path))

    @override
    def read(self, path: str, offset: int, size_bytes: int) -> bytes:
        call = partial(self.inner.read, path, offset, size_bytes)
        return self.callers.call("read", path, call)

    @override
    def read_large(self, path: str, offset: int, size_bytes: int) -> bytes | memoryview:
        call = partial(self.inner.read_large, path, offset, size_bytes)
        return self.callers.call("read", path, call)

    @override
    def open_new(self, path: str) -> ObjectWriter:
        # Abort a stream that arrives after nobody waits for it: closing it would show half a file as whole.
        call = partial(self.inner.open_new, path)
        stream = self.callers.call("create", path, call, lambda late: late.abort())
        return _BoundedWriter(stream, self.callers, path, sends_at_close=self._sends_at_close)

    @override
    def close(self) -> None:
        # Nobody needs the outcome, and a client that hangs must not keep a process from ending.
        self.callers.give_up("close", "", self.inner.close)


class BoundedNames(NameClient):
    """The names of another client, whose calls are made in threads that can be abandoned.

    Args:
        inner: The client.
        callers: Make its calls.
    """

    def __init__(self, inner: NameClient, callers: Callers) -> None:
        self._inner = inner
        self._callers = callers

    @override
    def move(self, source: str, target: str) -> None:
        self._callers.call("move", source, partial(self._inner.move, source, target))

    @override
    def remove(self, path: str) -> None:
        self._callers.call("remove", path, partial(self._inner.remove, path))

    @override
    def make_directory(self, path: str) -> None:
        self._callers.call("make_directory", path, partial(self._inner.make_directory, path))

    @override
    def remove_directory(self, path: str) -> None:
        self._callers.call("remove_directory", path, partial(self._inner.remove_directory, path))


class BoundedReplacingNames(BoundedNames, ReplacingNames):
    """Like ``BoundedNames``, for a client whose rename can replace a file."""

    def __init__(self, inner: ReplacingNames, callers: Callers) -> None:
        super().__init__(inner, callers)
        self._replacing = inner

    @override
    def replace(self, source: str, target: str) -> None:
        self._callers.call("replace", source, partial(self._replacing.replace, source, target))


class _BoundedWriter(ObjectWriter):
    def __init__(
        self, stream: ObjectWriter, callers: Callers, path: str, *, sends_at_close: bool
    ) -> None:
        self._stream, self._callers, self._path = stream, callers, path
        self._sends_at_close = sends_at_close
        self._written_bytes = 0

    @override
    def write(self, data: bytes | bytearray | memoryview) -> None:
        # An abandoned call may still send these bytes, which is safe because units are never changed after this.
        self._written_bytes += len(data)
        self._callers.call("write", self._path, partial(self._stream.write, data))

    @override
    def close(self) -> None:
        # Such a client sends the parts of an upload here, which may take long.
        with allowing(self._written_bytes if self._sends_at_close else 0):
            self._callers.call("close", self._path, self._stream.close)

    @override
    def abort(self) -> None:
        self._callers.give_up("abort", self._path, self._stream.abort)
