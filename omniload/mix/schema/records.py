"""What a mix file says of the records of a source of any type: their order, and what becomes of bad ones."""

from typing import Literal, TypeAlias

from pydantic import Field

from omniload.base.config import StrictModel
from omniload.base.settings.quantities import Count

__all__ = ["Dedupe", "OnError", "Overlong", "ShuffleConfig"]

Dedupe: TypeAlias = Literal["content", "key"]
"""What records are compared by."""
Overlong: TypeAlias = Literal["split", "truncate", "drop"]
"""What becomes of a document that is longer than a row: cut into pieces, cut off, or left out and counted."""


class OnError(StrictModel):
    """What happens to a record that cannot be decoded."""

    policy: Literal["raise", "skip"] = "raise"
    """``raise`` stops the run at the first one; ``skip`` counts it and goes on."""
    limit: Count = Field(default=100, ge=0, le=10**12)
    """With ``skip``: more than this many bad records in a source stop the run."""


class ShuffleConfig(StrictModel):
    """How far the order of a source departs from the order of its files."""

    method: Literal["none", "shards", "block"] = "block"
    """``none``: as stored. ``shards``: shards permuted. ``block``: shards permuted, then rows inside a block."""
    block_units: int = Field(default=4, ge=1, le=4096)
    """Units (row groups, file ranges) whose rows are permuted together; they are held in memory decoded."""
