"""The table of a tar: its entries, read once from front to back, in bounded memory.

The standard library parses the headers (pax, GNU long names, every kind of sparse
file); this module limits what a hostile tar can make it do. The library reads extension headers
of any size at once, so the stream refuses large reads. It may be led to read backwards,
so the stream only goes forward. And it takes a broken header in the middle for the end,
so everything after the last entry must be zeroes.
"""

import re
import tarfile
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, Protocol, cast

from omniload.base.errors import IntegrityError
from snapshot.image.layer.index import MAX_ENTRIES, Entry, Extent, Kind, check_entry, clean_path

__all__ = ["ByteSource", "ForwardStream", "read_table"]

# The parser reads an extension header at once, whatever its stated size.
MAX_HEADER_BYTES = 8 << 20
_SKIP_BYTES = 1 << 20
_XATTR = "SCHILY.xattr."
_TIME = re.compile(r"-?[0-9]{1,10}(\.[0-9]{0,30})?\Z")

_KIND_OF: dict[bytes, Kind] = {
    tarfile.REGTYPE: "file",
    tarfile.AREGTYPE: "file",
    tarfile.CONTTYPE: "file",
    tarfile.GNUTYPE_SPARSE: "file",
    tarfile.DIRTYPE: "directory",
    tarfile.SYMTYPE: "symlink",
    tarfile.LNKTYPE: "hardlink",
    tarfile.CHRTYPE: "character",
    tarfile.BLKTYPE: "block",
    tarfile.FIFOTYPE: "fifo",
}


class ByteSource(Protocol):
    """A source of bytes in order."""

    def read(self, size: int, /) -> bytes:
        """Return at most ``size`` bytes; none at the end."""
        ...


class ForwardStream:
    """A source that knows its position and can skip, but only forward.

    Raises:
        IntegrityError: Raised by its methods: the archive makes the parser go back, or read
            more at once than a header may have.
    """

    def __init__(self, source: ByteSource, *, layer: str) -> None:
        self._source = source
        self._layer = layer
        self._at = 0
        self._again = b""
        self.last = b""
        """Bytes of the last read."""
        self.data_end: int | None = None
        """Offset at which the source ended inside a block; None if it did not."""

    def tell(self) -> int:
        """Return the number of bytes that were read or skipped."""
        return self._at

    def read(self, size: int) -> bytes:
        """Return ``size`` bytes, or fewer at the end."""
        if not 0 <= size <= MAX_HEADER_BYTES:
            raise IntegrityError(
                f"layer {self._layer}: a header of {size} bytes at {self._at}, more than "
                f"{MAX_HEADER_BYTES}; the layer is not used"
            )
        if self._again:
            self.last, self._again = self._again, b""
            self._at += len(self.last)
            return self.last
        parts = []
        while size and (part := self._source.read(size)):
            parts.append(part)
            size -= len(part)
            self._at += len(part)
        if size == 1 and not parts and self._at % tarfile.BLOCKSIZE:
            # The parser reads the last byte of a block to find out whether the block is there.
            self.data_end = self._at if self.data_end is None else self.data_end
            self._at += 1
            parts = [b"\0"]
        self.last = b"".join(parts)
        return self.last

    def unread(self) -> None:
        """Make the next read return the bytes of the last one again."""
        self._again = self.last
        self._at -= len(self.last)

    def seek(self, offset: int) -> int:
        """Skip to ``offset``, or to the end; the last block may lack trailing zeroes."""
        if offset < self._at:
            raise IntegrityError(
                f"layer {self._layer}: an entry at {self._at} leads back to {offset}; the layer "
                "is not used"
            )
        while self._at < offset:
            part = self._source.read(min(_SKIP_BYTES, offset - self._at))
            if not part:
                self.data_end = self._at
                # Some tools end a layer with the last byte of its last file, without the padding of the last block;
                # ``data_end`` still shows whether that file is complete.
                if offset - self._at < tarfile.BLOCKSIZE:
                    self._at = offset
                break
            self._at += len(part)
        return self._at


def read_table(source: ByteSource, *, layer: str) -> Iterator[Entry]:
    """Yield the entries of an uncompressed tar in order; the source is read to its end.

    Yields:
        Entries whose extents are in the stream, each checked by ``check_entry``.

    Raises:
        IntegrityError: The tar is broken, cut short, or hostile.
    """
    stream = ForwardStream(source, layer=layer)
    try:
        yield from _entries(stream, layer)
    # The parser passes on the errors of its parts, one kind for each kind of fault.
    except (
        tarfile.TarError,
        EOFError,
        ValueError,
        OverflowError,
        RecursionError,
        IndexError,
        KeyError,
    ) as error:
        raise IntegrityError(
            f"layer {layer}: not a whole tar near byte {stream.tell()}: {error}"
        ) from error


