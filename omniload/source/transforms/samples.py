"""Samples on their way from records to the source's block, and how text becomes them.

Shape suffixes:
    N  records, each a sample or none
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from typing_extensions import override

from omniload.base.ragged import Ragged
from omniload.source.tokenize import Tokenizer

__all__ = ["Encoder", "PlainEncoder", "Samples"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """One sample a record; an empty one is none."""

    tokens: Ragged
    """Token ids (int32)."""
    others: Mapping[str, Ragged] = field(default_factory=dict)
    """Further columns by name; an aligned one has the lengths of ``tokens``."""
    bad_N: NDArray[np.bool_] | None = None
    """True where a record could not be made a sample, which is then empty; ``None`` where all could."""
    reason: str = ""
    """What is wrong with the first bad record."""


class Encoder(Protocol):
    """Turns the records of a source of text into samples."""

    def encode(self, texts: pa.Array) -> Samples:
        """Return the sample of each record, whatever others stand beside it."""
        ...


class PlainEncoder(Encoder):
    """Tokenises a document as it is."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @override
    def encode(self, texts: pa.Array) -> Samples:
        return Samples(tokens=self._tokenizer.encode(texts))
