"""Joins the documents of a unit end to end, and cuts them into sequences of one length.

::

    unit        d0      d1  d2        d3   d4             in the order of the file
    sequences   |s0      |s1      |s2      |s3 |          of N tokens; the last of a unit may be short
    begin in    d0       d1       d2       d3             a record gives the sequences that begin in it

The position of a record stays the same, and its sequences depend only on its unit: not on the order, the rank or the
epoch, unless documents themselves depend on the position or are left out of the first epoch. A read makes the sequences
of a whole block, once for all its positions.

Shape suffixes:
    R  records of the block      Q  sequences      N  some of its records
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from omniload.base.errors import IntegrityError
from omniload.base.ragged import Ragged, numbers_of, offsets_of
from omniload.mix.columns import DOCUMENT_STARTS, LOSS_MASK, starts_in
from omniload.mix.order import Span
from omniload.mix.pieces import SUB_LIMIT
from omniload.mix.schema.transforms import ConcatTransform
from omniload.source.block import Block
from omniload.source.block_memory import BlockMemory, HeldBlock
from omniload.source.columns import Layer
from omniload.source.parts.sample_block import BadOfSpan, SampleBlock
from omniload.source.parts.share import Share
from omniload.source.transforms.encoders import Samples
from omniload.source.transforms.pipeline import Pipeline

__all__ = ["Sequences", "concatenated", "sequences_of"]

_TOKENS = "tokens"
_TOGETHER = 512
"""Texts that are tokenised at once, so that their tokens fit memory that the process has already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """The sequences of a block, by the record in which each begins."""

    held: HeldBlock
    firsts_R: NDArray[np.int64]
    """First sequence of each record, followed by the number of sequences, ``[R + 1]``."""
    skipped_R: NDArray[np.bool_]
    """Records that could not be decoded or tokenised."""

    def of_span(
        self,
        span: Span,
        share: Share,
        bad_of: Callable[[NDArray[np.int64], NDArray[np.int64]], BadOfSpan],
    ) -> SampleBlock:
        """Return the samples of one share of a span; ``bad_of`` describes bad rows, given their positions."""
        rows_N, positions_N = numbers_of(share.rows), share.positions_N(span.start)
        firsts_N = self.firsts_R[rows_N]
        counts_N = self.firsts_R[rows_N + 1] - firsts_N
        at_Q = np.repeat(np.arange(len(counts_N)), counts_N)
        subs_Q = np.arange(len(at_Q)) - (np.cumsum(counts_N) - counts_N)[at_Q]
        others = self.held.take(firsts_N[at_Q] + subs_Q)
        is_bad_N = self.skipped_R[rows_N]
        return SampleBlock.of(
            span,
            Samples(tokens=others.pop(_TOKENS), others=others),
            positions_N[at_Q],
            subs_Q.astype(np.int32),
            bad_of(rows_N[is_bad_N], positions_N[is_bad_N]),
        )


def concatenated(samples: Samples, config: ConcatTransform) -> tuple[Samples, NDArray[np.int64]]:
    """Join samples end to end, and cut them into sequences without copying tokens.

    Args:
        samples: Documents with aligned columns only; empty documents are ignored.
        config: Tokens of a sequence, of which the last may have fewer, and whether documents stay separate. If they do,
            the column ``document_starts`` has the starts of documents inside a sequence. No mask then trains on the
            first token of a document, which nothing before it predicts.

    Returns:
        The sequences, and the number of the document in which each begins, never falling, ``[Q]``.
    """
    offsets = samples.tokens.offsets
    begin, stop = int(offsets[0]), int(offsets[-1])
    bounds = np.append(np.arange(begin, stop, config.tokens), stop)
    # From the right: among documents that begin at the same place, all but the last are empty.
    owners_Q = np.searchsorted(offsets, bounds[:-1], side="right") - 1

    def cut(column: Ragged) -> Ragged:
        return Ragged(values_V=column.values_V[begin:stop], offsets=bounds - begin)

    others = {name: cut(column) for name, column in samples.others.items()}
    if config.documents == "apart":
        # Among documents that begin at the same place, all but one are empty.
        starts = np.unique(offsets[:-1][samples.tokens.lengths_N > 0]) - begin
        others[DOCUMENT_STARTS] = starts_in(starts, bounds - begin)
        if (mask := others.get(LOSS_MASK)) is not None and mask.values_V[starts].any():
            values_V = mask.values_V.copy()
            values_V[starts] = False
            others[LOSS_MASK] = replace(mask, values_V=values_V)
    return Samples(tokens=cut(samples.tokens), others=others), owners_Q


