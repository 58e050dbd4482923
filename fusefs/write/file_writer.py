"""Writing a file front to back: the file is plain while it is small, and striped from then on."""

import errno
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fusefs.format.content import Content, may_be_plain
from fusefs.format.layout import StripeLayout
from fusefs.format.manifest import Manifest, Segment
from fusefs.format.manifest_header import MAX_MANIFEST_BYTES
from fusefs.read.file_reader import FileReader
from fusefs.write.segment_writer import SegmentWriter, UnitBuffer, WriteEngine, written_segment

__all__ = ["FileWriter", "Writers"]

MAX_SEGMENTS = 65536
"""Most segments of a file while it is appended to; its manifest is then 2 MiB, written at every fsync."""
# Size that a mount's loop may publish itself: a larger one would delay other requests (docs/design/fusefs/0011).
_SMALL_BYTES = 64 << 10
_MOST_UNITS = MAX_MANIFEST_BYTES // 8 - (1 << 20)
"""Most units of a file: their checksums, and the segments, must fit a manifest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Writers:
    """Makes writers, each with the striping of a path; the store shows nothing of them until it is published."""

    engine: WriteEngine
    layout_of: Callable[[str], StripeLayout]
    """Returns the striping of a path, or raises for a path that no file may have."""
    plain_limit: int
    """Most bytes of a file that stays plain."""
    copy_bytes: int
    """Bytes that are read at a time when a file is rewritten."""

    def file(self, path: str, base: tuple[Segment, ...] = ()) -> "FileWriter":
        """Return a writer of a file; ``base`` are segments to append to."""
        layout = self.layout_of(path)
        return FileWriter(self.engine, layout, plain_limit=self.plain_limit, base=base)

    def segment(self, path: str) -> SegmentWriter:
        """Return a writer of whole units that are not copied."""
        return SegmentWriter(self.engine, self.layout_of(path))

    def appending(self, path: str, manifest: Manifest | None, reader: FileReader) -> "FileWriter":
        """Return a writer at the end of a file: whole segments stay, no data is copied.

        A short segment at the end is continued, so that many small appends do not
        leave many segments; a plain file is read once and rewritten when it is published.

        Args:
            path: Decides the striping.
            manifest: Manifest of the file; None for a plain file.
            reader: Reader of the file.
        """
        base = manifest.segments if manifest is not None else ()
        if base and base[-1].size_bytes < base[-1].layout.unit_bytes:
            base = base[:-1]
        return self.copying(path, reader, base)

    def copying(
        self, path: str, reader: FileReader, base: tuple[Segment, ...] = ()
    ) -> "FileWriter":
        """Return a writer that has received the bytes of another file, except those that ``base`` holds."""
        writer = self.file(path, base)
        while (at := writer.size_bytes) < reader.size_bytes:
            # Read it in pieces, because the file may be larger than memory.
            writer.write(reader.read(at, self.copy_bytes))
        return writer

    def patch(
        self, path: str, parts: Iterable[bytes], *, unit_bytes: int, size_bytes: int
    ) -> Segment:
        """Write bytes as a durable segment that is not part of a file's order.

        Args:
            path: Decides the striping.
            parts: The bytes.
            unit_bytes: Unit of the segment; small if a file will show it in small ranges.
            size_bytes: Bytes of all parts; more than one full unit of the file is striped.
        """
        layout = self.layout_of(path)
        # Several objects for less than a unit would cost every reader several opens.
        count = 1 if size_bytes <= layout.unit_bytes else layout.stripe_count
        return written_segment(self.engine, StripeLayout(unit_bytes, count), parts)


class FileWriter:
    """Takes a file's bytes in order. Used by one thread at a time.

    Memory: one unit that is not full, units held back while the file may stay plain
    (``plain_limit``), and the share of the engine's budget, which limits all writers together.

    Args:
        engine: Engine that all writers share.
        layout: Layout of segments that are written from now on.
        plain_limit: Most bytes of a file that stays plain.
        base: Present segments of the file, to append to.
    """

    def __init__(
        self,
        engine: WriteEngine,
        layout: StripeLayout,
        *,
        plain_limit: int,
        base: tuple[Segment, ...] = (),
    ) -> None:
        self._budget = engine.budget
        self._unit_bytes = layout.unit_bytes
        self._plain_limit = plain_limit
        self._segments = _Segments(engine, layout, base)
        self._held = UnitBuffer(layout.unit_bytes)
        self._size_bytes = sum(segment.size_bytes for segment in base)

    @property
    def size_bytes(self) -> int:
        """Bytes of the file so far; may be read while another thread makes them durable."""
        return self._size_bytes

    @property
    def is_small(self) -> bool:
        """Whether the file is plain so far, and has only a few pages."""
        small = min(_SMALL_BYTES, self._plain_limit)
        return not self._segments.are_begun and self._size_bytes <= small

    def would_wait(self, size_bytes: int) -> bool:
        """Return whether writing ``size_bytes`` more may have to wait for the store."""
        if not self._segments.are_settled:
            return True
        if len(self._held.tail) + size_bytes < self._unit_bytes:
            return False
        # Units are held back while the file may stay plain, and sent together when it no longer may.
        full_bytes = self._held.size_bytes - len(self._held.tail)
        return not self._budget.has_room(size_bytes + self._unit_bytes + full_bytes)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append ``data``, which is copied.

        Raises:
            OSError: ``EFBIG``: the manifest would become too long.
            OmniloadError, OSError: An earlier write to the store failed.
        """
        self.settle()
        view = memoryview(data).cast("B")
        if (size_bytes := self._size_bytes + len(view)) > self._unit_bytes * _MOST_UNITS:
            raise OSError(
                errno.EFBIG,
                f"{size_bytes} bytes are more than {_MOST_UNITS} units of "
                f"{self._unit_bytes}; write larger units",
            )
        while view:
            rest = self._held.take(view)
            self._size_bytes += len(view) - len(rest)
            view = rest
            if self._segments.are_begun or self._held.size_bytes > self._plain_limit:
                self._segments.append(self._held.full)

    def sync(self) -> Content:
        """Make all bytes so far durable and return the content to publish; writing may continue."""
        content = self.seal(last=False)
        self.settle()
        return content

    def finish(self) -> Content:
        """Make everything durable and return the content to publish; this ends the writing."""
        content = self.seal()
        self.settle()
        return content

    def seal(self, *, last: bool = True) -> Content:
        """Begin to make everything durable; ``settle`` waits for it.

        Args:
            last: Whether this ends the writing. If not, the unit that is not full becomes a
                segment of its own, and the next call replaces it. So a file that is synced after
                every line keeps few segments.

        Returns:
            The content to publish once ``settle`` has returned.
        """
        self.settle()
        held, parts = self._held, [*self._held.full, self._held.tail]
        # A unit may be larger than the limit; then no unit may have been sent yet.
        may_be_short = not self._segments.are_begun and held.size_bytes <= self._plain_limit
        if may_be_short and may_be_plain(parts):
            return b"".join(parts)
        # Keep the order: a segment that was begun continues with the units that were held back.
        self._segments.append(held.full)
        if held.tail and last:
            self._segments.append([held.tail])
            held.clear()
        return self._segments.seal(bytes(held.tail))

    def settle(self) -> None:
        """Wait until the work that ``seal`` began is durable.

        Raises:
            OmniloadError, OSError: An object could not be written; every later call raises it again.
        """
        self._segments.settle()

    def abandon(self) -> None:
        """Give up unsealed bytes. Never raises."""
        self._segments.abandon()
        self._held.clear()


