"""Stores built from a client's few calls: ``RenamingStore``, ``ReplacingStore`` and ``PuttingStore``.

A client library (pyarrow, fsspec) becomes a ``Backend``; which store stands on it
depends on how a file takes another's place: by a rename to a name that must be free (HDFS
through Java, sftp), by a rename that replaces in one go (HDFS itself), or by a put (S3, GCS, Azure).
"""

import uuid
from contextlib import suppress

import orjson
import xxhash
from typing_extensions import override

from fusefs.stores.clients import Backend, ReplacingBackend
from fusefs.stores.protocol import (
    RESERVED,
    TEMPORARY,
    Before,
    Entry,
    ObjectWriter,
    Preferred,
    Store,
    Usage,
    check_rename,
    check_whole,
    name_of,
    not_empty,
    parent_of,
)
from omniload.base.errors import IntegrityError, OmniloadError, UnavailableError

__all__ = ["PuttingStore", "RenamingStore", "ReplacingStore"]

INTENTS = f"{RESERVED}/intents"
_LONGEST_INTENT = 64 << 10
"""Two paths; more than any store takes."""
MiB = 1 << 20
# A request costs such a store some milliseconds (and money) whatever its length, and one
# object is read and uploaded in as many parts at once as several are.
_OF_OBJECT_STORES = Preferred(
    stripe_count=1, longest_read=16 * MiB, read_ahead=64 * MiB, read_block=4 * MiB
)
_MOST_PUT_BYTES = 4 * MiB
"""Clients send so much by one request, when a stream is closed."""


