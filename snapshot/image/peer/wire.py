"""What peers say to each other, version 1, as bytes.

A request is ``POST /v1/blocks`` with ``Authorization: Bearer TOKEN`` and JSON::

    {"blob": DIGEST, "wait": true, "blocks": [[NUMBER, DIGEST], ...]}

Blocks of one layer: their numbers in its index, and the sha256 of their uncompressed bytes.
With ``wait`` the peer gets what it does not have; without, it only looks. The answer is a
sequence of frames, one byte and a little-endian u32 each:

    B size, and so many bytes    the next block that was asked for
    N 0                          the next block that was asked for is not to be had here
    W 0                          the peer is well and still waiting; sent every second

Nothing a peer says is trusted: the receiver compares each block with its own digest.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from snapshot.oci.digest import check_digest

__all__ = [
    "ABSENT",
    "FRAME_BYTES",
    "MAX_BLOCKS",
    "MAX_REQUEST_BYTES",
    "PATH",
    "WAITING",
    "BlocksAsked",
    "block_frame",
    "frame_size",
    "parse_request",
    "request_body",
]

PATH = "/v1/blocks"
MAX_BLOCKS = 4096
"""In one request."""
MAX_REQUEST_BYTES = MAX_BLOCKS * 180 + 4096  # a number of 13 digits and a sha512 take 154 in JSON

_FRAME = struct.Struct("<cI")
FRAME_BYTES = _FRAME.size
ABSENT = _FRAME.pack(b"N", 0)
WAITING = _FRAME.pack(b"W", 0)


@dataclass(frozen=True, slots=True)
class BlocksAsked:
    """A request for blocks of one layer."""

    blob: str
    waits: bool
    blocks: tuple[tuple[int, str], ...]
    """Number and digest of each."""


def request_body(blob: str, blocks: Sequence[tuple[int, str]], *, waits: bool) -> bytes:
    """Return the body of a request."""
    return orjson.dumps({"blob": blob, "wait": waits, "blocks": blocks})


def parse_request(body: bytes) -> BlocksAsked:
    """Return what a body asks for.

    Raises:
        ValueError: It is no request, or one that is too large.
    """
    value = orjson.loads(body)
    match value:
        case {"blob": str(blob), "wait": bool(waits), "blocks": list(blocks)} if len(value) == 3:
            if not 0 < len(blocks) <= MAX_BLOCKS:
                raise ValueError(f"{len(blocks)} blocks; ask for 1 to {MAX_BLOCKS}")
            return BlocksAsked(check_digest(blob), waits, tuple(_block(block) for block in blocks))
    raise ValueError("a request is blob, a digest; wait, a boolean; and blocks, a list")


def block_frame(size_bytes: int) -> bytes:
    """Return what stands before the bytes of a block."""
    return _FRAME.pack(b"B", size_bytes)


def frame_size(head: bytes) -> int | None:
    """Return the size of the block that follows, None where it is absent, -1 for ``WAITING``.

    Raises:
        ValueError: This is no frame.
    """
    kind, size = _FRAME.unpack(head) if len(head) == FRAME_BYTES else (b"", 0)
    if kind == b"B":
        return int(size)
    if head == ABSENT:
        return None
    if head == WAITING:
        return -1
    raise ValueError(f"{head!r} is no frame")


def _block(value: object) -> tuple[int, str]:
    match value:
        case [int(number), str(digest)] if not isinstance(number, bool) and 0 <= number < 1 << 40:
            return number, check_digest(digest)
    raise ValueError(f"{str(value)[:200]} is not a number and a digest")
