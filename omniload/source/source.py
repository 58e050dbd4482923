"""The protocol of a source: samples by position, whatever the format of its files."""

from typing import Protocol

from omniload.mix.fingerprint import SourceFacts
from omniload.source.parts.sample_block import SampleBlock

__all__ = ["Source"]


class Source(Protocol):
    """Samples by position.

    Position ``n * positions_per_epoch`` is the first of epoch ``n``; each epoch has its own order.
    """

    name: str
    """Name in the mix file."""
    positions_per_epoch: int
    """Number of records of the source."""
    fingerprint: str
    """Digest of everything that decides the order. Positions that were saved under another fingerprint are invalid."""
    shards_digest: str
    """Digest of the names and sizes of the shards that have records, in their order."""
    content_digest: str
    """Digest of the contents of those shards."""
    transforms_digest: str
    """Digest of the files that transforms read; empty if the transforms read no file."""
    drawn_before_digest: str = ""
    """Digest of the records that another loader has drawn already; empty if no record is left out for this reason."""
    shards: tuple[str, ...]
    """Paths of the shards that have records, by shard number."""

    @property
    def facts(self) -> SourceFacts:
        """Return the facts about the source that the planner needs."""
        return SourceFacts(
            positions_per_epoch=self.positions_per_epoch,
            order_digest=self.fingerprint,
            shards_digest=self.shards_digest,
            content_digest=self.content_digest,
            transforms_digest=self.transforms_digest,
            drawn_before_digest=self.drawn_before_digest,
        )

    def give_way(self) -> None:
        """Release decoded blocks if all sources hold too much (``BlockMemory.is_over``) and no disk takes the rest."""
        ...

    def shard_at(self, position: int) -> int:
        """Return the number of the shard that holds the record at a position."""
        ...

    def place_at(self, position: int) -> tuple[str, str]:
        """Return the file of the record at a position and its name there; for joined records, only their shard."""
        ...

    def block_stop(self, position: int) -> int:
        """Return the first position after the block of a position.

        If a part of a block is damaged, the whole block is lost.
        """
        ...

    def decode_ahead(self, start: int, stop: int, without: tuple[int, ...] = ()) -> int:
        """Decode the blocks for reads from ``start`` to ``stop`` in advance, so that the reads wait for no store.

        At most two blocks are held: the block of ``start``, and the next block if ``stop`` lies beyond the first.

        Returns:
            The position up to which reads find their blocks decoded.

        Raises:
            IntegrityError, UnavailableError: As for ``read``.
        """
        ...

    def read(self, start: int, stop: int, without: tuple[int, ...] = ()) -> SampleBlock:
        """Return the samples of the positions from ``start`` to ``stop``, which may span epochs.

        Records of the shards ``without`` keep their positions but give no sample; they are not read.

        Returns:
            The same samples in every process, no matter how a range is divided into reads.

        Raises:
            IntegrityError: A record or shard cannot be decoded, or has changed since the source was opened.
            UnavailableError: The store did not answer.
            ValueError: ``start`` is negative or after ``stop``.
        """
        ...
