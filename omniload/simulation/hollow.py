"""Samples and batches that have only sizes.

The tokens are one number, repeated in a view, so that a step of a billion tokens takes no memory, but arrays report the
memory they would take. Machines handle positions, pieces and rows exactly as in a run.

Shape suffixes:
    N  samples      K  pieces      R  rows
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omniload.base.ragged import Ragged, Ranges
from omniload.batch.microbatch import Batch, Microbatch
from omniload.machine.held.blocks import SampleRange
from omniload.machine.source_loader import SamplesRead
from omniload.mix.columns import SampleColumns
from omniload.mix.pieces import PieceTable
from omniload.mix.samples import SampleTable
from omniload.simulation.profile import SourceCosts

__all__ = ["HollowSource", "hollow", "hollow_columns", "hollow_rows", "size_of_batch"]


def hollow(*shape: int, dtype: type[np.generic] = np.int32) -> NDArray[Any]:
    """Return zeros that take no memory."""
    return np.broadcast_to(np.zeros((), dtype), shape)


class HollowSource:
    """A source whose samples repeat the measured lengths over and over."""

    def __init__(self, source: int, costs: SourceCosts, *, shift: int = 0) -> None:
        """Begin ``shift`` records into the measured records, and into the first block.

        With different shifts, sources reach their next blocks in different steps, as in a job that is under way.
        """
        self._source = source
        self.into_block = shift % costs.block_positions
        """Records of its first block that precede position 0."""
        self._counts_P = np.asarray(costs.counts, np.int64)
        # Whole rounds are subtracted, because the number depends on a seed, which may be larger than arrays allow.
        self._shift = shift % len(self._counts_P)
        self._firsts_P = np.cumsum(self._counts_P) - self._counts_P
        self._lengths_N = np.asarray(costs.lengths, np.int32)

    def table(self, start: int, stop: int) -> SampleTable:
        """Return a loader's report of a range of positions."""
        # After the measured records it starts again: a source of a billion records is like its first two thousand.
        measured = (np.arange(start, stop) + self._shift) % len(self._counts_P)
        counts = self._counts_P[measured]
        positions_N = np.repeat(np.arange(start, stop), counts)
        ends = np.cumsum(counts)
        # Numbers of samples within their record, without a loop over records.
        subs_N = np.arange(len(positions_N)) - np.repeat(ends - counts, counts)
        return SampleTable(
            start=start,
            stop=stop,
            positions_N=positions_N,
            subs_N=subs_N.astype(np.int32),
            lengths_N=self._lengths_N[np.repeat(self._firsts_P[measured], counts) + subs_N],
        )

    def read(self, start: int, stop: int) -> SamplesRead:
        """Return a range as if it had been read."""
        table = self.table(start, stop)
        block = SampleRange(table, _ragged(table.lengths_N))
        return SamplesRead(source=self._source, block=block)


def _ragged(lengths_N: NDArray[np.integer[Any]]) -> Ragged:
    offsets = np.concatenate(([0], np.cumsum(lengths_N, dtype=np.int64)))
    return Ragged(values_V=hollow(int(offsets[-1])), offsets=offsets)


def hollow_columns(lengths_N: NDArray[np.integer[Any]]) -> SampleColumns:
    """Return a loader's answer with these numbers of tokens for each range."""
    return SampleColumns(tokens=_ragged(lengths_N))


def hollow_rows(
    pieces: PieceTable,
    row_offsets: NDArray[np.int64],
    fetched_K: Ranges,
    *,
    length: int,
    others_K: Mapping[str, Ranges],  # noqa: ARG001 -- a hollow source has only tokens
) -> Microbatch:
    """Lay pieces out in rows of ``length`` tokens, as ``build_rows`` does; only bounds and sizes are made.

    If other tokens arrive for a piece than were planned, a machine has a fault.
    """
    assert len(fetched_K) == len(pieces), "every piece was fetched"
    assert (fetched_K.lengths_N >= pieces.lengths_P).all(), "and all of it"
    rows = len(row_offsets) - 1
    ends_K = np.cumsum(pieces.lengths_P, dtype=np.int64)
    begins_R = np.concatenate(([0], ends_K))[row_offsets]
    of_row_K = np.repeat(np.arange(rows), np.diff(row_offsets))
    bounds_K = ends_K - begins_R[of_row_K] + of_row_K * length
    # Also at each row's end: padding counts as a document, and the end of a full row is already a piece's end.
    bounds = np.union1d(bounds_K, np.arange(rows + 1) * length)
    return Microbatch(
        tokens_RT=hollow(rows, length),
        cu_seqlens=bounds.astype(np.int32),
        sources_D=hollow(len(bounds) - 1, dtype=np.int16),
        next_D=hollow(len(bounds) - 1),
        keys_K4=hollow(len(pieces), 4, dtype=np.int64),
    )


def size_of_batch(batch: Batch) -> int:
    """Return the bytes that a batch would take with its tokens."""
    return sum(
        each.tokens_RT.nbytes
        + each.cu_seqlens.nbytes
        + each.sources_D.nbytes
        + each.next_D.nbytes
        + (0 if each.trained_RT is None else each.trained_RT.nbytes)
        + each.keys_K4.nbytes
        for each in batch.microbatches
        if isinstance(each, Microbatch)
    )
