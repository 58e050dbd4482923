"""The protocol of a source: samples by position, whatever the format of its files."""

from typing import Protocol

from omniload.mix.fingerprint import SourceFacts
from omniload.source.parts.sample_block import SampleBlock

__all__ = ["Source"]


class Source(Protocol):
    """Samples by position; position ``n * positions_per_epoch`` is the first of epoch ``n``, in an order of its own."""

    name: str
    """Name in the mix file."""
    positions_per_epoch: int
    """Records of the source."""
    fingerprint: str
    """Digest of what decides the order; positions saved under another one do not hold."""
    shards_digest: str
    """Digest of the names and sizes of the shards that hold records, in their order."""
    content_digest: str
    """Digest of what those shards hold."""
    transforms_digest: str
    """Digest of the files that transforms read; empty where they read none."""
    drawn_before_digest: str = ""
    """Digest of the records that another loader had drawn; empty where none are left out for that."""
    shards: tuple[str, ...]
    """Paths of the shards that hold records, by their numbers."""

    @property
    def facts(self) -> SourceFacts:
        """What the planner must know of the source."""
        return SourceFacts(
            positions_per_epoch=self.positions_per_epoch,
            order_digest=self.fingerprint,
            shards_digest=self.shards_digest,
            content_digest=self.content_digest,
            transforms_digest=self.transforms_digest,
            drawn_before_digest=self.drawn_before_digest,
        )

    def give_way(self) -> None:
        """Drop decoded blocks where all sources hold too many (``BlockMemory.is_over``), and no disk takes them."""
        ...

    def shard_at(self, position: int) -> int:
        """Return the number of the shard that holds the record at a position."""
        ...

    def place_at(self, position: int) -> tuple[str, str]:
        """Return the file of the record at a position, and its name in the file; of joined records only their shard."""
        ...

    def block_stop(self, position: int) -> int:
        """Return the first position behind the block of a position: what is damaged of a block costs all of it."""
        ...

    def stand_at(self, start: int, stop: int, without: tuple[int, ...] = ()) -> int:
        """Decode ahead the blocks that reads from ``start`` to ``stop`` will need, so that those wait for no store.

        At most two blocks are held: the block of ``start``, and the next one where ``stop`` lies beyond the first.

        Returns:
            The position up to which reads find their blocks decoded.

        Raises:
            IntegrityError, UnavailableError: As for ``read``.
        """
        ...

    def read(self, start: int, stop: int, without: tuple[int, ...] = ()) -> SampleBlock:
        """Return the samples of positions ``start`` to ``stop``, which may span epochs.

        Records of the shards ``without`` keep their positions and give no sample; they are not read.

        Returns:
            The same samples however a range is cut into reads, in this process and any other.

        Raises:
            IntegrityError: A record or shard cannot be decoded, or changed since the source
                was opened.
            UnavailableError: The store did not answer.
            ValueError: ``start`` is negative or after ``stop``.
        """
        ...
