"""The data that a rank trains on: packed rows, or a cp peer's slices of them.

Shape suffixes:
    R  rows of the microbatch      T  tokens in a row
    D  pieces of all rows, in order; padding at a row's end counts as one
    K  pieces that hold samples, without the padding
    C  tokens in a context-parallel slice of a row
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omniload.base.ragged import Ragged
from omniload.batch.absent import is_absent
from omniload.batch.encoding import EncoderShare
from omniload.batch.starts import positions_between, starts_inside, with_starts
from omniload.mix.columns import IGNORE_LABEL

__all__ = [
    "IGNORE_LABEL",
    "Batch",
    "CpSlice",
    "Microbatch",
    "aligned_of",
    "brings_labels",
    "rows_of",
    "source_ids_of",
]


# Without slots: `cached_property` keeps what it makes in the dictionary of the instance.
@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """Packed rows with everything a varlen attention needs.

    Rows lie end to end: flattened, ``cu_seqlens`` bounds every piece, and a row's padding is one of its own, so the
    bounds always cover all ``R * T`` tokens. A piece is a document, unless its column ``document_starts`` says where
    others begin inside: labels and positions leave none of them.

    What follows from tokens and bounds is made when it is first read, and kept: labels, positions
    and source numbers would be three quarters of what travels to a rank.
    """

    tokens_RT: NDArray[np.int32]
    """Token ids; 0 in the padding."""
    cu_seqlens: NDArray[np.int32]
    """Boundaries of the pieces in the flattened rows, ``[D + 1]``, from 0 to ``R * T``."""
    sources_D: NDArray[np.int16]
    """Number of the source of each piece; -1 for the padding of a row."""
    next_D: NDArray[np.int32]
    """Label of the last token of each piece: the token behind a cut, else ``IGNORE_LABEL``."""
    trained_RT: NDArray[np.bool_] | None = None
    """False where a sample's ``loss_mask`` leaves the label out; ``None`` where no sample has one."""
    keys_K4: NDArray[np.int64]
    """Source, position, sub and first token of every piece: the address of its bytes."""
    columns_K: Mapping[str, Ragged] = field(default_factory=dict)
    """Whole-sample columns by name, one sequence a piece; empty for a piece without its sample's first token."""
    aligned_RT: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Columns of yours by name, a value for each token; 0 in the padding."""
    encoding: EncoderShare | None = None
    """Images that this rank encodes, where a strategy deals them; they are not among ``columns_K`` then.

    On the way to ranks that share the rows it brings the shares of all of them; see ``own_part``."""
    label_tokens_RT: NDArray[np.int32] | None = None
    """Token ids for making labels, in a pipeline stage that has labels but no token ids; ``None`` elsewhere."""

    @cached_property
    def document_starts(self) -> NDArray[np.int32]:
        """Tokens of the flattened rows that documents inside pieces begin with, rising."""
        return starts_inside(self.cu_seqlens, self.sources_D, self.columns_K)

    @cached_property
    def labels_RT(self) -> NDArray[np.int32]:
        """The next token of the same document, also across a cut.

        ``IGNORE_LABEL`` at its end, in the padding, and where the sample's ``loss_mask`` leaves that next token out.
        """
        # First: a stage of a pipeline without labels says so, whether it has tokens or not.
        next_D = np.asarray(self.next_D)
        tokens_RT = self.tokens_RT if self.label_tokens_RT is None else self.label_tokens_RT
        tokens = tokens_RT.reshape(-1)
        labels = np.empty_like(tokens)
        # Shift all rows at once, across document bounds; the last token of each document is corrected below.
        labels[:-1] = tokens[1:]
        labels[self.cu_seqlens[1:] - 1] = next_D
        labels[self.document_starts - 1] = IGNORE_LABEL
        self._fill_padding(labels, IGNORE_LABEL)
        if self.trained_RT is not None:
            labels[~self.trained_RT.reshape(-1)] = IGNORE_LABEL
        return labels.reshape(self.tokens_RT.shape)

    @cached_property
    def positions_RT(self) -> NDArray[np.int32]:
        """Place of the token in its document, from 0. For a preference pair, its place in the pair."""
        positions = positions_between(with_starts(self.cu_seqlens, self.document_starts))
        self._fill_padding(positions, 0)
        return positions.reshape(self.tokens_RT.shape)

    @cached_property
    def source_ids_RT(self) -> NDArray[np.int16]:
        """Number of the source; -1 in the padding."""
        ids: NDArray[np.int16] = np.repeat(self.sources_D, np.diff(self.cu_seqlens))
        return ids.reshape(self.tokens_RT.shape)

    @property
    def max_seqlen(self) -> int:
        """Longest document."""
        # Padding counts: kernels size their work by the longest document among the bounds, whatever it is of.
        return int(np.diff(with_starts(self.cu_seqlens, self.document_starts)).max(initial=0))

    def _fill_padding(self, values: NDArray[np.int32], value: int) -> None:
        for at in np.flatnonzero(self.sources_D < 0).tolist():  # one of a row at most
            values[self.cu_seqlens[at] : self.cu_seqlens[at + 1]] = value

    @property
    def loss_mask_RT(self) -> NDArray[np.bool_]:
        """True where a label is predicted."""
        return np.not_equal(self.labels_RT, IGNORE_LABEL)


@dataclass(frozen=True, slots=True, kw_only=True)
class CpSlice:
    """One cp peer's part of a microbatch."""

    tokens_RC: NDArray[np.int32]
    """Token ids."""
    labels_RC: NDArray[np.int32]
    """Labels: taken before slicing, so the last token of a slice still has its own."""
    positions_RC: NDArray[np.int32]
    """Places of the tokens in their documents."""
    indices_C: NDArray[np.int64]
    """Columns of the row that the slice holds, in order."""
    cu_seqlens: NDArray[np.int32]
    """Bounds of the pieces of the whole rows: attention reaches beyond the slice."""
    sources_D: NDArray[np.int16]
    """Number of the source of each piece; -1 for the padding of a row."""
    keys_K4: NDArray[np.int64]
    """Keys of all pieces of the whole rows."""
    columns_K: Mapping[str, Ragged] = field(default_factory=dict)
    """Whole-sample columns of the rows, as in a ``Microbatch``: all peers have them."""
    aligned_RC: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Columns of yours by name, a value for each token of the slice."""
    encoding: EncoderShare | None = None
    """Images that this rank encodes, as in a ``Microbatch``; embeddings that come belong in its slice."""


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
    microbatch_imbalance: float = 1.0
    """Heaviest microbatch of all ranks over their mean, by cost."""
    microbatch_bound: float = 1.0
    """Least possible ``microbatch_imbalance`` for the rows of the step."""
    tokens_by_source: Mapping[str, int] = field(default_factory=dict)
    """Tokens of each source in the whole step over all ranks."""
    source_tags: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Tags of the sources that have any, by name: one table for all batches, whatever is in them."""


