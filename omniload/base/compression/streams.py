"""Streams of deflate that are entered in their middle, with bounded memory."""

import re
import zlib
from collections.abc import Callable
from io import BytesIO

import zstandard

__all__ = ["WINDOW_BYTES", "Inflater", "inflate", "unzstd"]

WINDOW_BYTES = 32 << 10
"""Longest distance to which a deflate stream refers back."""

# Size of checksum and length at the end of a gzip member, which a decoder of bare deflate does not read.
_TRAILER_BYTES = 8
# Size of input that is given to a decoder at once, because a member that ends early copies the rest of its piece.
_PIECE_BYTES = 16 << 10
# Some tools pad a member with zeros, as for a tape.
_ZEROS = re.compile(rb"\0*")


class Inflater:
    """The content of a deflate stream from a place in its middle, and of later gzip members. Not thread-safe.

    It keeps the window of the decoder and 16 KiB of compressed data in memory.

    Args:
        raw: Returns the next bytes of the stream, at most as many as requested, and none at its end. The first byte is
            the one that contains the first bit.
        bits: Number of high bits of the first byte that belong to the stream, 1 to 7; 0 for all eight.
        window: Bytes that the stream may refer back to.

    Source:
        RFC 1951, section 3.2; ``inflatePrime`` of zlib, which Python's module lacks.
    """

    def __init__(self, raw: Callable[[int], bytes], *, bits: int, window: bytes) -> None:
        self._raw, self._trailer_bytes, self._piece = raw, _TRAILER_BYTES, b""
        self._decoder = (
            zlib.decompressobj(wbits=-15, zdict=window) if window else zlib.decompressobj(-15)
        )
        # A stored block begins at a byte boundary, so the bits of the first byte cannot be shifted out. Instead, the
        # bits of the previous block are overwritten with the end of empty blocks, which decode to nothing.
        if bits and (first := raw(1)):
            filler = _FILLERS[8 - bits]
            self._piece = filler[:-1] + bytes((first[0] >> (8 - bits) << (8 - bits) | filler[-1],))

    def read(self, size: int) -> bytes:
        """Return the next ``size`` bytes; fewer if the stream ends before.

        Raises:
            zlib.error: The data is not such a stream, or a member that was read from its head has another checksum.
        """
        out = bytearray()
        # A piece may contain the end of one member and the beginning of the next, as eStargz writes them.
        while len(out) < size:
            if self._decoder.eof:
                self._enter_member()
            if not self._piece:
                self._piece = self._raw(_PIECE_BYTES)
                if not self._piece:
                    break
            out += self._decoder.decompress(self._piece, size - len(out))
            self._piece = self._decoder.unused_data or self._decoder.unconsumed_tail
        return bytes(out)

    def _enter_member(self) -> None:
        """Continue after the end of a member, its checksum and its possible padding with zeros."""
        left, self._trailer_bytes = self._trailer_bytes, 0
        while True:
            cut = min(left, len(self._piece))
            padding = _ZEROS.match(self._piece, cut)
            left, self._piece = left - cut, self._piece[padding.end() if padding else cut :]
            if self._piece or not (more := self._raw(_PIECE_BYTES)):
                break
            self._piece = more
        if self._piece:
            self._decoder = zlib.decompressobj(wbits=31)


def inflate(raw: bytes | memoryview, bits: int, window: bytes, size: int) -> bytes:
    """Return up to ``size`` bytes of a deflate stream entered in its middle.

    Args:
        raw: The data from the byte that contains the first bit.
        bits: Number of high bits of the first byte that belong to the stream, 1 to 7; 0 for all eight.
        window: Bytes that the stream may refer back to.
        size: Number of bytes wanted, at least 1.

    Returns:
        As many bytes as ``raw`` contains; later gzip members are read as well.

    Raises:
        zlib.error: The data is not such a stream.
    """
    return Inflater(BytesIO(raw).read, bits=bits, window=window).read(size)


def _fillers() -> tuple[bytes, ...]:
    """Return, for each of 0 to 7 bits, empty deflate blocks that end after that number of bits of a byte."""
    # With fixed codes, an empty block has 10 bits, so several of them reach every even number.
    fixed, fixed_bits = 0b0000000_01_0, 10
    # With dynamic codes and 19 code lengths, an empty block has 93 bits, which reaches the odd numbers. Code lengths 1
    # and 18 have codes of one bit: 256 literals have no code, "end of block" and one distance have a code of one bit,
    # and the block consists of its end.
    dynamic, dynamic_bits = 0x35FFC10000000000081E004, 93
    found = []
    for wanted in range(8):
        value, length = (dynamic, dynamic_bits) if wanted % 2 else (0, 0)
        while length % 8 != wanted:
            value, length = value | fixed << length, length + fixed_bits
        found.append(value.to_bytes((length + 7) // 8, "little"))
    return tuple(found)


_FILLERS = _fillers()


def unzstd(raw: bytes | memoryview, size: int) -> bytes:
    """Return the first ``size`` bytes of the frames in ``raw``, in memory bounded by ``size``.

    Raises:
        zstandard.ZstdError: The frames do not decode.
    """
    # Not ``decompress``, because a frame that states its size is decompressed in full, whatever the limit.
    decoder = zstandard.ZstdDecompressor(max_window_size=1 << 27)
    with decoder.stream_reader(bytes(raw), read_across_frames=True) as reader:
        return reader.read(size)
