"""Packs: the contents of many files back to back, cut into frames that are compressed alone.

To its reader a pack is one long string of bytes. A content is a range of it; frames of
4 MiB cut it without regard to contents, so ten thousand small files become a hundred
frames, and any range of frames can be read by itself. Byte for byte::

    16 bytes   b"OMNIPACK", version (u32), zero (u32)
    frames     zstd frames, back to back
    index      one zstd frame: (stored offset u64, stored bytes u32, raw bytes u32) of each
               frame, then (SHA-256, raw offset u64, raw bytes u64) of each content
    64 bytes   index offset (u64), its stored bytes (u32), its raw bytes (u32), frames (u32),
               contents (u32), SHA-256 of the raw index, b"OMNIPACK"

Integers are little-endian. A pack that was cut short has no last 64 bytes, so it is
never taken for a whole one.
"""

import hashlib
import struct
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import zstandard

from omniload.base.errors import IntegrityError

__all__ = [
    "FOOTER_BYTES",
    "FRAME_BYTES",
    "HEADER",
    "VERSION",
    "Content",
    "Footer",
    "Frame",
    "PackIndex",
    "ReadUnit",
    "check_frames",
    "decode_footer",
    "decode_index",
    "encode_tail",
    "frames_of",
    "inflate",
    "read_units",
]

VERSION = 1
MAGIC = b"OMNIPACK"
HEADER = MAGIC + struct.pack("<II", VERSION, 0)
FRAME_BYTES = 4 << 20
"""Raw bytes of a frame; the last of a pack may hold fewer."""
FOOTER_BYTES = 64
MAX_FRAME_BYTES = 16 << 20
"""No frame may claim more, so none can fill the memory."""
MAX_INDEX_BYTES = 1 << 30

_FRAME = struct.Struct("<QII")
_CONTENT = struct.Struct("<32sQQ")
_FOOTER = struct.Struct("<QIIII32s8s")


class Frame(NamedTuple):
    """A compressed piece of a pack."""

    offset: int
    """Where it begins in the stored pack."""
    stored_bytes: int
    raw_bytes: int


class Content(NamedTuple):
    """Bytes of a file, wherever it lies in an environment."""

    digest: bytes
    """SHA-256."""
    offset: int
    """Where it begins in the raw pack."""
    size_bytes: int


class PackIndex(NamedTuple):
    """What a pack holds."""

    frames: tuple[Frame, ...]
    contents: tuple[Content, ...]


class Footer(NamedTuple):
    """The last 64 bytes of a pack."""

    index_offset: int
    index_stored_bytes: int
    index_raw_bytes: int
    num_frames: int
    num_contents: int
    index_digest: bytes


class ReadUnit(NamedTuple):
    """A run of frames that is fetched in one read."""

    frames: tuple[Frame, ...]
    raw_offset: int
    """Where the first of them begins in the raw pack."""

    @property
    def offset(self) -> int:
        """Where the read begins in the stored pack."""
        return self.frames[0].offset

    @property
    def stored_bytes(self) -> int:
        """Bytes to read."""
        last = self.frames[-1]
        return last.offset + last.stored_bytes - self.offset

    @property
    def raw_end(self) -> int:
        """Where the last frame ends in the raw pack."""
        return self.raw_offset + sum(frame.raw_bytes for frame in self.frames)


def encode_tail(index: PackIndex, offset: int) -> bytes:
    """Return index and footer of a pack whose frames end at ``offset``."""
    raw = b"".join(
        [*(_FRAME.pack(*frame) for frame in index.frames)]
        + [_CONTENT.pack(*content) for content in index.contents]
    )
    stored = zstandard.ZstdCompressor(level=3).compress(raw)
    footer = _FOOTER.pack(
        offset,
        len(stored),
        len(raw),
        len(index.frames),
        len(index.contents),
        hashlib.sha256(raw).digest(),
        MAGIC,
    )
    return stored + footer


def decode_footer(data: bytes, *, name: str) -> Footer:
    """Read the last ``FOOTER_BYTES`` of a pack.

    Raises:
        IntegrityError: It is no footer: the pack was cut short, or is none.
    """
    if len(data) != FOOTER_BYTES or data[-8:] != MAGIC:
        raise IntegrityError(f"pack {name!r} does not end as a pack does; it was cut short")
    *fields, _ = _FOOTER.unpack(data)
    footer = Footer(*fields)
    whole = footer.num_frames * _FRAME.size + footer.num_contents * _CONTENT.size
    if footer.index_raw_bytes != whole or whole > MAX_INDEX_BYTES:
        raise IntegrityError(
            f"pack {name!r}: an index of {footer.index_raw_bytes} bytes for {footer.num_frames} "
            f"frames and {footer.num_contents} contents, which need {whole} of {MAX_INDEX_BYTES}"
        )
    return footer


