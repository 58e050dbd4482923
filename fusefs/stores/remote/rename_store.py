"""Stores in which a rename replaces a file: in several steps, for which the name must be free, or atomically."""

import errno
import uuid
from contextlib import suppress

from typing_extensions import override

from fusefs.stores.protocol import (
    RESERVED,
    TEMPORARY,
    Before,
    Entry,
    is_at_or_below,
    parent_of,
)
from fusefs.stores.remote.backend import BackendStore
from fusefs.stores.remote.bounded_client import BoundedReplacingNames
from fusefs.stores.remote.client import Backend, FileClient, NameClient, ReplacingBackend
from fusefs.stores.remote.rename_intents import (
    MAX_INTENT_BYTES,
    Intent,
    decode_intent,
    encode_intent,
    intent_path,
)
from omniload.base.errors import IntegrityError, OmniloadError, UnavailableError
from omniload.base.log import get_logger
from omniload.base.lru import Lru

__all__ = ["RenamingStore", "ReplacingStore"]

_LOG = get_logger(__name__)
_MOST_DISTRUSTED = 1000


class RenamingStore(BackendStore):
    """A store on a client whose rename does not replace atomically: an intent closes the gap.

    Before the target is removed, the intent to rename the source to it is written down.
    Any caller that finds the target missing looks for its intent and finishes the rename. So
    nobody sees the gap, and a crash inside it loses nothing.
    """

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self._intents = _Intents(self._files, self._names)

    @override
    def _find(self, path: str) -> Entry | None:
        # Do not compare the first letters only: ".omnifs-notes" is a user's file, and replaced as any other.
        if not path or is_at_or_below(path, RESERVED):
            return self._files.find(path)
        # A glimpse suffices here: if it finds nothing, the store is asked reliably after the intent.
        if (seen := self._files.glimpse(path)) is not None:
            return seen
        source = self._intents.source_of(path)
        found = self._files.find(path)
        if found is None and source is not None:
            if self._files.find(source) is not None:
                return self._finish(source, path)
            return self._files.find(path)
        return found

    def _finish(self, source: str, path: str) -> Entry | None:
        try:
            self._names.move(source, path)
        except (OSError, UnavailableError):
            # Another caller may have finished it first: then the source is gone and the target is there.
            found = self._files.find(path)
            if found is None and self._files.find(source) is not None:
                raise
            return found
        return self._files.find(path)

    @override
    def publish(
        self, path: str, data: bytes, before: Before | None = None, mode: int | None = None
    ) -> Entry | None:
        temporary = f"{TEMPORARY}/{uuid.uuid4().hex}"
        self._write(temporary, data)
        try:
            there = self._find(path)
            if there is not None and there.is_directory:
                raise IsADirectoryError(errno.EISDIR, "a directory is there", path)
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
                # If an intent names the file, it is the only copy.
                if self._intents.source_of(path) != temporary:
                    self._names.remove(temporary)
            raise
        return None

    @override
    def _take_place(self, source: str, target: str, there: Entry | None) -> None:
        if there is not None:
            self._replace(source, target)
        else:
            self._make_parent(target)
            self._place(source, target)

    @override
    def remove(self, path: str) -> None:
        # Otherwise the intent of a dead writer would bring the file back later.
        self._intents.forget(path)
        super().remove(path)

    def _make_parent(self, path: str) -> None:
        # Look it up, because WebHDFS does not report a failed move.
        if (above := parent_of(path)) and self._files.find(above) is None:
            self._names.make_directory(above)

    def _place(self, source: str, target: str) -> None:
        """Move to a name that was free a moment ago."""
        self._names.move(source, target)

    def _replace(self, source: str, target: str) -> None:
        self._intents.forget(target)
        # The intent is complete before the target is removed, because a half-written one does not count.
        self._write(intent_path(target), encode_intent(Intent(source, target)))
        try:
            self._names.remove(target)
        except (OSError, UnavailableError):
            # Another writer is replacing the file, or has removed it since.
            if self._files.find(target) is not None:
                raise
        try:
            self._names.move(source, target)
        except (OSError, UnavailableError):
            finished = self._files.find(source) is None and self._files.find(target) is not None
            if not finished:
                raise
        self._intents.forget(target)


class _Intents:
    """The intents of one store to replace files. Safe in threads."""

    def __init__(self, files: FileClient, names: NameClient) -> None:
        self._files = files
        self._names = names
        self._distrusted: Lru[str, None] = Lru(_MOST_DISTRUSTED)
        """Paths that were logged because they hold no valid intents."""

    def source_of(self, path: str) -> str | None:
        """Return the path of the file that is to replace a path; None if there is no intent."""
        where = intent_path(path)
        # Check first, because libhdfs prints a page of Java's stack for each file that it cannot open.
        if not self._files.is_file(where):
            return None
        try:
            return decode_intent(self._files.read(where, 0, MAX_INTENT_BYTES), path=where).source
        except FileNotFoundError:
            return None  # removed in between
        except IntegrityError as error:
            # It is forged, or half written by a writer that has not removed the target yet.
            if where not in self._distrusted:
                self._distrusted.put(where, None)
                _LOG.warning("%s; it promises nothing", error)
            return None

    def forget(self, path: str) -> None:
        """Remove the intent to replace the file at a path, if there is one."""
        if self._files.is_file(intent_path(path)):
            with suppress(FileNotFoundError):
                self._names.remove(intent_path(path))


class ReplacingStore(RenamingStore):
    """A store on a client whose rename replaces atomically: it writes no intents, but finishes those of others."""

    def __init__(self, backend: ReplacingBackend) -> None:
        super().__init__(backend)
        self._replacing = BoundedReplacingNames(backend, self._files.callers)

    @override
    def _place(self, source: str, target: str) -> None:
        # Another writer may have come first; as everywhere, the last one wins.
        self._replacing.replace(source, target)

    @override
    def _replace(self, source: str, target: str) -> None:
        # Otherwise the intent would be finished later, and bring back its writer's file.
        self._intents.forget(target)
        self._replacing.replace(source, target)
