"""Streams of deflate that are entered in their middle, and the memory that this takes."""

import re
import zlib
from collections.abc import Callable
from io import BytesIO

import zstandard

__all__ = ["WINDOW_BYTES", "Inflater", "inflate", "unzstd"]

WINDOW_BYTES = 32 << 10
"""A deflate stream refers back so far and no further."""

# Check and length at the end of a member of gzip, which a decoder of bare deflate leaves to us.
_TRAILER_BYTES = 8
# Given to a decoder at once: a member that ends early copies the rest of its piece.
_PIECE_BYTES = 16 << 10
# Tools fill up a member with zeroes, as for a tape.
_ZEROS = re.compile(rb"\0*")


class Inflater:
    """What a deflate stream holds from a place in its middle on, and the members of gzip that follow. Not thread-safe.

    It holds the window of the decoder and 16 KiB of what is compressed.

    Args:
        raw: Returns the next bytes of the stream, at most as many as it is asked for, and none at its end. The first
            of them is the byte that holds the first bit.
        bits: How many high bits of the first byte belong to the stream, 1 to 7; 0 for all eight.
        window: What the stream may refer back to.

    Source:
        RFC 1951, section 3.2; ``inflatePrime`` of zlib, which Python's module lacks.
    """

    def __init__(self, raw: Callable[[int], bytes], *, bits: int, window: bytes) -> None:
        self._raw, self._trailer_bytes, self._piece = raw, _TRAILER_BYTES, b""
        self._decoder = (
            zlib.decompressobj(wbits=-15, zdict=window) if window else zlib.decompressobj(-15)
        )
        # A stored block begins at a byte boundary, which a shift by the bits of the first byte would move. So
        # those that belong to the block before are overwritten with the end of empty blocks, which say nothing.
        if bits and (first := raw(1)):
            filler = _FILLERS[8 - bits]
            self._piece = filler[:-1] + bytes((first[0] >> (8 - bits) << (8 - bits) | filler[-1],))

    def read(self, size: int) -> bytes:
        """Return the next ``size`` bytes; fewer where the stream ends before.

        Raises:
            zlib.error: It is no such stream, or a member that was read from its head has another check.
        """
        out = bytearray()
        # A piece may hold the end of one member and the beginning of the next, as eStargz writes them.
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
        """Go on behind the end of a member, its check and the zeroes that it may be filled up with."""
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
        raw: From the byte that holds the first bit.
        bits: How many high bits of the first byte belong to it, 1 to 7; 0 for all eight.
        window: What the stream may refer back to.
        size: Bytes wanted, at least 1.

    Returns:
        As many of them as ``raw`` holds; members of gzip that follow the first are read on.

    Raises:
        zlib.error: It is no such stream.
    """
    return Inflater(BytesIO(raw).read, bits=bits, window=window).read(size)


def _fillers() -> tuple[bytes, ...]:
    """Return, for 0 to 7 bits, empty deflate blocks that end after as many bits of a byte."""
    # With fixed codes an empty block has 10 bits, which reaches every even number.
    fixed, fixed_bits = 0b0000000_01_0, 10
    # With dynamic codes and 19 code lengths it has 93, which reaches the odd ones.
    # Codes of one bit for code lengths 1 and 18: 256 literals have none, "end of block" and
    # one distance have a code of one bit, and the block is its end.
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
        zstandard.ZstdError: They do not decode.
    """
    # Not ``decompress``: a frame that says how much it holds gets all of that, whatever the limit.
    decoder = zstandard.ZstdDecompressor(max_window_size=1 << 27)
    with decoder.stream_reader(bytes(raw), read_across_frames=True) as reader:
        return reader.read(size)
