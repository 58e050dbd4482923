"""Bounded retries of the calls of a store that may be repeated, and a count of all calls."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from typing_extensions import override

from fusefs.stores.deadlines import GIVE_UP_AFTER_S, left_s, waiting_for_others, within
from fusefs.stores.protocol import (
    Abandoned,
    Before,
    Entry,
    ObjectWriter,
    Preferred,
    RenameBegunError,
    Store,
    Usage,
)
from omniload.base.errors import OmniloadError, UnavailableError
from omniload.base.retry import backoff_s, with_retries

__all__ = ["RetryingStore"]

Result = TypeVar("Result")

DEFAULT_WAITS_S = tuple(backoff_s(first_s=0.1, attempts=5))


class _RefusedError(OmniloadError):
    """Carries an outage of another call past the retries of the current one."""

    def __init__(self, reason: UnavailableError) -> None:
        super().__init__(str(reason))
        self.reason = reason


class _PatientWriter(ObjectWriter):
    """A stream whose every call has the time limit of a store call."""

    def __init__(self, stream: ObjectWriter, give_up_after_s: float) -> None:
        self._stream, self._give_up_after_s = stream, give_up_after_s

    @override
    def write(self, data: bytes | bytearray | memoryview) -> None:
        with within(self._give_up_after_s):
            self._stream.write(data)

    @override
    def close(self) -> None:
        with within(self._give_up_after_s):
            self._stream.close()

    @override
    def abort(self) -> None:
        with within(self._give_up_after_s):
            self._stream.abort()


class RetryingStore(Store):
    """A store that repeats the calls of another store while that one is unavailable.

    Reads, listings, publishing and removing may be repeated. The stream of an object may
    not, because its written bytes are no longer kept. After a failed rename, the
    outcome is checked before the next attempt, because the first may have succeeded.

    Args:
        store: The other store.
        waits_s: Waits between attempts, as far as the limit allows them.
        give_up_after_s: Limit of every call, including all attempts and waits.
        sleep: Waits a number of seconds.
    """

    def __init__(
        self,
        store: Store,
        *,
        waits_s: Sequence[float] = DEFAULT_WAITS_S,
        give_up_after_s: float = GIVE_UP_AFTER_S,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store = store
        self._waits_s = tuple(waits_s)
        self._give_up_after_s = give_up_after_s
        self._sleep = sleep
        self._lock = threading.Lock()
        self.calls: Counter[str] = Counter()
        """Calls by name, retries included."""
        self._retries = 0

    @property
    @override
    def location(self) -> str:
        return self._store.location

    @property
    @override
    def preferred(self) -> Preferred:
        return self._store.preferred

    @property
    @override
    def abandoned(self) -> Abandoned:
        return self._store.abandoned

    @override
    def stat(self, path: str) -> Entry:
        return self._patiently("stat", lambda: self._store.stat(path))

    @override
    def listing(self, path: str) -> list[Entry]:
        return self._patiently("listing", lambda: self._store.listing(path))

    @override
    def read(self, path: str, offset: int, size_bytes: int) -> bytes:
        return self._patiently("read", lambda: self._store.read(path, offset, size_bytes))

    @override
    def read_large(self, path: str, offset: int, size_bytes: int) -> bytes | memoryview:
        return self._patiently("read", lambda: self._store.read_large(path, offset, size_bytes))

    @override
    def create(self, path: str) -> ObjectWriter:
        # Only the creation is repeated: nobody keeps the bytes that were written.
        stream = self._patiently("create", lambda: self._store.create(path))
        return _PatientWriter(stream, self._give_up_after_s)

    @override
    def publish(
        self, path: str, data: bytes, before: Before | None = None, mode: int | None = None
    ) -> Entry | None:
        if before is None:
            return self._patiently("publish", lambda: self._store.publish(path, data, None, mode))

        def guarded(there: Entry | None) -> None:
            # The existing file is checked first, with a time limit of its own; skip that if no time is left.
            left = left_s()
            if there is not None and left is not None and left <= 0:
                raise _RefusedError(
                    UnavailableError(f"{path!r}: no time is left to look at what it replaces")
                )
            # The work that the caller waits for has its own retries: here, too, it fails at the first error.
            try:
                with waiting_for_others():
                    before(there)
            except UnavailableError as error:
                raise _RefusedError(error) from error

        try:
            return self._patiently(
                "publish", lambda: self._store.publish(path, data, guarded, mode)
            )
        except _RefusedError as refused:
            # Raise the outage itself, because the caller's table of errors does not know this class.
            raise refused.reason from None

    @override
    def rename(self, source: str, target: str) -> None:
        with within(self._give_up_after_s):
            self._rename(source, target)

    def _rename(self, source: str, target: str) -> None:
        # Look before the first attempt: only the former state shows whether that attempt succeeded.
        before = self._store_identity(source)
        rename = self._store.rename

        def attempt() -> None:
            nonlocal rename
            try:
                rename(source, target)
            except RenameBegunError:
                rename = self._store.go_on_renaming
                raise
            except FileNotFoundError:
                if self._store_identity(target) != before:
                    raise

        # Make the first attempt separately: only after an outage does "not found" suggest that it succeeded.
        try:
            self._count("rename")
            rename(source, target)
        except UnavailableError as error:
            if isinstance(error, RenameBegunError):
                rename = self._store.go_on_renaming
            self._patiently("rename", attempt)

    @override
    def remove(self, path: str) -> None:
        self._repeatable_removal("remove", path, self._store.remove)

    @override
    def make_directory(self, path: str) -> None:
        self._patiently("make_directory", lambda: self._store.make_directory(path))

    @override
    def remove_directory(self, path: str) -> None:
        self._repeatable_removal("remove_directory", path, self._store.remove_directory)

    @property
    @override
    def answers_at_once(self) -> bool:
        return self._store.answers_at_once

    @property
    @override
    def keeps_modes(self) -> bool:
        return self._store.keeps_modes

    @override
    def set_mode(self, path: str, mode: int | None) -> None:
        self._patiently("set_mode", lambda: self._store.set_mode(path, mode))

    @override
    def delay_syncs(self) -> None:
        self._store.delay_syncs()

    @override
    def sync(self, path: str = "") -> None:
        # Only once, because after a failed write a kernel forgets the data, and reports success the next time.
        self._store.sync(path)

    @override
    def usage(self) -> Usage | None:
        return self._patiently("usage", self._store.usage)

    @override
    def close(self) -> None:
        with within(self._give_up_after_s):
            self._store.close()

    def _store_identity(self, path: str) -> tuple[bool, int, int]:
        entry = self._patiently("stat", lambda: self._store.stat(path))
        # Leave out the name, because source and target are compared.
        return entry.is_directory, entry.size_bytes, entry.mtime_ns

    def _repeatable_removal(self, name: str, path: str, remove: Callable[[str], None]) -> None:
        with within(self._give_up_after_s):
            self._remove_patiently(name, path, remove)

    def _remove_patiently(self, name: str, path: str, remove: Callable[[str], None]) -> None:
        try:
            self._count(name)
            remove(path)
        except UnavailableError:

            def again() -> None:
                try:
                    remove(path)
                except FileNotFoundError:
                    return  # an attempt without an answer did succeed

            self._patiently(name, again)

    def _patiently(self, name: str, attempt: Callable[[], Result]) -> Result:
        def counted() -> Result:
            self._count(name)
            return attempt()

        with within(self._give_up_after_s) as deadline:
            return with_retries(
                *(counted, self._waits_s, partial(deadline.wait, self._sleep)),
                *(self._count_retry, deadline.left_s),
            )

    def counts(self) -> tuple[dict[str, int], int]:
        """Return the calls so far by name, and the number of repeated calls."""
        with self._lock:
            return dict(self.calls), self._retries

    def _count_retry(self, _error: UnavailableError, _wait_s: float) -> None:
        with self._lock:
            self._retries += 1

    def _count(self, name: str) -> None:
        with self._lock:
            self.calls[name] += 1
