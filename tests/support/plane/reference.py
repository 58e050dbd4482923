"""Sources in memory, and the digest of every step without any machine."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from omniload.base.ragged import Ragged, Ranges
from omniload.batch.digest import batch_digest
from omniload.batch.microbatch import IGNORE_LABEL, Batch, Microbatch
from omniload.batch.rows import build_rows, stops_with_next
from omniload.mix.columns import LOSS_MASK, LOSS_SPANS, SampleColumns, spans_of
from omniload.mix.config import MixConfig
from omniload.mix.edits.edit import Edit, SkipShard
from omniload.mix.edits.history import History
from omniload.mix.edits.stages import with_begun
from omniload.mix.samples import SampleTable
from omniload.mix.state import MixState
from omniload.plan.membership import Starved, membership_of
from tests.support.plane.builders import mask_of, tokens_of

__all__ = [
    "SHARDS",
    "known_ahead",
    "left_out_by",
    "read_range",
    "reference_digests",
    "shard_of",
]


SHARDS = 3
"""Shards of a source in memory; records are dealt to them in rotation."""


def read_range(
    source: int,
    epoch: Sequence[Sequence[int]],
    start: int,
    stop: int,
    without: Sequence[int] = (),
) -> tuple[SampleTable, SampleColumns]:
    """Read raw positions of a source in memory: ``epoch[i]`` are the sample lengths of record ``i``."""
    table = table_of(epoch, start, stop, without)
    keys = list(
        zip(
            table.positions_N.tolist(), table.subs_N.tolist(), table.lengths_N.tolist(), strict=True
        )
    )
    masks = [mask_of(source, *key) for key in keys]
    others = {} if not masks or masks[0] is None else {LOSS_MASK: Ragged.of(masks, np.bool_)}
    if others:
        table = replace(table, metadata={LOSS_SPANS: spans_of(others[LOSS_MASK])})
    tokens = Ragged.of([tokens_of(source, *key) for key in keys])
    return table, SampleColumns(tokens=tokens, others=others)


def table_of(
    epoch: Sequence[Sequence[int]],
    start: int,
    stop: int,
    without: Sequence[int] = (),
) -> SampleTable:
    """Return the samples of raw positions of a source in memory, without their tokens."""
    keys = [
        (position, sub, length)
        for position in range(start, stop)
        if not without or shard_of(epoch, position) not in without
        for sub, length in enumerate(epoch[position % len(epoch)])
    ]
    columns = np.asarray(keys, np.int64).reshape(-1, 3)
    return SampleTable(
        start=start,
        stop=stop,
        positions_N=columns[:, 0].copy(),
        subs_N=columns[:, 1].astype(np.int32),
        lengths_N=columns[:, 2].astype(np.int32),
    )


def shard_of(epoch: Sequence[object], position: int) -> int:
    """Return the shard of the record of a position."""
    return position % len(epoch) % SHARDS


def known_ahead(
    state: MixState,
    epochs: Sequence[Sequence[Sequence[int]]],
    count: int,
    left_out: Mapping[int, Sequence[int]] | None = None,
) -> list[SampleTable]:
    """Return ``count`` raw positions of metadata of every source, from its cursor on.

    In a shard that is left out, a record that has begun is drawn to its end. No other record of the shard is drawn.
    """
    tables = []
    for source, (epoch, (position, sub, token)) in enumerate(
        zip(epochs, state.cursors_S, strict=False)
    ):
        table = table_of(epoch, position, position + count)
        fresh = (table.positions_N > position) | (table.subs_N >= sub)
        if skipped := (left_out or {}).get(source):
            shards_N = np.array([shard_of(epoch, p) for p in table.positions_N.tolist()])
            is_begun_N = (table.positions_N == position) & (sub > 0 or token > 0)
            fresh &= ~np.isin(shards_N, skipped) | is_begun_N
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
    """Return the digest of every step without any machine: everything is known, and nothing is distributed."""
    history = mix if isinstance(mix, History) else History(mix)
    state, digests = MixState.start(len(history.base.names)), []
    records_S = [len(epoch) for epoch in epochs]
    for _ in range(num_steps):
        _, state = history.entered(state)
        # In a history that is known completely, every stage has begun already, and nothing needs to be found.
        history = with_begun(history, state, records_S)
        mix, state = history.entered(state)
        count, left_out = 64, left_out_by(history.edits, state.step, mix.names)
        while isinstance(
            membership := membership_of(mix, state, known_ahead(state, epochs, count, left_out)),
            Starved,
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


def left_out_by(edits: Sequence[Edit], step: int, names: Sequence[str]) -> dict[int, list[int]]:
    """Return the shards of each source that edits leave out at a step, found in all of the edits."""
    left_out: dict[int, list[int]] = {}
    for edit in edits:
        if not isinstance(edit.change, SkipShard) or edit.step > step:
            continue
        undone = [other for other in edits if other.undoes == edit.revision and other.step <= step]
        if not undone:
            left_out.setdefault(names.index(edit.change.source), []).append(edit.change.number)
    return left_out


def _mask_labels(rows: Microbatch) -> None:
    """Remove the labels that masks leave out, one after another, by the keys of their pieces."""
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
