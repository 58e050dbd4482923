"""What a rank trains on.

Shape suffixes:
    R  rows of the microbatch      T  tokens in a row
    D  documents (pieces) of all rows, in order; padding at a row's end counts as one
    K  pieces that hold samples, without the padding
    C  tokens in a context-parallel slice of a row
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omniload.base.ragged import Ragged, Ranges
from omniload.batch.encoding import EncoderShare

__all__ = ["IGNORE_LABEL", "Batch", "CpSlice", "Microbatch", "joined", "rows_of", "unshifted"]

IGNORE_LABEL = -100
"""Label of a token that predicts nothing, the value torch's cross entropy ignores."""


# Without slots: `cached_property` keeps what it makes in the dictionary of the instance.
@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """Packed rows with everything a varlen attention needs.

    Rows lie end to end: flattened, ``cu_seqlens`` bounds every document, and a row's
    padding is a document of its own, so the bounds always cover all ``R * T`` tokens.

    What follows from tokens and bounds is made when it is first read, and kept: labels, positions
    and source numbers would be three quarters of what travels to a rank.
    """

    tokens_RT: NDArray[np.int32]
    """Token ids; 0 in the padding."""
    cu_seqlens: NDArray[np.int32]
    """Boundaries of the documents in the flattened rows, ``[D + 1]``, from 0 to ``R * T``."""
    sources_D: NDArray[np.int16]
    """Number of the source of each document; -1 for the padding of a row."""
    next_D: NDArray[np.int32]
    """Label of the last token of each document: the token behind a cut, else ``IGNORE_LABEL``."""
    trained_RT: NDArray[np.bool_] | None = None
    """False where a sample's ``loss_mask`` leaves the label out; ``None`` where no sample has one."""
    keys_K4: NDArray[np.int64]
    """Source, position, sub and first token of every piece: the address of its bytes."""
    columns_K: Mapping[str, Ragged] = field(default_factory=dict)
    """Whole-sample columns by name, one sequence a piece; empty for a piece without its sample's first token."""
    encoding: EncoderShare | None = None
    """Images that this rank encodes, where a strategy deals them; they are not among ``columns_K`` then."""

    @cached_property
    def labels_RT(self) -> NDArray[np.int32]:
        """The next token of the same document, also across a cut.

        ``IGNORE_LABEL`` at its end, in the padding, and where the sample's ``loss_mask`` leaves that next token out.
        """
        tokens = self.tokens_RT.reshape(-1)
        labels = np.empty_like(tokens)
        labels[:-1] = tokens[1:]
        labels[self.cu_seqlens[1:] - 1] = self.next_D
        self._fill_padding(labels, IGNORE_LABEL)
        if self.trained_RT is not None:
            labels[~self.trained_RT.reshape(-1)] = IGNORE_LABEL
        return labels.reshape(self.tokens_RT.shape)

    @cached_property
    def positions_RT(self) -> NDArray[np.int32]:
        """Place of the token in its piece, from 0."""
        positions = np.arange(self.tokens_RT.size, dtype=np.int32)
        positions -= np.repeat(self.cu_seqlens[:-1], np.diff(self.cu_seqlens))
        self._fill_padding(positions, 0)
        return positions.reshape(self.tokens_RT.shape)

    @cached_property
    def source_ids_RT(self) -> NDArray[np.int16]:
        """Number of the source; -1 in the padding."""
        ids: NDArray[np.int16] = np.repeat(self.sources_D, np.diff(self.cu_seqlens))
        return ids.reshape(self.tokens_RT.shape)

    def _fill_padding(self, values: NDArray[np.int32], value: int) -> None:
        for at in np.flatnonzero(self.sources_D < 0).tolist():  # one of a row at most
            values[self.cu_seqlens[at] : self.cu_seqlens[at + 1]] = value

    @property
    def loss_mask_RT(self) -> NDArray[np.bool_]:
        """True where a label is predicted."""
        return np.not_equal(self.labels_RT, IGNORE_LABEL)

    @property
    def max_seqlen(self) -> int:
        """Longest document."""
        return int(np.diff(self.cu_seqlens).max(initial=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class CpSlice:
    """One cp peer's part of a microbatch."""

    tokens_RC: NDArray[np.int32]
    """Token ids."""
    labels_RC: NDArray[np.int32]
    """Labels: taken before slicing, so the last token of a slice still has its own."""
    positions_RC: NDArray[np.int32]
    """Places of the tokens in their pieces."""
    indices_C: NDArray[np.int64]
    """Columns of the row that the slice holds, in order."""
    cu_seqlens: NDArray[np.int32]
    """Document bounds of the whole rows: attention reaches beyond the slice."""
    sources_D: NDArray[np.int16]
    """Number of the source of each document; -1 for the padding of a row."""
    keys_K4: NDArray[np.int64]
    """Keys of all pieces of the whole rows."""
    columns_K: Mapping[str, Ragged] = field(default_factory=dict)
    """Whole-sample columns of the rows, as in a ``Microbatch``: all peers have them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """All microbatches of one rank in one step, and what the plan says of the whole step."""

    step: int
    """Number of the step, from 0."""
    microbatches: tuple[Microbatch | CpSlice, ...]
    """In the order they are to be run; slices of them where context parallelism shares the rows."""
    loss_tokens: int
    """Labels predicted in the whole step over all ranks: divide summed losses by it."""
    imbalance: float
    """Heaviest rank over the mean, by cost."""
    bound: float
    """Least possible ``imbalance`` for the rows of the step."""
    tokens_by_source: Mapping[str, int] = field(default_factory=dict)
    """Tokens of each source in the whole step over all ranks."""
    source_tags: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Tags of the sources that have any, by name: one table for all batches, whatever is in them."""


def rows_of(part: Microbatch | CpSlice, column: str) -> NDArray[Any]:
    """Return a column of tokens, whole or a slice of cp peers."""
    suffix = "RC" if isinstance(part, CpSlice) else "RT"
    rows: NDArray[Any] = getattr(part, f"{column}_{suffix}")
    return rows


def unshifted(labels_RT: NDArray[Any]) -> NDArray[Any]:
    """Return labels that a model which shifts by itself compares rightly.

    Such a model compares the logits of token ``t`` with the label of ``t + 1``: the label that
    belongs to ``t`` moves one to the right. The first column is compared with nothing, and the
    last label of a row (its document goes on in another row) has no place.
    """
    moved = np.full_like(labels_RT, IGNORE_LABEL)
    moved[:, 1:] = labels_RT[:, :-1]
    return moved


def joined(parts: Sequence[Microbatch | CpSlice]) -> Microbatch | CpSlice:
    """Return all rows as one part; the rows of the parts lie end to end."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    bounds = [np.zeros(1, np.int32)]
    end = 0
    for part in parts:
        bounds.append(part.cu_seqlens[1:] + end)
        end += int(part.cu_seqlens[-1])
    cu_seqlens = np.concatenate(bounds).astype(np.int32)
    columns_K = {
        name: Ranges.of([p.columns_K[name] for p in parts], column.values_V.dtype.type).packed()
        for name, column in first.columns_K.items()
    }
    if isinstance(first, CpSlice):
        slices = [p for p in parts if isinstance(p, CpSlice)]
        return CpSlice(
            tokens_RC=np.concatenate([rows_of(p, "tokens") for p in parts]),
            labels_RC=np.concatenate([rows_of(p, "labels") for p in parts]),
            positions_RC=np.concatenate([rows_of(p, "positions") for p in parts]),
            indices_C=first.indices_C,
            cu_seqlens=cu_seqlens,
            sources_D=np.concatenate([p.sources_D for p in slices]),
            keys_K4=np.concatenate([p.keys_K4 for p in slices]),
            columns_K=columns_K,
        )
    whole = [p for p in parts if isinstance(p, Microbatch)]
    return Microbatch(
        tokens_RT=np.concatenate([p.tokens_RT for p in whole]),
        cu_seqlens=cu_seqlens,
        sources_D=np.concatenate([p.sources_D for p in whole]),
        next_D=np.concatenate([p.next_D for p in whole]),
        trained_RT=_trained(whole),
        keys_K4=np.concatenate([p.keys_K4 for p in whole]),
        columns_K=columns_K,
    )


def _trained(parts: Sequence[Microbatch]) -> NDArray[np.bool_] | None:
    """Return which labels no mask leaves out; ``None`` where no part has a mask."""
    if all(part.trained_RT is None for part in parts):
        return None
    return np.concatenate(
        [
            np.ones(part.tokens_RT.shape, np.bool_) if part.trained_RT is None else part.trained_RT
            for part in parts
        ]
    )