class _BackendStore(Store):
    """What both stores share; subclasses say how a file replaces another."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @property
    @override
    def location(self) -> str:
        return self._backend.location

    def _find(self, path: str) -> Entry | None:
        return self._backend.find(path)

    @override
    def stat(self, path: str) -> Entry:
        found = self._find(path)
        if found is None:
            above = parent_of(path)
            # The store's own directories are never files: whoever looks below them asks once.
            if above and not _is_own(path) and self._is_file(above):
                raise NotADirectoryError(20, "a parent is a file", path)
            raise FileNotFoundError(2, "nothing there", path)
        return found

    def _is_file(self, path: str) -> bool:
        found = self._find(path)
        return found is not None and not found.is_directory

    @override
    def listing(self, path: str) -> list[Entry]:
        # Asked for first: a listing that holds something says by itself that a directory is there.
        try:
            found = self._backend.listing(path)
        except FileNotFoundError:
            if _is_own(path):
                raise
            self._check_directory(path)
            return self._backend.listing(path)  # made, or put in its place, since
        except (OSError, UnavailableError):
            self._check_directory(path)
            raise
        if not found or _may_be_itself(found, path):
            self._check_directory(path)
        return found

    def _check_directory(self, path: str) -> None:
        if not self.stat(path).is_directory:
            raise NotADirectoryError(20, "not a directory", path)

    @override
    def read(self, path: str, offset: int, size_bytes: int) -> bytes:
        if size_bytes == 0:
            return b""
        try:
            return check_whole(
                self._backend.read(path, offset, size_bytes), path, offset, size_bytes
            )
        except (FileNotFoundError, UnavailableError, IntegrityError):
            # Clients call a directory not found, broken or empty; and a file that is being
            # replaced is not found until stat has finished the replacement.
            if self.stat(path).is_directory:
                raise IsADirectoryError(21, "is a directory", path) from None
        return check_whole(self._backend.read(path, offset, size_bytes), path, offset, size_bytes)

    @override
    def create(self, path: str) -> ObjectWriter:
        if self._backend.find(path) is not None:
            raise FileExistsError(17, "objects are written once", path)
        return self._backend.open_new(path)

    @override
    def remove(self, path: str) -> None:
        if self.stat(path).is_directory:
            raise IsADirectoryError(21, "is a directory", path)
        self._backend.remove(path)

    @override
    def make_directory(self, path: str) -> None:
        if self._find(path) is not None:
            raise FileExistsError(17, "something is there", path)
        self._backend.make_directory(path)

    @override
    def remove_directory(self, path: str) -> None:
        if self.listing(path):
            raise not_empty(path)
        self._backend.remove_directory(path)

    @override
    def usage(self) -> Usage | None:
        return None

    @override
    def close(self) -> None:
        self._backend.close()

    def _check_rename(self, source: str, target: str) -> Entry | None:
        """Apply the rules of rename; return what stands at the target."""
        if target.startswith(f"{source}/"):
            raise OSError(22, "a directory cannot go into itself", target)
        moved, there = self.stat(source), self._find(target)
        held = self._backend.listing(target) if there is not None and there.is_directory else []
        check_rename(moved, there, held, target)
        return there

    def _write(self, path: str, data: bytes) -> None:
        writer = self._backend.open_new(path)
        try:
            writer.write(data)
            writer.close()
        except BaseException:
            writer.abort()
            raise


class PuttingStore(_BackendStore):
    """Over an object store: a put is atomic; a rename is a copy, of a directory file by file."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self._root: Entry | None = None
        """What was found there, if it can never look otherwise."""

    @property
    @override
    def preferred(self) -> Preferred:
        return _OF_OBJECT_STORES

    @override
    def _find(self, path: str) -> Entry | None:
        if path:
            return self._backend.find(path)
        # A mount's kernel asks for the root each second. What a bucket says of it is always the
        # same where it bears no time; whether the bucket still answers, any other call tells.
        if (found := self._root) is None:
            found = self._backend.find(path)
            if found is not None and found.is_directory and not found.mtime_ns:
                self._root = found
        return found

    @override
    def _is_file(self, path: str) -> bool:
        return self._backend.is_file(path)

    @override
    def publish(self, path: str, data: bytes, before: Before | None = None) -> None:
        found = self._find(path)
        if found is not None and found.is_directory:
            raise IsADirectoryError(21, "a directory is there", path)
        if before is not None:
            before(found)
        self._write(path, data)

    @override
    def _write(self, path: str, data: bytes) -> None:
        if len(data) > _MOST_PUT_BYTES:
            self._put_apart(path, data)
            return
        writer = self._backend.open_new(path)
        writer.write(data)
        # Not given up where it fails: that removes what is at the path, which is still the file
        # this was to replace, or is this one, put though nobody heard of it.
        writer.close()

    def _put_apart(self, path: str, data: bytes) -> None:
        """Put what goes in parts elsewhere first: of an upload that broke, closing puts what it has."""
        temporary = f"{TEMPORARY}/{uuid.uuid4().hex}"
        super()._write(temporary, data)
        try:
            self._backend.move(temporary, path)
        except BaseException:
            with suppress(OSError, OmniloadError):
                self._backend.remove(temporary)
            raise

    @override
    def rename(self, source: str, target: str) -> None:
        if source == target:
            self.stat(source)
            return
        there = self._check_rename(source, target)
        if there is not None and there.is_directory:
            self._backend.remove_directory(target)
        self._move(source, target)

    def _move(self, source: str, target: str) -> None:
        if not self.stat(source).is_directory:
            self._backend.move(source, target)
            return
        self._backend.make_directory(target)
        for entry in self._backend.listing(source):
            self._move(f"{source}/{entry.name}", f"{target}/{entry.name}")
        self._backend.remove_directory(source)


