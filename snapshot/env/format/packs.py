"""Packs: the contents of many files back to back, cut into frames that are compressed separately.

For its reader a pack is one long string of bytes, and a content is a range of it. Frames of
4 MiB cut the pack without regard to contents, so ten thousand small files become a hundred
frames, and any range of frames can be read by itself. A pack has 16 bytes (b"OMNIPACK", version (u32),
zero (u32), little-endian), and then the frames, back to back. The manifests that name the pack give the place
and the content of its frames, so a pack that no manifest names is useless.
"""

import struct
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import zstandard

from omniload.base.errors import IntegrityError

__all__ = [
    "FRAME_BYTES",
    "HEADER",
    "VERSION",
    "Frame",
    "ReadUnit",
    "check_frames",
    "frames_of",
    "inflate",
    "read_units",
]

# Version 1 has an index after the frames, which nothing needs; it is read like version 2.
VERSION = 2
MAGIC = b"OMNIPACK"
HEADER = MAGIC + struct.pack("<II", VERSION, 0)
FRAME_BYTES = 4 << 20
"""Raw bytes of a frame; the last of a pack may hold fewer."""
# No frame may claim more, so that no frame can fill the memory.
MAX_FRAME_BYTES = 16 << 20


class Frame(NamedTuple):
    """A compressed piece of a pack."""

    offset: int
    """Offset in the stored pack."""
    stored_bytes: int
    raw_bytes: int


class ReadUnit(NamedTuple):
    """A run of frames that is fetched in one read."""

    frames: tuple[Frame, ...]
    raw_offset: int
    """Offset of the first frame in the raw pack."""

    @property
    def offset(self) -> int:
        """Offset of the read in the stored pack."""
        return self.frames[0].offset

    @property
    def stored_bytes(self) -> int:
        """Number of bytes to read."""
        last = self.frames[-1]
        return last.offset + last.stored_bytes - self.offset

    @property
    def raw_end(self) -> int:
        """End of the last frame in the raw pack."""
        return self.raw_offset + sum(frame.raw_bytes for frame in self.frames)


def check_frames(frames: Sequence[Frame], *, name: str) -> None:
    """Check that frames are in order and disjoint, and no larger than a frame may be.

    Raises:
        IntegrityError: They are not.
    """
    at = len(HEADER)
    for frame in frames:
        if frame.offset < at or not 0 < frame.raw_bytes <= MAX_FRAME_BYTES:
            raise IntegrityError(
                f"pack {name!r}: frame {frame} begins before {at} or claims more than "
                f"{MAX_FRAME_BYTES} bytes"
            )
        # zstd makes incompressible bytes longer by 1/256 at most, which is 64 KiB for the largest frame.
        if not 0 < frame.stored_bytes <= frame.raw_bytes + 65536:
            raise IntegrityError(f"pack {name!r}: frame {frame} is stored in too many bytes")
        at = frame.offset + frame.stored_bytes


def inflate(stored: bytes | memoryview, raw_bytes: int, *, name: str) -> bytes:
    """Decompress one frame that claims to hold ``raw_bytes``, and never produce more bytes.

    Raises:
        IntegrityError: It is broken, or holds another number of bytes.
    """
    try:
        # The library allocates the size in the frame's header before it decodes a byte.
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
    """Plan the reads that fetch every wanted range of a raw pack.

    Args:
        frames: All frames of the pack.
        wanted: Raw size by raw offset of each content.
        unit_bytes: Approximate raw bytes of one read.

    Returns:
        Runs of neighbouring frames in order; every wanted byte is in exactly one run.
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
