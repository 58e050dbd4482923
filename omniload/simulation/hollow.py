"""Samples and batches of which only the sizes are there.

Tokens are one number, shown as often as there are tokens: a step of a billion of them takes no memory,
and arrays say what it would take. What a machine does with positions, pieces and rows is what it does in a run.

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
    """A source whose samples are as long as those that were measured, over and over."""

    def __init__(self, source: int, costs: SourceCosts, *, shift: int = 0) -> None:
        """Begin ``shift`` records into what was measured, and into the block that is read first.

        Sources come to their next blocks each in a step of its own then, as those of a job do that is under way.
        """
        self._source = source
        self.into_block = shift % costs.block_positions
        """Records of its first block that lie before position 0."""
        self._counts_P = np.asarray(costs.counts, np.int64)
        # Less whole rounds: it goes by a seed, which may be larger than arrays take.
        self._shift = shift % len(self._counts_P)
        self._firsts_P = np.cumsum(self._counts_P) - self._counts_P
        self._lengths_N = np.asarray(costs.lengths, np.int32)

    def table(self, start: int, stop: int) -> SampleTable:
        """Return what a loader would report of a range of positions."""
        # Past what was measured it begins again: a source of a billion records is like its first two thousand.
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
        """Return a range as it is read."""
        table = self.table(start, stop)
        block = SampleRange(table, _ragged(table.lengths_N))
        return SamplesRead(source=self._source, block=block)


def _ragged(lengths_N: NDArray[np.integer[Any]]) -> Ragged:
    offsets = np.concatenate(([0], np.cumsum(lengths_N, dtype=np.int64)))
    return Ragged(values_V=hollow(int(offsets[-1])), offsets=offsets)


def hollow_columns(lengths_N: NDArray[np.integer[Any]]) -> SampleColumns:
    """Return a loader's answer of so many tokens for each range."""
    return SampleColumns(tokens=_ragged(lengths_N))


def hollow_rows(
    pieces: PieceTable,
    row_offsets: NDArray[np.int64],
    fetched_K: Ranges,
    *,
    length: int,
    others_K: Mapping[str, Ranges],  # noqa: ARG001 -- a hollow source has tokens alone
) -> Microbatch:
    """Lay pieces out in rows of ``length`` tokens, as ``build_rows`` does; only bounds and sizes are made.

    A piece for which other tokens came than were planned is a fault of a machine.
    """
    assert len(fetched_K) == len(pieces), "every piece was fetched"
    assert (fetched_K.lengths_N >= pieces.lengths_P).all(), "and all of it"
    rows = len(row_offsets) - 1
    ends_K = np.cumsum(pieces.lengths_P, dtype=np.int64)
    begins_R = np.concatenate(([0], ends_K))[row_offsets]
    of_row_K = np.repeat(np.arange(rows), np.diff(row_offsets))
    bounds_K = ends_K - begins_R[of_row_K] + of_row_K * length
    # Each row's end too: padding counts as a document, and a full row's end is a piece's already.
    bounds = np.union1d(bounds_K, np.arange(rows + 1) * length)
    return Microbatch(
        tokens_RT=hollow(rows, length),
        cu_seqlens=bounds.astype(np.int32),
        sources_D=hollow(len(bounds) - 1, dtype=np.int16),
        next_D=hollow(len(bounds) - 1),
        keys_K4=hollow(len(pieces), 4, dtype=np.int64),
    )


def size_of_batch(batch: Batch) -> int:
    """Return the bytes that a batch takes where its tokens are there."""
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
