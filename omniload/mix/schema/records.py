"""What a mix file says of the records of a source of any type: their order, and what becomes of bad ones."""

from typing import Literal, TypeAlias

from pydantic import Field

from omniload.base.config import StrictModel
from omniload.base.settings.quantities import Count

__all__ = ["MOST_BLOCK_UNITS", "Dedupe", "OnError", "Overlong", "ShuffleConfig"]

Dedupe: TypeAlias = Literal["content", "key"]
"""What records are compared by."""
Overlong: TypeAlias = Literal["split", "truncate", "drop"]
"""What becomes of a document that is longer than a row: cut into pieces, cut off, or left out and counted."""

MOST_BLOCK_UNITS = 4_096
"""Units of a block at most."""


class OnError(StrictModel):
    """What happens to a record that cannot be decoded."""

    policy: Literal["raise", "skip"] = "raise"
    """``raise`` stops the run at the first one; ``skip`` counts it and goes on."""
    limit: Count = Field(default=100, ge=0, le=10**12)
    """With ``skip``: more than this many bad records in a source stop the run."""


class ShuffleConfig(StrictModel):
    """How far the order of a source departs from the order of its files."""

    method: Literal["none", "shards", "block", "units", "full"] = "block"
    """``none``: as stored. ``shards``: shards permuted. ``block``: shards permuted, then rows inside a block.
    ``units``: units of all shards permuted, then rows inside a block; not of JSON lines that are compressed.
    ``full``: all rows permuted, of a source of at most 4,096 units, which is decoded whole before its first sample."""
    block_units: int = Field(default=4, ge=1, le=MOST_BLOCK_UNITS)
    """Units (row groups, file ranges) whose rows are permuted together; they are held decoded, on the node's disk what
    is over ``loader.memory``."""

    def units_together(self, units: int) -> int:
        """Return how many of the ``units`` of a source are decoded together at most."""
        of_blocks = {"block": self.block_units, "units": self.block_units, "full": max(1, units)}
        return of_blocks.get(self.method, 1)