def sequences_of(
    block: Block,
    whole: tuple[Span, Share],
    left_R: NDArray[np.bool_] | np.bool_,
    pipeline: Pipeline,
    *,
    memory: BlockMemory,
    judge: Callable[[NDArray[np.int64], Samples], None],
) -> Sequences:
    """Join the documents of each unit of a block.

    Args:
        block: Records of the block, or samples from a token cache.
        whole: All positions of the block, and the share of its units.
        left_R: Records that take part, among those that give samples at all.
        pipeline: Makes samples of records.
        memory: Memory for the sequences.
        judge: Receives records that could not be made into samples; raises if bad records are not allowed.

    Raises:
        IntegrityError: From ``judge``, or because more sequences begin in a record than the limit.
    """
    assert pipeline.concat is not None, "documents are joined"
    together = _TOGETHER if pipeline.takes_text else max(1, len(block.usable_R))
    config, (span, share) = pipeline.concat, whole
    positions_R = np.empty(len(block.usable_R), np.int64)
    positions_R[numbers_of(share.rows)] = share.positions_N(span.start)
    counts_R = np.zeros(len(block.usable_R), np.int64)
    skipped_R = block.bad_R.copy()
    with memory.writing() as writer:
        for begin, stop in block.ranges():
            rows_N = begin + np.flatnonzero((block.usable_R & left_R)[begin:stop])
            laid: dict[str, Layer] = {}
            # At least once, because the columns must be known even for a unit without a document.
            parts = range(0, max(1, len(rows_N)), together)
            for at in parts:
                rows = rows_N[at : at + together]
                # Lent, because the sequences are stored elsewhere before the block is released.
                made = pipeline.of(block.encoded(rows, pipeline, lent=True), positions_R[rows])
                if made.bad_N is not None:
                    judge(rows, made)
                    skipped_R[rows[made.bad_N]] = True
                _lay(laid, made, len(parts))
            joined, owners_Q = concatenated(_samples_of(laid), config)
            joined = pipeline.of_sequences(joined)
            given = np.flatnonzero(joined.tokens.lengths_N)
            columns: Mapping[str, Ragged] = {_TOKENS: joined.tokens, **joined.others}
            if len(given) < len(owners_Q):
                columns = {name: column.take(given) for name, column in columns.items()}
            writer.append(columns)
            counts_R += np.bincount(rows_N[owners_Q[given]], minlength=len(counts_R))
        held = memory.hold(writer.finish())
    if (most := int(counts_R.max(initial=0))) > SUB_LIMIT:
        raise IntegrityError(
            f"{most:,} sequences of {config.tokens} tokens begin in one record, and a record gives at most "
            f"{SUB_LIMIT:,}; raise tokens of the transform concat"
        )
    return Sequences(held=held, firsts_R=offsets_of(counts_R), skipped_R=skipped_R)


def _lay(laid: dict[str, Layer], part: Samples, parts: int) -> None:
    """Append all columns of a part of a unit."""
    for name, column in {_TOKENS: part.tokens, **part.others}.items():
        if name not in laid:
            # The size if all parts are like the first, and a margin.
            likely_bytes = column.values_V.nbytes * parts * 17 // 16
            laid[name] = Layer(likely_bytes, column.values_V.dtype)
        laid[name].lay(column)


def _samples_of(laid: Mapping[str, Layer]) -> Samples:
    """Return the documents of a unit whose columns were all laid end to end."""
    others = {name: column.finish() for name, column in laid.items()}
    return Samples(tokens=others.pop(_TOKENS), others=others)