class _Segments:
    """The segments of a file that is being written: the durable ones, and up to three that are not.

    ::

        durable ... durable   current ---seal---> sealing ---settle---> durable
                           a short unit, alone ---> tail, in the content until the next seal
    """

    def __init__(
        self, engine: WriteEngine, layout: StripeLayout, durable: tuple[Segment, ...]
    ) -> None:
        self._engine = engine
        self._layout = layout
        self._durable = list(durable)
        self._current: SegmentWriter | None = None
        self._sealing: tuple[SegmentWriter, Segment] | None = None
        """Segment that is being made durable, and may still fail."""
        self._tail_sealing: SegmentWriter | None = None

    @property
    def are_begun(self) -> bool:
        """Whether the file has segments, so that it will not be plain."""
        return bool(self._durable) or self._current is not None or self._sealing is not None

    @property
    def are_settled(self) -> bool:
        """Whether everything that was sealed is durable."""
        return self._sealing is None and self._tail_sealing is None

    def append(self, units: list[bytearray]) -> None:
        """Send units, the first one first; units that were sent leave the list."""
        while units:
            if self._current is None:
                self._current = SegmentWriter(self._engine, self._layout)
            self._current.append(units.pop(0))

    def seal(self, tail: bytes) -> tuple[Segment, ...]:
        """Begin to make all segments durable, a short unit in place of the previous one; return the file's segments."""
        content = list(self._durable)
        if self._current is not None:
            self._sealing = self._current, self._current.seal()
            self._current = None
            content.append(self._sealing[1])
        # One object is enough, because the next seal replaces it.
        if tail:
            alone = SegmentWriter(self._engine, StripeLayout(self._layout.unit_bytes, 1))
            alone.append(tail)
            self._tail_sealing = alone
            content.append(alone.seal())
        return tuple(content)

    def settle(self) -> None:
        """Settle like ``FileWriter.settle``."""
        if self._sealing is not None:
            writer, segment = self._sealing
            writer.settle()
            self._sealing = None
            # Not earlier, because a segment with incomplete objects is not part of any content.
            self._durable.append(segment)
            if len(self._durable) >= MAX_SEGMENTS:
                raise OSError(
                    errno.EFBIG,
                    f"file has {len(self._durable)} segments, limit {MAX_SEGMENTS}; copy it anew",
                )
        if self._tail_sealing is not None:
            writer, self._tail_sealing = self._tail_sealing, None
            writer.settle()

    def abandon(self) -> None:
        """Give up bytes that are not durable. Never raises."""
        for writer in (self._current, self._sealing and self._sealing[0], self._tail_sealing):
            if writer is not None:
                writer.abandon()
        self._current = self._sealing = self._tail_sealing = None
