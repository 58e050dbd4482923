"""Writing a file front to back: plain while it is small, striped from then on."""

import errno
from collections.abc import Iterable

from fusefs.format.content import Content, may_be_plain
from fusefs.format.layout import StripeLayout
from fusefs.format.manifest import Segment
from fusefs.format.manifest_header import MAX_MANIFEST_BYTES
from fusefs.write.segment_writer import SegmentWriter, WriteEngine

__all__ = ["FileWriter"]

MAX_SEGMENTS = 65536
"""Segments of a file while it is appended to; its manifest is then 2 MiB, written at every fsync."""
_SMALL_BYTES = 64 << 10
_MOST_UNITS = MAX_MANIFEST_BYTES // 8 - (1 << 20)
"""Of a file: their checksums, and its segments, must fit a manifest."""


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
        self._size_bytes = sum(segment.size_bytes for segment in base)
        self._tail_segment: Segment | None = None
        self._current: SegmentWriter | None = None
        self._sealing: tuple[SegmentWriter, Segment] | None = None
        """The segment that is being made durable, not sealed for certain yet."""
        self._tail_sealing: SegmentWriter | None = None
        self._held: list[bytearray] = []
        self._tail = bytearray()

    @property
    def size_bytes(self) -> int:
        """Bytes of the file so far; safe to ask while another thread makes them durable."""
        return self._size_bytes

    @property
    def _striped(self) -> bool:
        return bool(self._sealed) or self._current is not None or self._sealing is not None

    @property
    def is_small(self) -> bool:
        """Whether the file is plain so far, and of a few pages."""
        return not self._striped and self._size_bytes <= min(_SMALL_BYTES, self._plain_limit)

    def would_wait(self, size_bytes: int) -> bool:
        """Return whether writing ``size_bytes`` more may have to wait for the store."""
        if self._sealing is not None or self._tail_sealing is not None:
            return True
        unit = self._layout.unit_bytes
        if len(self._tail) + size_bytes < unit:
            return False
        return not self._engine.budget.has_room(size_bytes + unit + sum(map(len, self._held)))

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append ``data``, which is copied.

        Raises:
            OSError: ``EFBIG`` where its manifest would become too long.
            OmniloadError, OSError: An earlier write to the store failed.
        """
        self.settle()
        view = memoryview(data).cast("B")
        if (size_bytes := self._size_bytes + len(view)) > self._layout.unit_bytes * _MOST_UNITS:
            raise OSError(
                errno.EFBIG,
                f"{size_bytes} bytes are more than {_MOST_UNITS} units of "
                f"{self._layout.unit_bytes}; write larger units",
            )
        while view:
            room = self._layout.unit_bytes - len(self._tail)
            self._tail += view[:room]
            self._size_bytes += len(view[:room])
            view = view[room:]
            if len(self._tail) == self._layout.unit_bytes:
                self._held.append(self._tail)
                self._tail = bytearray()
            if self._striped or self._unpublished() > self._plain_limit:
                self._send_held()

    def sync(self) -> Content:
        """Make all bytes so far durable and return the content to publish; writing may go on."""
        return self._settled(self.seal(last=False))

    def finish(self) -> Content:
        """Make everything durable and return the content to publish; nothing more is written."""
        return self._settled(self.seal())

    def seal(self, *, last: bool = True) -> Content:
        """Begin to make everything durable; ``settle`` waits for it.

        Args:
            last: Whether nothing more is written. Else the unit that is not full becomes a
                segment of its own, and the next call replaces it: so a file synced after
                every line keeps few segments.

        Returns:
            The content to publish once ``settle`` has returned.
        """
        self.settle()
        if self._is_plain():
            return b"".join([*self._held, self._tail])
        self._send_held()
        self._tail_segment = None
        if self._tail and last:
            self._writer().append(self._tail)
            self._tail = bytearray()
        if self._current is not None:
            self._sealing = self._current, self._current.seal()
            self._current = None
        if self._tail:
            self._tail_sealing = self._alone(self._tail)
            self._tail_segment = self._tail_sealing.seal()
        return self._content()

    def settle(self) -> None:
        """Wait until what ``seal`` began is durable.

        Raises:
            OmniloadError, OSError: An object could not be written; whatever comes next raises it again.
        """
        if self._sealing is not None:
            writer, segment = self._sealing
            writer.settle()
            self._sealing = None
            self._sealed.append(segment)
            if len(self._sealed) >= MAX_SEGMENTS:
                raise OSError(
                    27, f"file has {len(self._sealed)} segments, limit {MAX_SEGMENTS}; copy it anew"
                )
        if self._tail_sealing is not None:
            writer, self._tail_sealing = self._tail_sealing, None
            writer.settle()

    def _settled(self, content: Content) -> Content:
        self.settle()
        return content

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
        for writer in (self._current, self._sealing and self._sealing[0], self._tail_sealing):
            if writer is not None:
                writer.abandon()
        self._current = self._sealing = self._tail_sealing = None
        self._held.clear()
        self._tail = bytearray()

    def _unpublished(self) -> int:
        return sum(map(len, self._held)) + len(self._tail)

    def _is_plain(self) -> bool:
        # A unit may be larger than the limit, and then nothing was sent yet.
        if self._striped or self._unpublished() > self._plain_limit:
            return False
        return may_be_plain([*self._held, self._tail])

    def _send_held(self) -> None:
        while self._held:
            self._writer().append(self._held.pop(0))

    def _writer(self) -> SegmentWriter:
        if self._current is None:
            self._current = SegmentWriter(self._engine, self._layout)
        return self._current

    def _alone(self, data: bytearray) -> SegmentWriter:
        alone = SegmentWriter(self._engine, StripeLayout(self._layout.unit_bytes, 1))
        alone.append(bytes(data))
        return alone

    def _content(self) -> Content:
        sealing = [self._sealing[1]] if self._sealing is not None else []
        tail = [self._tail_segment] if self._tail_segment is not None else []
        return (*self._sealed, *sealing, *tail)
