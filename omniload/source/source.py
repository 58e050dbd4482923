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
    facts: SourceFacts
    """Facts that the planner needs. Positions that were saved under another ``order_digest`` are invalid."""
    shards: tuple[str, ...]
    """Paths of the shards that have records, by shard number."""

    @property
    def positions_per_epoch(self) -> int:
        """Number of records of the source."""
        return self.facts.positions_per_epoch

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
