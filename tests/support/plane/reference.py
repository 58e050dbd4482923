"""Sources in memory, and the digest of every step without any machine."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from omniload.base.ragged import Ragged, Ranges
from omniload.batch.digest import batch_digest
from omniload.batch.microbatch import IGNORE_LABEL, Batch, Microbatch
from omniload.batch.rows import build_rows, stops_with_next
from omniload.mix.columns import LOSS_MASK, LOSS_SPANS, SampleColumns, spans_of
from omniload.mix.config import MixConfig
from omniload.mix.edits.history import History
from omniload.mix.samples import SampleTable
from omniload.mix.state import MixState
from omniload.plan.membership import Starved, membership_of
from tests.support.plane.builders import mask_of, tokens_of

__all__ = ["known_ahead", "read_range", "reference_digests"]


def read_range(
    source: int, epoch: Sequence[Sequence[int]], start: int, stop: int
) -> tuple[SampleTable, SampleColumns]:
    """Read raw positions of a source in memory: ``epoch[i]`` are the sample lengths of record ``i``."""
    keys = [
        (position, sub, length)
        for position in range(start, stop)
        for sub, length in enumerate(epoch[position % len(epoch)])
    ]
    columns = np.asarray(keys, np.int64).reshape(-1, 3)
    masks = [mask_of(source, *key) for key in keys]
    others = {} if not masks or masks[0] is None else {LOSS_MASK: Ragged.of(masks, np.bool_)}
    table = SampleTable(
        start=start,
        stop=stop,
        positions_N=columns[:, 0].copy(),
        subs_N=columns[:, 1].astype(np.int32),
        lengths_N=columns[:, 2].astype(np.int32),
        metadata={LOSS_SPANS: spans_of(others[LOSS_MASK])} if others else {},
    )
    tokens = Ragged.of([tokens_of(source, *key) for key in keys])
    return table, SampleColumns(tokens=tokens, others=others)


def known_ahead(
    state: MixState, epochs: Sequence[Sequence[Sequence[int]]], count: int
) -> list[SampleTable]:
    """Return ``count`` raw positions of metadata of every source, from its cursor on."""
    tables = []
    for source, (epoch, (position, sub, _)) in enumerate(
        zip(epochs, state.cursors_S, strict=False)
    ):
        table, _ = read_range(source, epoch, position, position + count)
        fresh = (table.positions_N > position) | (table.subs_N >= sub)
        tables.append(
            SampleTable(
                start=table.start,
                stop=table.stop,
                positions_N=table.positions_N[fresh],
                subs_N=table.subs_N[fresh],
                lengths_N=table.lengths_N[fresh],
            )
        )
    return tables


def reference_digests(
    mix: MixConfig | History, epochs: Sequence[Sequence[Sequence[int]]], *, num_steps: int
) -> list[int]:
    """Return the digest of every step without any machine: everything is known, nothing is moved."""
    history = mix if isinstance(mix, History) else History(mix)
    state, digests = MixState.start(len(history.base.names)), []
    for _ in range(num_steps):
        mix, state = history.entered(state)
        count = 64
        while isinstance(
            membership := membership_of(mix, state, known_ahead(state, epochs, count)), Starved
        ):
            count *= 2
        pieces = membership.pieces
        rows = [
            tokens_of(source, position, sub, size)[start:stop]
            for (source, position, sub, start, _, size), stop in zip(
                pieces.rows(), stops_with_next(pieces).tolist(), strict=True
            )
        ]
        fetched = Ranges.of([Ragged.of(rows)])
        microbatch = build_rows(pieces, membership.row_offsets, fetched, length=mix.pack.length)
        _mask_labels(microbatch)
        digests.append(batch_digest(_whole(state.step, microbatch)))
        state = membership.after
    return digests


def _mask_labels(rows: Microbatch) -> None:
    """Take out the labels that masks leave out, one after another, by the keys of their pieces."""
    labels, sources = rows.labels_RT.reshape(-1), rows.source_ids_RT.reshape(-1)
    keys = iter(rows.keys_K4.tolist())
    for begin, end in pairwise(rows.cu_seqlens.tolist()):
        if sources[begin] < 0:
            continue
        source, position, sub, first = next(keys)
        mask = mask_of(source, position, sub, first + end - begin + 1)
        if mask is not None:
            labels[begin:end][~mask[first + 1 :]] = IGNORE_LABEL


def _whole(step: int, microbatch: object) -> Batch:
    return Batch(
        step=step,
        microbatches=(microbatch,),  # type: ignore[arg-type]
        loss_tokens=0,
        imbalance=1.0,
        bound=1.0,
    )
