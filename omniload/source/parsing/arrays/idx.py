r"""The head of Megatron's ``.idx``, which says where documents lie in the ``.bin`` beside it.

The file of version 1, all numbers little-endian::

    0   "MMIDIDX\0\0"                9 bytes
    9   version, 1                   uint64
    17  code of the type of the ids  uint8
    18  sequences, S                 uint64
    26  boundaries of documents, D   uint64
    34  length of each sequence      int32[S]
        first byte of each           int64[S]
        first sequence of each document, and S at last   int64[D]
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from omniload.base.errors import ConfigError, IntegrityError
from omniload.source.files import ShardFile

__all__ = ["HEAD_BYTES", "MAGIC", "IdxHead", "idx_head"]

MAGIC = b"MMIDIDX\0\0"
"""First bytes of every such file."""
HEAD_BYTES = 34
_DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
_NO_IDS = {6: "float64", 7: "float32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class IdxHead:
    """Content of the header of an index; its sizes agree with the size of the file."""

    dtype: np.dtype[Any]
    sequences: int
    boundaries: int

    @property
    def pointers_at(self) -> int:
        """Place of the first bytes of sequences."""
        return HEAD_BYTES + 4 * self.sequences

    @property
    def documents_at(self) -> int:
        """Place of the boundaries of documents."""
        return self.pointers_at + 8 * self.sequences


def idx_head(index: ShardFile) -> IdxHead:
    """Read the header of an index, and compare it with the size of the file.

    Raises:
        ConfigError: The version, or the type of the ids, is not supported.
        IntegrityError: The file is no index, or its size does not match its header.
    """
    size = index.size_bytes
    head = index.read_range(0, min(HEAD_BYTES, size))
    if len(head) < HEAD_BYTES and head[: len(MAGIC)] == MAGIC[: len(head)]:
        raise IntegrityError(
            f"{index.path}: has {size} bytes, and the head of an index alone has {HEAD_BYTES}: it is cut short, "
            "replace it"
        )
    if head[: len(MAGIC)] != MAGIC:
        raise IntegrityError(
            f"{index.path}: begins with {head[:9]!r}, not {MAGIC!r}: it is not an index of Megatron, or is of the "
            "oldest kind (TNTIDX); write it again"
        )
    # Its numbers are sizes of arrays, so they are compared with the size of the file before an array is read.
    version, code = int.from_bytes(head[9:17], "little"), head[17]
    sequences = int.from_bytes(head[18:26], "little")
    boundaries = int.from_bytes(head[26:34], "little")
    if version != 1:
        raise ConfigError(
            f"{index.path}: is of version {version}; version 1 is read, write it anew"
        )
    if code not in _DTYPES:
        kind = _NO_IDS.get(code, "unknown")
        raise ConfigError(
            f"{index.path}: says that ids are of type {code} ({kind}); integers are read: types "
            f"{', '.join(map(str, _DTYPES))}"
        )
    wanted = HEAD_BYTES + 12 * sequences + 8 * boundaries
    # The mode of a sequence is one byte, after all other data.
    if size == wanted + sequences and sequences:
        raise ConfigError(
            f"{index.path}: has a mode for each of its {sequences} sequences: it is multimodal, which is not read"
        )
    if size != wanted or boundaries < 1:
        raise IntegrityError(
            f"{index.path}: says {sequences} sequences and {boundaries} boundaries of documents, which make {wanted} "
            f"bytes; it has {size}: it is cut short or corrupt, replace it"
        )
    return IdxHead(dtype=_DTYPES[code], sequences=sequences, boundaries=boundaries)
