"""References to blocks of layers: what a fetcher must know of a block."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from snapshot.image.layer.index import LayerIndex

__all__ = ["BlockRef", "block_refs"]


@dataclass(frozen=True, slots=True)
class BlockRef:
    """A block of a layer, and where its blob holds it."""

    digest: str
    """Of its uncompressed bytes: blocks of two layers with one digest are one block."""
    blob: str
    number: int
    offset: int
    """In the blob."""
    size_bytes: int
    """In the blob."""

    @property
    def end(self) -> int:
        """Where the next block of the blob begins."""
        return self.offset + self.size_bytes


def block_refs(index: LayerIndex, blocks: Iterable[int]) -> Iterator[BlockRef]:
    """Yield what a fetcher must know of blocks of a layer."""
    for number in blocks:
        record = index.blocks_B[number]
        yield BlockRef(
            digest=index.digest(number),
            blob=index.blob_digest,
            number=number,
            offset=int(record["blob_offset"]),
            size_bytes=int(record["blob_size"]),
        )
