"""``omnifs://``: the striped namespace as an fsspec filesystem, without a mount.

The store is given as ``store=`` or chained, as fsspec does it::

    fsspec.open("omnifs://ckpt/rank0.bin", "rb", store="hdfs://nn:9000/jobs")
    fsspec.open("omnifs://ckpt/rank0.bin::hdfs://nn:9000/jobs", "rb")

A file written is there whole when it is closed, and not at all before; leaving a
``with`` block by an exception gives it up.
"""

import errno
import io
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import fsspec
from fsspec.spec import AbstractFileSystem
from typing_extensions import override

from fusefs.config import FilesConfig
from fusefs.format.content import Content
from fusefs.format.manifest import Segment
from fusefs.stores.protocol import checked_path, parent_of
from fusefs.stores.retry import RetryingStore
from fusefs.stores.url import open_store
from fusefs.tree.catalog import FileInfo
from fusefs.tree.freshness import names_segments
from fusefs.tree.namespace import OpenVersion, StripedFiles
from fusefs.tree.version_identity import ids_of, segments_of, spliceable
from fusefs.write.file_writer import FileWriter
from omniload.base.config import checked
from omniload.base.errors import ConfigError

__all__ = ["OmniFileSystem"]

_MOST_LINKS = 40


class OmniFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """Striped files of a store for whatever speaks fsspec: torch DCP, Ray, datasets, pandas.

    Args:
        store: URL of the store.
        config: Fields of ``FilesConfig``.
        fo: The store, when the URL is chained.
        target_protocol: Its scheme.
        target_options: Options for the store's own client.
        **options: fsspec's own.

    Raises:
        ConfigError: No store is given, or ``config`` breaks its model.
    """

    protocol = "omnifs"
    root_marker = ""

    def __init__(
        self,
        store: str | None = None,
        *,
        config: Mapping[str, Any] | None = None,
        fo: str | None = None,
        target_protocol: str | None = None,
        target_options: Mapping[str, Any] | None = None,
        **options: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(**options)
        url = store or fo
        if url is None:
            raise ConfigError("omnifs:// needs a store; give store=URL or omnifs://PATH::URL")
        rest = dict(target_options or {})
        if "://" not in url and target_protocol not in {None, "file"}:
            # fsspec took the host out of the URL; with it back in, the store's own client is found.
            host, port = rest.pop("host", ""), rest.pop("port", None)
            url = f"{target_protocol}://{host}{f':{port}' if port else ''}{url}"
        settings = checked(config or {}, FilesConfig, name="omnifs config")
        self.files = StripedFiles(RetryingStore(open_store(url, rest or None)), settings)

    @classmethod
    @override
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(item) for item in path]
        return str(path).removeprefix("omnifs://").strip("/")

    @override
    def info(self, path: str, **_: Any) -> dict[str, Any]:
        path = self._resolved(path)
        return _described(path, self.files.stat(path))

    @override
    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path = self._resolved(path)
        info = self.files.stat(path)
        if info.kind != "directory":
            found = [_described(path, info)]
        else:
            prefix = f"{path}/" if path else ""
            found = [_described(prefix + i.name, i) for i in self.files.listing(path)]
        return found if detail else [item["name"] for item in found]

    @override
    def _open(self, path: str, mode: str = "rb", **_: Any) -> "_ReadFile | _WriteFile":
        path = self._resolved(path)
        if mode == "rb":
            return _ReadFile(self.files.open(path), path)
        if mode == "xb" and self.exists(path):
            raise FileExistsError(errno.EEXIST, "something is there", path)
        if mode in {"wb", "xb"}:
            return _WriteFile(self.files, path, self.files.writers.file(path))
        if mode == "ab":
            if self.exists(path):
                return _WriteFile(self.files, path, *_appending(self.files, path))
            return _WriteFile(self.files, path, self.files.writers.file(path))
        raise ValueError(
            f"mode {mode!r} is not one of rb, wb, xb, ab; random writes need the mount"
        )

    @override
    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        with self.files.open(self._resolved(path)) as file:
            size = file.reader.size_bytes
            first = _from_end(start, size, default=0)
            return bytes(
                file.reader.read(first, max(0, _from_end(end, size, default=size) - first))
            )

    @override
    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        path = self._resolved(path)
        if mode == "create" and self.exists(path):
            raise FileExistsError(errno.EEXIST, "something is there", path)
        self.files.write_file(path, value)

    @override
    def mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        path = self._strip_protocol(path)
        if not create_parents:
            # Check for the parent, because stores make missing parents by themselves.
            self.files.stat(parent_of(path))
        self.files.names.make_directory(path)

    @override
    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        path = self._strip_protocol(path)
        try:
            self.files.names.make_directory(path)
        except FileExistsError:
            if not exist_ok or self.files.stat(path).kind != "directory":
                raise

    @override
    def rmdir(self, path: str) -> None:
        self.files.names.remove_directory(self._strip_protocol(path))

    @override
    def rm_file(self, path: str) -> None:
        """Remove a file, or a directory that is empty: fsspec's recursive rm asks for both here."""
        path = self._strip_protocol(path)
        if self.files.stat(path).kind == "directory":
            self.files.names.remove_directory(path)
        else:
            self.files.names.remove(path)

    @override
    def mv(self, path1: str, path2: str, **_: Any) -> None:
        """Rename a file or directory: no data moves."""
        self.files.names.rename(self._strip_protocol(path1), self._strip_protocol(path2))

    rename = mv

    @override
    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        source = self._resolved(path1)
        if self.files.stat(source).kind == "directory":
            self.makedirs(path2, exist_ok=True)
            return
        with self._open(source, "rb") as read, self._open(path2, "wb") as write:
            while data := read.read(self.files.longest_read):
                write.write(data)

    @override
    def created(self, path: str) -> float:
        # The store keeps no other time than the last change.
        return self.modified(path)

    @override
    def modified(self, path: str) -> float:
        return float(self.info(path)["mtime"])

    def _resolved(self, path: str) -> str:
        """Return a path after following symbolic links of its last component."""
        path = checked_path(self._strip_protocol(path))
        # The same limit as Linux, because links may form a circle.
        for _ in range(_MOST_LINKS):
            try:
                if not path or self.files.stat(path).kind != "symlink":
                    return path
            except FileNotFoundError:
                return path
            path = _joined(parent_of(path), self.files.names.read_link(path))
        raise OSError(errno.ELOOP, f"more than {_MOST_LINKS} links", path)