def rows_of(part: Microbatch | CpSlice, column: str) -> NDArray[Any]:
    """Return a column of tokens, whole or a slice of cp peers."""
    suffix = "RC" if isinstance(part, CpSlice) else "RT"
    rows: NDArray[Any] = getattr(part, f"{column}_{suffix}")
    return rows


def source_ids_of(part: Microbatch | CpSlice) -> NDArray[np.int16]:
    """Return the number of the source of each token of rows, whole or a slice of cp peers; -1 in the padding."""
    if isinstance(part, Microbatch):
        return part.source_ids_RT
    rows, columns = part.tokens_RC.shape
    if not rows:
        return np.empty((rows, columns), np.int16)
    # A slice has the bounds and sources of whole rows.
    ids: NDArray[np.int16] = np.repeat(part.sources_D, np.diff(part.cu_seqlens))
    return ids.reshape(rows, -1)[:, part.indices_C]


def brings_labels(part: Microbatch | CpSlice) -> bool:
    """Return whether rows have labels; only some pipeline stages have none."""
    return not is_absent(part.labels_RC if isinstance(part, CpSlice) else part.next_D)


def aligned_of(part: Microbatch | CpSlice) -> Mapping[str, NDArray[Any]]:
    """Return the columns of a user's own that have a value for each token, whole or a slice of cp peers."""
    return part.aligned_RC if isinstance(part, CpSlice) else part.aligned_RT
