"""Files that may be compressed, as other tools write and read them: in one part, or in many parts end to end."""

import gzip
import struct
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import zstandard
from hypothesis import strategies as st

__all__ = ["PACKED", "written"]

Draw = Callable[[st.SearchStrategy[Any]], Any]


def _by_gzip(content: bytes, cuts: Sequence[int]) -> bytes:
    """Compress parts one by one, as `bgzip` does, with an empty one at the end."""
    return b"".join(map(gzip.compress, [*_parts_of(content, cuts), b""]))


def _by_zstd(content: bytes, cuts: Sequence[int]) -> bytes:
    """Compress parts one by one, as `pzstd` does, with a skippable frame before each."""
    aside = struct.pack("<II", 0x184D2A50, 3) + b"any"
    packed = []
    for i, part in enumerate(_parts_of(content, cuts)):
        # A stream writer produces frames that do not contain their size; a one-shot writer produces frames that do.
        writer = zstandard.ZstdCompressor(write_checksum=bool(i % 2)).compressobj()
        whole = zstandard.ZstdCompressor().compress(part)
        packed.append(whole if i % 3 else writer.compress(part) + writer.flush())
    return b"".join(aside + each for each in packed)


def _parts_of(content: bytes, cuts: Sequence[int]) -> list[bytes]:
    bounds = [0, *sorted(cut for cut in cuts if cut < len(content)), len(content)]
    return [content[a:b] for a, b in pairwise(bounds)]


def _unpacked_by_zstd(packed: bytes) -> bytes:
    reader = zstandard.ZstdDecompressor().stream_reader(packed, read_across_frames=True)
    return reader.read()


PACKED: dict[str, tuple[Callable[..., bytes], Callable[[bytes], bytes]]] = {
    "": (lambda content, _: content, bytes),
    ".gz": (_by_gzip, gzip.decompress),
    ".zst": (_by_zstd, _unpacked_by_zstd),
}
"""Writer and reader of each suffix."""


def written(draw: Draw, path: Path, content: bytes) -> bytes:
    """Write a file that may be compressed, by its name, cut into parts anywhere; return its contents."""
    pack, unpacked = PACKED[path.suffix if path.suffix in PACKED else ""]
    path.write_bytes(pack(content, draw(st.lists(st.integers(1, 400), max_size=3))))
    return unpacked(path.read_bytes())