class _ReadFile(io.RawIOBase):
    """A version of a file, for reading."""

    def __init__(self, file: OpenVersion, path: str) -> None:
        self._file = file
        self._at = 0
        self.name = path
        self.size = file.reader.size_bytes

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def tell(self) -> int:
        return self._at

    @override
    def seek(self, offset: int, whence: int = 0, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size}[whence]
        if base + offset < 0:
            raise OSError(errno.EINVAL, f"position {base + offset} lies before the file", self.name)
        self._at = base + offset
        return self._at

    @override
    def read(self, size: int = -1, /) -> bytes:
        size = self.size - self._at if size is None or size < 0 else size
        # Each open file is a separate reader, so that several in one process are several streams.
        data = bytes(self._file.reader.read(self._at, max(0, size), process=id(self)))
        self._at += len(data)
        return data

    @override
    def readall(self) -> bytes:
        return self.read()

    @override
    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")
        data = self._file.reader.read(self._at, len(view), process=id(self))
        view[: len(data)] = data
        self._at += len(data)
        return len(data)

    @override
    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


class _WriteFile(io.RawIOBase):
    """A file that is written front to back, and shows when it is closed."""

    def __init__(
        self, files: StripedFiles, path: str, writer: FileWriter, base: Sequence[Segment] = ()
    ) -> None:
        self._files, self._writer = files, writer
        self._shown = ids_of(base)
        """Segments that the path probably shows, and that the written bytes build on."""
        self.name = path

    @override
    def writable(self) -> bool:
        return True

    @override
    def tell(self) -> int:
        return self._writer.size_bytes

    @override
    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        self._writer.write(view)
        return len(view)

    def commit(self) -> None:
        """Make all bytes so far durable and visible, and continue writing.

        Raises:
            OSError: ``ESTALE``: another process replaced the version that the writing builds on.
        """
        self._publish(self._writer.sync())

    def discard(self) -> None:
        """Give up the file; the former file stays at its path."""
        if not self.closed:
            self._writer.abandon()
            super().close()

    @override
    def close(self) -> None:
        if self.closed:
            return
        try:
            self._publish(self._writer.finish())
        finally:
            super().close()

    def _publish(self, content: Content) -> None:
        segments = ids_of(segments_of(content))

        def check() -> None:
            # Check as late as possible, as a mount does: a writer that replaces a file removes its objects.
            shared = segments & self._shown
            if shared and not names_segments(self._files, self.name, shared):
                raise OSError(errno.ESTALE, "another replaced what this builds on", self.name)

        self._files.publish(self.name, content, ready=check)
        self._shown = segments

    @override
    def __exit__(self, kind: object, *_: object) -> Literal[False] | None:  # type: ignore[override]
        if kind is not None:
            self.discard()
        else:
            self.close()
        return None

    @override
    def __del__(self) -> None:
        # Dropped without a close: the program failed, and half a file must not look complete.
        if not self.closed:
            self.discard()


def _appending(files: StripedFiles, path: str) -> tuple[FileWriter, Sequence[Segment]]:
    """Return a writer at the end of a file, and the segments that it builds on."""
    with files.open(path) as file:
        writer = files.writers.appending(path, file.manifest, file.reader)
        return writer, spliceable(file.manifest)


def _described(path: str, info: FileInfo) -> dict[str, Any]:
    return {
        "name": path,
        "size": info.size_bytes,
        "type": {"symlink": "link"}.get(info.kind, info.kind),
        "mtime": info.mtime_ns / 1e9,
        "mode": info.mode,
        "stored": info.stored,
    }


def _from_end(value: int | None, size: int, *, default: int) -> int:
    if value is None:
        return default
    return max(0, size + value) if value < 0 else value


def _joined(folder: str, target: str) -> str:
    """Resolve a link's target against its folder; it never leaves the root."""
    parts = [] if target.startswith("/") else folder.split("/") if folder else []
    for part in target.split("/"):
        if part == "..":
            parts = parts[:-1]
        elif part not in {"", "."}:
            parts.append(part)
    return "/".join(parts)


fsspec.register_implementation("omnifs", OmniFileSystem, clobber=True)