def _entries(stream: ForwardStream, layer: str) -> Iterator[Entry]:
    if not stream.read(tarfile.BLOCKSIZE).strip(b"\0"):
        _expect_zeroes(stream, layer)  # an empty layer, which umoci writes without any block
        return
    # The parser looks for its first header itself, and does not report a missing one.
    stream.unread()
    archive: Any  # its ``members`` are not in its stubs
    with tarfile.open(
        fileobj=cast("Any", stream),  # the stream has all methods that the library calls
        mode="r:",
        format=tarfile.PAX_FORMAT,
        encoding="utf-8",
        errors="surrogateescape",
    ) as archive:
        # The parser of Python before 3.11.4 skips an invalid first header.
        _expect_header(archive.firstmember is not None, stream, layer)
        count = data_end = 0
        while (member := archive.next()) is not None:
            # Otherwise the library would keep every member.
            archive.members = []
            count += 1
            if count > MAX_ENTRIES:
                raise IntegrityError(f"layer {layer}: more than {MAX_ENTRIES} entries; not used")
            entry = _entry(member, layer)
            ends = [extent.stream_offset + extent.size_bytes for extent in entry.extents]
            data_end = max([data_end, *ends])
            yield entry
    if stream.data_end is not None and data_end > stream.data_end:
        raise IntegrityError(
            f"layer {layer}: ends at byte {stream.data_end}, its last file at {data_end}; cut short"
        )
    _expect_header(False, stream, layer)
    _expect_zeroes(stream, layer)


def _expect_header(found: bool, stream: ForwardStream, layer: str) -> None:
    if not found and stream.last.strip(b"\0"):
        raise IntegrityError(
            f"layer {layer}: no valid header near byte {stream.tell()}, and more follows"
        )


def _expect_zeroes(stream: ForwardStream, layer: str) -> None:
    while part := stream.read(_SKIP_BYTES):
        if part.count(0) != len(part):
            raise IntegrityError(
                f"layer {layer}: bytes after the end of the tar, near {stream.tell()}; two "
                "readers would see two different layers"
            )


def _entry(member: tarfile.TarInfo, layer: str) -> Entry:
    kind = _KIND_OF.get(member.type)
    if kind is None:
        raise IntegrityError(
            f"layer {layer}: {member.name[:200]!r} is of unknown kind {member.type!r}"
        )
    target = member.linkname
    return check_entry(
        Entry(
            path=clean_path(member.name, layer=layer),
            kind=kind,
            mode=member.mode & 0o7777,
            uid=member.uid,
            gid=member.gid,
            mtime_ns=_mtime_ns(member),
            size_bytes=member.size if kind == "file" else 0,
            target=clean_path(target, layer=layer) if kind == "hardlink" else target,
            device=(member.devmajor, member.devminor) if kind in {"character", "block"} else (0, 0),
            xattrs=_xattrs(member),
            extents=_extents(member) if kind == "file" else (),
        ),
        layer=layer,
    )


def _mtime_ns(member: tarfile.TarInfo) -> int:
    """Return the exact time, because the library makes a float of it, which loses nanoseconds."""
    text = member.pax_headers.get("mtime")
    if text is None:
        return int(member.mtime) * 1_000_000_000
    return int(Decimal(text) * 1_000_000_000) if _TIME.match(text) else 0


def _xattrs(member: tarfile.TarInfo) -> tuple[tuple[str, bytes], ...]:
    return tuple(
        sorted(
            (name.removeprefix(_XATTR), value.encode("utf-8", "surrogateescape"))
            for name, value in member.pax_headers.items()
            if name.startswith(_XATTR)
        )
    )


def _extents(member: tarfile.TarInfo) -> tuple[Extent, ...]:
    if member.sparse is None:
        whole = Extent(0, member.offset_data, member.size)
        return (whole,) if member.size else ()
    extents, at = [], member.offset_data
    for offset, size in cast("list[tuple[int, int]]", member.sparse):
        if size:
            extents.append(Extent(offset, at, size))
            at += size
    return tuple(extents)
