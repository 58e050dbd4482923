"""What keys of sources of several types may say: the size of a unit, and the type of token ids."""

from typing import Annotated, Literal

from pydantic import Field

from omniload.base.settings.quantities import Bytes

__all__ = ["LARGEST_UNIT_BYTES", "TokenType", "UnitBytes"]

LARGEST_UNIT_BYTES = 1 << 30
"""Bytes of a unit at most, which is decoded in memory at once."""
TokenType = Literal["uint8", "uint16", "uint32", "uint64", "int32", "int64"]
UnitBytes = Annotated[Bytes, Field(ge=1, le=LARGEST_UNIT_BYTES)]
