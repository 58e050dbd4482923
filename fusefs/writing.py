"""Writing a file front to back: plain while it is small, striped from then on."""

from collections.abc import Iterable

from fusefs.layout import StripeLayout
from fusefs.manifest import MAGIC, TAIL, Segment, has_manifest_size
from fusefs.segment_writer import SegmentWriter, WriteEngine

__all__ = ["Content", "FileWriter", "may_be_plain"]

Content = bytes | tuple[Segment, ...]
"""Durable content of a file that is not published yet: its bytes, or its segments in order."""

MAX_SEGMENTS = 65536
"""Segments of a file while it is appended to; its manifest is then 2 MiB, written at every fsync."""


class FileWriter:
    """Takes a file's bytes in order. Used by one thread at a time.

    Memory: one unit that is not full, units held back while the file may stay plain
    (``plain_limit``), and what the engine's budget allows for all writers together.

    Args:
        engine: Shared by all writers.
        layout: Of segments written from now on.
        plain_limit: Most bytes of a file that stays plain.
        base: Segments the file has already, to append to.
    """

    def __init__(
        self,
        engine: WriteEngine,
        layout: StripeLayout,
        *,
        plain_limit: int,
        base: tuple[Segment, ...] = (),
    ) -> None:
        self._engine = engine
        self._layout = layout
        self._plain_limit = plain_limit
        self._sealed = list(base)
        self._tail_segment: Segment | None = None
        self._current: SegmentWriter | None = None
        self._held: list[bytearray] = []
        self._tail = bytearray()

    @property
    def size_bytes(self) -> int:
        """Bytes of the file so far."""
        current = self._current.size_bytes if self._current is not None else 0
        sealed = sum(segment.size_bytes for segment in self._sealed)
        return sealed + current + sum(map(len, self._held)) + len(self._tail)

    @property
    def _striped(self) -> bool:
        return bool(self._sealed) or self._current is not None

    def would_wait(self, size_bytes: int) -> bool:
        """Tell whether writing ``size_bytes`` more may have to wait for the store."""
        unit = self._layout.unit_bytes
        if len(self._tail) + size_bytes < unit:
            return False
        return not self._engine.budget.has_room(size_bytes + unit + sum(map(len, self._held)))

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append ``data``, which is copied.

        Raises:
            OmniloadError, OSError: An earlier write to the store failed.
        """
        view = memoryview(data).cast("B")
        while view:
            room = self._layout.unit_bytes - len(self._tail)
            self._tail += view[:room]
            view = view[room:]
            if len(self._tail) == self._layout.unit_bytes:
                self._held.append(self._tail)
                self._tail = bytearray()
            if self._striped or self._unpublished() > self._plain_limit:
                self._send_held()

    def sync(self) -> Content:
        """Make all bytes so far durable and return the content to publish; writing may go on.

        The unit that is not full becomes a segment of its own, and the next ``sync`` or
        ``finish`` replaces it: so a file synced after every line keeps few segments.
        """
        if self._is_plain():
            return b"".join([*self._held, self._tail])
        self._send_held()
        self._seal_current()
        self._tail_segment = self._written_alone(self._tail) if self._tail else None
        return self._content()

    def finish(self) -> Content:
        """Make everything durable and return the content to publish; nothing more is written."""
        if self._is_plain():
            return b"".join([*self._held, self._tail])
        self._send_held()
        self._tail_segment = None
        if self._tail:
            self._writer().append(self._tail)
            self._tail = bytearray()
        self._seal_current()
        return self._content()

    def write_apart(self, parts: Iterable[bytes], *, unit_bytes: int, size_bytes: int) -> Segment:
        """Write bytes as a durable segment that is not part of this file's order: a patch.

        Args:
            parts: The bytes.
            unit_bytes: Of the segment; small where a file will show it in small ranges.
            size_bytes: Bytes of all parts; more than one full unit of the file is striped.
        """
        count = 1 if size_bytes <= self._layout.unit_bytes else self._layout.stripe_count
        apart = SegmentWriter(self._engine, StripeLayout(unit_bytes, count))
        try:
            unit = bytearray()
            for part in parts:
                view = memoryview(part)
                while view:
                    room = unit_bytes - len(unit)
                    unit += view[:room]
                    view = view[room:]
                    if len(unit) == unit_bytes:
                        apart.append(unit)
                        unit = bytearray()
            if unit:
                apart.append(unit)
        except BaseException:
            apart.abandon()
            raise
        return apart.finish()

    def abandon(self) -> None:
        """Give up what was not sealed. Never raises."""
        if self._current is not None:
            self._current.abandon()
            self._current = None
        self._held.clear()
        self._tail = bytearray()

    def _unpublished(self) -> int:
        return sum(map(len, self._held)) + len(self._tail)

    def _is_plain(self) -> bool:
        if self._striped:
            return False
        return may_be_plain([*self._held, self._tail])

    def _send_held(self) -> None:
        while self._held:
            self._writer().append(self._held.pop(0))

    def _writer(self) -> SegmentWriter:
        if self._current is None:
            self._current = SegmentWriter(self._engine, self._layout)
        return self._current

    def _seal_current(self) -> None:
        if self._current is None:
            return
        # Left in place when it fails: the error is raised again by whatever comes next.
        segment = self._current.finish()
        self._current = None
        self._sealed.append(segment)
        if len(self._sealed) >= MAX_SEGMENTS:
            raise OSError(
                27, f"file has {len(self._sealed)} segments, limit {MAX_SEGMENTS}; copy it anew"
            )

    def _written_alone(self, data: bytearray) -> Segment:
        alone = SegmentWriter(self._engine, StripeLayout(self._layout.unit_bytes, 1))
        alone.append(bytes(data))
        return alone.finish()

    def _content(self) -> Content:
        tail = [self._tail_segment] if self._tail_segment is not None else []
        return (*self._sealed, *tail)


def may_be_plain(parts: list[bytearray]) -> bool:
    """Tell whether bytes can stand as a plain file without being taken for a manifest."""
    size = sum(map(len, parts))
    # No part but the last is short, so that magic cannot lie across parts of a tiny unit.
    joined = parts if size > 1 << 16 else [bytearray().join(parts)]
    if joined[0].startswith(MAGIC):
        return False
    return not (has_manifest_size(size) and bytearray().join(joined[-2:]).endswith(TAIL))
