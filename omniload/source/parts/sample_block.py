"""The samples of a range of positions; blocks of several reads, or of several readers, are joined into one.

Shape suffixes:
    N  samples
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from omniload.base.ragged import Ragged, Ranges
from omniload.mix.columns import column_kind, metadata_of
from omniload.mix.order import Span
from omniload.mix.samples import SampleTable
from omniload.source.columns import drained
from omniload.source.transforms.encoders import Samples

__all__ = ["BadOfSpan", "SampleBlock", "joined", "merged"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BadOfSpan:
    """The bad records of a span."""

    positions_N: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """Positions of the bad records, rising."""
    places: tuple[str, ...] = ()
    """File of each record, and its number in the file."""
    reason: str = ""
    """Fault of one of the records, or of a record that was decoded with them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleBlock:
    """The samples of the raw positions from ``table.start`` to ``table.stop``."""

    table: SampleTable
    """Metadata of the samples for the planner."""
    tokens: Ragged
    """Token ids (int32), one sequence per sample, in the order of the table."""
    others: Mapping[str, Ragged] = field(default_factory=dict)
    """Further columns by name, in the order of the table."""

    @classmethod
    def of(
        cls,
        span: Span,
        samples: Samples,
        positions_N: NDArray[np.int64],
        subs_N: NDArray[np.int32],
        bad: "BadOfSpan",
    ) -> "SampleBlock":
        """Return a block of the positions of a span, without empty samples."""
        tokens, others = samples.tokens, dict(samples.others)
        lengths_N = tokens.lengths_N.astype(np.int32)
        # An empty sample would be planned, but would fill no row.
        if not lengths_N.min(initial=1):
            given = np.flatnonzero(lengths_N)
            tokens, positions_N, subs_N = tokens.take(given), positions_N[given], subs_N[given]
            lengths_N = lengths_N[given]
            others = {name: column.take(given) for name, column in others.items()}
        return cls(
            table=SampleTable(
                start=span.start,
                stop=span.stop,
                positions_N=positions_N,
                subs_N=subs_N,
                lengths_N=lengths_N,
                metadata=metadata_of(others),
                bad_N=bad.positions_N,
                reason=bad.reason,
                places=bad.places,
            ),
            tokens=tokens,
            others=others,
        )

    @property
    def skipped(self) -> int:
        """Number of records among the positions that could not be decoded and were left out."""
        return len(self.table.bad_N)

    @classmethod
    def empty(cls, start: int, stop: int) -> "SampleBlock":
        """Return a block of positions that give no sample."""
        return cls(
            table=_table(start, stop, [], {}),
            tokens=Ragged(values_V=np.empty(0, np.int32), offsets=np.zeros(1, np.int64)),
        )


def joined(blocks: list[SampleBlock], start: int, stop: int) -> SampleBlock:
    """Join blocks of rising positions into one block of the positions from ``start`` to ``stop``."""
    if not blocks:
        return SampleBlock.empty(start, stop)
    # Most reads lie within one block, which needs no copy.
    if len(blocks) == 1 and (blocks[0].table.start, blocks[0].table.stop) == (start, stop):
        return blocks[0]
    # A block without a sample may lack the further columns, like a unit that has no sample in the token cache.
    given = [block for block in blocks if len(block.table)] or blocks[:1]
    return SampleBlock(
        table=_table(start, stop, [block.table for block in blocks], given[0].table.metadata),
        tokens=drained([block.tokens for block in given], np.dtype(np.int32)),
        others={
            name: drained([block.others[name] for block in given], column_kind(name).dtype)
            for name in given[0].others
        },
    )


def merged(blocks: Sequence[SampleBlock]) -> SampleBlock:
    """Merge blocks that several readers have read for the same positions.

    Each record comes from one reader. A reader that had no unit has the tokens as its only column.
    """
    first = blocks[0].table
    given = [block for block in blocks if len(block.table)]
    bad_N = np.concatenate([block.table.bad_N for block in blocks])
    places = [place for block in blocks for place in block.table.places]
    in_order = np.argsort(bad_N)
    bad_N, in_places = bad_N[in_order], tuple(places[i] for i in in_order.tolist())
    reason = _reason_of([block.table for block in blocks])
    if not given:
        # A reader that had a unit knows the further columns, even if no reader has a sample.
        widest = max(blocks, key=lambda block: len(block.others))
        return replace(
            widest, table=replace(widest.table, bad_N=bad_N, reason=reason, places=in_places)
        )
    positions_N = np.concatenate([block.table.positions_N for block in given])
    order_N = np.argsort(positions_N, kind="stable")  # samples of one record stay in their order
    tokens = Ranges.of([block.tokens for block in given]).take(order_N).packed()
    others = {
        name: Ranges.of([block.others[name] for block in given], column_kind(name).dtype.type)
        .take(order_N)
        .packed()
        for name in given[0].others
    }
    subs_N = np.concatenate([block.table.subs_N for block in given])[order_N]
    return SampleBlock(
        table=SampleTable(
            start=first.start,
            stop=first.stop,
            positions_N=positions_N[order_N],
            subs_N=subs_N,
            lengths_N=tokens.lengths_N.astype(np.int32),
            metadata=metadata_of(others),
            bad_N=bad_N,
            reason=reason,
            places=in_places,
        ),
        tokens=tokens,
        others=others,
    )


def _reason_of(tables: Sequence[SampleTable]) -> str:
    return next((table.reason for table in reversed(tables) if table.reason), "")


def _table(
    start: int, stop: int, tables: Sequence[SampleTable], known: Mapping[str, Ragged]
) -> SampleTable:
    """Join tables; each table that has samples has the metadata ``known``."""
    nothing = np.empty(0, np.int32)
    return SampleTable(
        start=start,
        stop=stop,
        positions_N=np.concatenate(
            [np.empty(0, np.int64), *(table.positions_N for table in tables)]
        ),
        subs_N=np.concatenate([nothing, *(table.subs_N for table in tables)]),
        lengths_N=np.concatenate([nothing, *(table.lengths_N for table in tables)]),
        bad_N=np.concatenate([np.empty(0, np.int64), *(table.bad_N for table in tables)]),
        reason=_reason_of(tables),
        places=tuple(place for table in tables for place in table.places),
        metadata={
            name: drained(
                [table.metadata[name] for table in tables if len(table)] or [column],
                column.values_V.dtype,
            )
            for name, column in known.items()
        },
    )
