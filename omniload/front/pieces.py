"""Documents of packed rows one by one: what is to be known of each by name, not by its place in a row.

Shape suffixes:
    R  rows      T  tokens in a row      D  documents, with padding      K  pieces, without
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omniload.base.errors import ConfigError
from omniload.batch.microbatch import CpSlice, Microbatch

__all__ = ["Piece", "pieces_of"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """A document, or the part of one that lies in a row."""

    key: tuple[int, int, int, int]
    """Number of its source, position in the source's order, sub (of records that hold several samples), and the token
    of the document that it begins with: no other piece of a run has the same."""
    tokens: NDArray[np.int32]
    """Its tokens, without padding."""
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Columns of the whole sample, by name."""

    @property
    def source(self) -> int:
        """Number of its source: its place among ``source_names``, and in ``source_tags`` of the batch."""
        return self.key[0]


def pieces_of(part: Microbatch | CpSlice) -> list[Piece]:
    """Return the pieces of some rows, in their order.

    Raises:
        ConfigError: The rows are shared among cp peers.
    """
    if isinstance(part, CpSlice):
        raise ConfigError(
            f"cp peers share these rows, and this one has {part.tokens_RC.shape[1]} tokens of each: no document is "
            "whole; use cp 1"
        )
    tokens = part.tokens_RT.reshape(-1)
    bounds = part.cu_seqlens.tolist()
    holds_D = part.sources_D >= 0
    found = []
    for i, (document, key) in enumerate(
        zip(np.flatnonzero(holds_D).tolist(), part.keys_K4.tolist(), strict=True)
    ):
        source, position, sub, first = key
        found.append(
            Piece(
                key=(source, position, sub, first),
                # Copied: a prompt outlives the batch, whose memory is shared.
                tokens=tokens[bounds[document] : bounds[document + 1]].copy(),
                columns={name: column[i] for name, column in part.columns_K.items()},
            )
        )
    return found