def decode_index(stored: bytes, footer: Footer, *, name: str) -> PackIndex:
    """Read the index of a pack.

    Raises:
        IntegrityError: It does not match the footer, or names bytes outside the pack.
    """
    raw = inflate(stored, footer.index_raw_bytes, name=name)
    if hashlib.sha256(raw).digest() != footer.index_digest:
        raise IntegrityError(f"pack {name!r}: the index does not match its digest")
    split = footer.num_frames * _FRAME.size
    frames = tuple(map(Frame._make, _FRAME.iter_unpack(raw[:split])))
    contents = tuple(map(Content._make, _CONTENT.iter_unpack(raw[split:])))
    check_frames(frames, name=name)
    end = sum(frame.raw_bytes for frame in frames)
    for content in contents:
        if content.offset + content.size_bytes > end:
            raise IntegrityError(f"pack {name!r}: content at {content.offset} ends after {end}")
    return PackIndex(frames, contents)


def check_frames(frames: Sequence[Frame], *, name: str) -> None:
    """Check that frames stand in order, apart, and hold no more than a frame may.

    Raises:
        IntegrityError: They do not.
    """
    at = len(HEADER)
    for frame in frames:
        if frame.offset < at or not 0 < frame.raw_bytes <= MAX_FRAME_BYTES:
            raise IntegrityError(
                f"pack {name!r}: frame {frame} begins before {at} or claims more than "
                f"{MAX_FRAME_BYTES} bytes"
            )
        if not 0 < frame.stored_bytes <= frame.raw_bytes + 65536:
            raise IntegrityError(f"pack {name!r}: frame {frame} is stored in too many bytes")
        at = frame.offset + frame.stored_bytes


def inflate(stored: bytes | memoryview, raw_bytes: int, *, name: str) -> bytes:
    """Decompress one frame that claims to hold ``raw_bytes``, and never more than that.

    Raises:
        IntegrityError: It is broken, or holds another number of bytes.
    """
    try:
        declared = zstandard.frame_content_size(stored)
        if declared != raw_bytes:
            raise IntegrityError(f"{name!r}: a frame holds {declared} bytes, {raw_bytes} are due")
        return zstandard.ZstdDecompressor().decompress(stored, max_output_size=raw_bytes)
    except zstandard.ZstdError as error:
        raise IntegrityError(f"{name!r}: a frame is broken: {error}") from error


def frames_of(pieces: Iterator[bytes], frame_bytes: int = FRAME_BYTES) -> Iterator[bytes]:
    """Cut a stream into raw frames of ``frame_bytes``; the last may be shorter."""
    held = bytearray()
    for piece in pieces:
        held += piece
        while len(held) >= frame_bytes:
            yield bytes(held[:frame_bytes])
            del held[:frame_bytes]
    if held:
        yield bytes(held)


def read_units(
    frames: Sequence[Frame], wanted: Mapping[int, int], *, unit_bytes: int
) -> list[ReadUnit]:
    """Plan the reads that bring every wanted range of a raw pack.

    Args:
        frames: All frames of the pack.
        wanted: Raw size by raw offset of each content.
        unit_bytes: Raw bytes of one read, about.

    Returns:
        Runs of neighbouring frames in order; every wanted byte lies in exactly one.
    """
    starts, at = [], 0
    for frame in frames:
        starts.append(at)
        at += frame.raw_bytes
    needed: set[int] = set()
    for offset, size in wanted.items():
        if size:
            first = bisect_right(starts, offset) - 1
            last = bisect_right(starts, offset + size - 1) - 1
            needed.update(range(first, last + 1))
    units: list[list[int]] = []
    held = 0
    for number in sorted(needed):
        joined = units and units[-1][-1] == number - 1 and held < unit_bytes
        if joined:
            units[-1].append(number)
            held += frames[number].raw_bytes
        else:
            units.append([number])
            held = frames[number].raw_bytes
    return [
        ReadUnit(tuple(frames[number] for number in run), raw_offset=starts[run[0]])
        for run in units
    ]