class RenamingStore(_BackendStore):
    """Over a client whose rename does not replace in one go: an intent closes the gap.

    Before the target is removed, the intent to put the source there is written down.
    Whoever finds the target missing looks for its intent and finishes the rename, so
    that nobody sees the gap, and a crash inside it loses nothing.
    """

    @override
    def _find(self, path: str) -> Entry | None:
        if not path or path.startswith(RESERVED):
            return self._backend.find(path)
        # A glimpse is enough ahead of the intent, after which the store is asked for sure.
        if (seen := self._backend.glimpse(path)) is not None:
            return seen
        source = self._intended_source(path)
        found = self._backend.find(path)
        if found is None and source is not None:
            if self._backend.find(source) is not None:
                return self._finish(source, path)
            return self._backend.find(path)
        return found

    def _finish(self, source: str, path: str) -> Entry | None:
        try:
            self._backend.move(source, path)
        except (OSError, UnavailableError):
            # Another may have finished it first: then the source is gone and the target is there.
            found = self._backend.find(path)
            if found is None and self._backend.find(source) is not None:
                raise
            return found
        return self._backend.find(path)

    @override
    def publish(self, path: str, data: bytes, before: Before | None = None) -> None:
        temporary = f"{TEMPORARY}/{uuid.uuid4().hex}"
        self._write(temporary, data)
        try:
            there = self._find(path)
            if there is not None and there.is_directory:
                raise IsADirectoryError(21, "a directory is there", path)
            if there is None:
                self._make_parent(path)
            if before is not None:
                before(there)
            if there is not None:
                self._replace(temporary, path)
            else:
                self._place(temporary, path)
        except (OSError, OmniloadError):
            with suppress(OSError, OmniloadError):
                # An intent that names it makes it the only copy.
                if self._intended_source(path) != temporary:
                    self._backend.remove(temporary)
            raise

    @override
    def rename(self, source: str, target: str) -> None:
        if source == target:
            self.stat(source)
            return
        there = self._check_rename(source, target)
        if there is not None and there.is_directory:
            self._backend.remove_directory(target)
        elif there is not None:
            self._replace(source, target)
            return
        self._make_parent(target)
        self._place(source, target)

    @override
    def remove(self, path: str) -> None:
        # Else the intent of a writer that died would bring the file back later.
        self._forget_intent(path)
        super().remove(path)

    def _make_parent(self, path: str) -> None:
        # Asked for, not found out by moving: WebHDFS says nothing of a move that failed.
        if (above := parent_of(path)) and self._backend.find(above) is None:
            self._backend.make_directory(above)

    def _place(self, source: str, target: str) -> None:
        """Move to a name at which nothing stood a moment ago."""
        self._backend.move(source, target)

    def _replace(self, source: str, target: str) -> None:
        record = orjson.dumps({"version": 1, "source": source, "target": target})
        intent = _intent_path(target)
        self._forget_intent(target)
        self._write(intent, record)
        try:
            self._backend.remove(target)
        except (OSError, UnavailableError):
            # Another writer is at it, or has removed it since.
            if self._backend.find(target) is not None:
                raise
        try:
            self._backend.move(source, target)
        except (OSError, UnavailableError):
            finished = self._backend.find(source) is None and self._backend.find(target) is not None
            if not finished:
                raise
        self._forget_intent(target)

    def _intended_source(self, path: str) -> str | None:
        intent = _intent_path(path)
        # Asked for first: libhdfs prints a page of Java's stack for each file that it cannot open.
        if not self._backend.is_file(intent):
            return None
        try:
            record = orjson.loads(self._backend.read(intent, 0, _LONGEST_INTENT))
        except (FileNotFoundError, orjson.JSONDecodeError):
            # Gone since, or half written by a writer that has not removed the target yet.
            return None
        source = record.get("source")
        mine = record.get("version") == 1 and record.get("target") == path
        return source if mine and isinstance(source, str) else None

    def _forget_intent(self, path: str) -> None:
        if self._backend.is_file(_intent_path(path)):
            with suppress(FileNotFoundError):
                self._backend.remove(_intent_path(path))


class ReplacingStore(RenamingStore):
    """Over a client whose rename replaces in one go: it leaves no intents, but finishes those of others."""

    def __init__(self, backend: ReplacingBackend) -> None:
        super().__init__(backend)
        self._replacing = backend

    @override
    def _place(self, source: str, target: str) -> None:
        # Another may have come first: the last to come is the one that stays, as everywhere.
        self._replacing.replace(source, target)

    @override
    def _replace(self, source: str, target: str) -> None:
        # Else it would be finished later, and bring back what its writer wrote.
        self._forget_intent(target)
        self._replacing.replace(source, target)


def _is_own(path: str) -> bool:
    return path == RESERVED or path.startswith(f"{RESERVED}/")


def _may_be_itself(found: list[Entry], path: str) -> bool:
    """Tell whether a listing can be that of a file, which some clients list as its only content."""
    alone = len(found) == 1 and not found[0].is_directory
    return alone and (not path or found[0].name == name_of(path))


def _intent_path(target: str) -> str:
    digest = xxhash.xxh3_128_hexdigest(target.encode("utf-8", "surrogateescape"))
    return f"{INTENTS}/{digest}"
