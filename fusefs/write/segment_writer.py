"""Writing one segment: bytes are cut into units, units are dealt to objects, and each object is a stream."""

import uuid
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from fusefs.base.serial_executor import ByteBudget, SerialExecutor
from fusefs.base.thread_pools import StorePool
from fusefs.format.layout import StripeLayout
from fusefs.format.manifest import Segment, object_path, unit_checksum
from fusefs.stores.protocol import ObjectWriter, Store
from omniload.base.errors import OmniloadError

__all__ = ["SegmentWriter", "UnitBuffer", "WriteEngine", "written_segment"]


@dataclass(frozen=True, slots=True)
class WriteEngine:
    """The pools, budgets and counters that all writers of a process share."""

    store: Store
    pool: StorePool
    budget: ByteBudget
    """Budget of full units on their way to the store."""


class UnitBuffer:
    """Bytes in order, cut into units: no I/O. It holds each unit until the unit is popped from ``full``."""

    def __init__(self, unit_bytes: int) -> None:
        self._unit_bytes = unit_bytes
        self.full: list[bytearray] = []
        """Whole units, the first one first."""
        self.tail = bytearray()
        """Unit that is not full."""

    @property
    def size_bytes(self) -> int:
        """Bytes in the buffer."""
        return len(self.full) * self._unit_bytes + len(self.tail)

    def take(self, data: memoryview) -> memoryview:
        """Copy bytes up to the end of a unit; return the rest."""
        room = self._unit_bytes - len(self.tail)
        self.tail += data[:room]
        if len(self.tail) == self._unit_bytes:
            self.full.append(self.tail)
            self.tail = bytearray()
        return data[room:]

    def clear(self) -> None:
        """Drop all bytes."""
        self.full.clear()
        self.tail = bytearray()


class SegmentWriter:
    """Takes the units of a segment in order. Used by one thread at a time.

    The next call raises the error of a failed write. Nothing is published then, so the
    written bytes are an orphan and never part of a file.
    """

    def __init__(self, engine: WriteEngine, layout: StripeLayout) -> None:
        self._engine = engine
        self._layout = layout
        self._id = uuid.uuid4().hex
        self._streams: list[_ObjectStream] = []
        self._sums: list[int] = []
        self._size_bytes = 0

    @property
    def size_bytes(self) -> int:
        """Bytes taken so far."""
        return self._size_bytes

    def append(self, unit: bytes | bytearray | memoryview) -> None:
        """Take the next unit; the caller must not change it afterwards.

        Waits while the window of bytes in flight is full.

        Raises:
            OmniloadError, OSError: An earlier write of the segment failed.
            StateError, RuntimeError: There is no thread to write it; the segment has failed.
        """
        number = len(self._sums)
        self._raise_error()
        # Each object begins with its first unit, so that a short segment has no empty objects.
        if number < self._layout.stripe_count:
            path = object_path(self._id, number)
            self._streams.append(_ObjectStream(self._engine, path))
        # A forked process never gets back the window that the parent's threads have in use.
        self._engine.pool.check_process()
        # Before the unit is queued, so that no queue is longer than the window.
        self._engine.budget.acquire(len(unit))
        self._sums.append(unit_checksum(unit))
        self._size_bytes += len(unit)
        self._streams[number % self._layout.stripe_count].append(unit)

    def finish(self) -> Segment:
        """Return the segment when all its objects are complete and durable.

        Raises:
            OmniloadError, OSError: Same as for ``settle``.
        """
        segment = self.seal()
        self.settle()
        return segment

    def seal(self) -> Segment:
        """Begin to make all objects complete and durable; this ends the appending.

        Returns:
            The segment, which is valid once ``settle`` has returned.
        """
        for stream in self._streams:
            stream.close()
        return Segment(
            segment_id=self._id,
            layout=self._layout,
            size_bytes=self._size_bytes,
            checksums_U=np.array(self._sums, np.uint64),
        )

    def settle(self) -> None:
        """Wait until the work that ``seal`` began is done.

        Raises:
            OmniloadError, OSError: An object could not be written; the segment is abandoned.
        """
        for stream in self._streams:
            stream.join()
        try:
            self._raise_error()
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Remove the written objects. Never raises: objects that cannot be removed are orphans for fsck."""
        for stream in self._streams:
            stream.abandon()
        for stream in self._streams:
            stream.join()

    def _raise_error(self) -> None:
        for stream in self._streams:
            if stream.error is not None:
                raise stream.error


def written_segment(
    engine: WriteEngine, layout: StripeLayout, parts: Iterable[bytes | memoryview]
) -> Segment:
    """Write bytes as a segment, and return it when it is durable.

    Raises:
        OmniloadError, OSError: Same as for ``SegmentWriter.settle``, or an error of ``parts``; then nothing remains.
    """
    writer, units = SegmentWriter(engine, layout), UnitBuffer(layout.unit_bytes)
    try:
        for part in parts:
            view = memoryview(part)
            while view:
                view = units.take(view)
                while units.full:
                    writer.append(units.full.pop(0))
        if units.tail:
            writer.append(units.tail)
    except BaseException:
        writer.abandon()
        raise
    return writer.finish()


class _ObjectStream:
    """One object, written in order by pool threads."""

    def __init__(self, engine: WriteEngine, path: str) -> None:
        self._engine = engine
        self._path = path
        self._executor = SerialExecutor(engine.pool)
        self._writer: ObjectWriter | None = None
        self._closed = False
        self.error: Exception | None = None

    def append(self, unit: bytes | bytearray | memoryview) -> None:
        def write() -> None:
            try:
                if self.error is None:
                    if self._writer is None:
                        self._writer = self._engine.store.create(self._path)
                    self._writer.write(unit)
            # Catch every error of a client, even a lack of memory or threads: without a note here the write would
            # count.
            except Exception as error:  # noqa: BLE001 -- raised by the next call
                self.error = error
            finally:
                # Release the room even after an error, because writers of other files wait for it.
                self._engine.budget.release(len(unit))

        try:
            self._executor.submit(write)
        except (OmniloadError, RuntimeError) as error:
            # Without this unit, the following ones would be at the wrong place.
            self.error = error
            self._engine.budget.release(len(unit))
            raise

    def close(self) -> None:
        def close() -> None:
            try:
                if self.error is None and self._writer is not None and not self._closed:
                    self._writer.close()
                    self._closed = True
            except Exception as error:  # noqa: BLE001 -- as above
                self.error = error

        self._executor.submit(close)

    def abandon(self) -> None:
        def abandon() -> None:
            # A complete object is removed; the stream of an incomplete one is aborted.
            if self._closed:
                try:
                    self._engine.store.remove(self._path)
                except (OSError, OmniloadError) as error:
                    self.error = error
            elif self._writer is not None:
                # Only once: each settle of a failed file comes here, and the stream's number may later belong to
                # another file.
                given_up, self._writer = self._writer, None
                given_up.abort()

        # If no thread is left, in a process that was forked or is ending, the object stays as an orphan.
        with suppress(OmniloadError, RuntimeError):
            self._executor.submit(abandon)

    def join(self) -> None:
        self._executor.join()
