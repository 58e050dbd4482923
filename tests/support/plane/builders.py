"""Small mixes, tables, pieces and plans, with sensible defaults for all values."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omniload.base.ragged import Ragged, Ranges
from omniload.base.state import sealed
from omniload.batch.microbatch import Microbatch
from omniload.batch.rows import build_rows, stops_with_next
from omniload.machine.messages import PublishPlans, ReleaseSteps
from omniload.machine.planner import Planner
from omniload.mix.columns import column_kind
from omniload.mix.config import MixConfig
from omniload.mix.fingerprint import SourceFacts, fingerprint_of
from omniload.mix.pieces import PieceTable
from omniload.mix.samples import SampleTable
from omniload.mix.schema.packing.source_packs import SourcePack
from omniload.mix.state import MixState
from omniload.plan.cost import QuadraticCost, row_costs
from omniload.plan.place_tree import ClientPlaceTree
from omniload.plan.records import StepPlan
from omniload.plan.world import World

__all__ = [
    "PACKS",
    "a_microbatch",
    "a_mix",
    "a_plan",
    "a_planner",
    "a_table",
    "costs_of_packed_rows",
    "mask_of",
    "pieces_of",
    "released_by",
    "resealed",
    "some_facts",
    "tokens_of",
    "with_overlong",
    "with_packs",
]


PACKS: tuple[Mapping[str, str], ...] = (
    *({"rows": "alone"}, {"rows": "own"}, {"cut": "never"}, {"cut": "allow"}),
    *({"cut": "never", "rows": "own"}, {"cut": "allow", "rows": "own"}),
)
"""All packing options of a source."""


def a_mix(
    *,
    sources: Mapping[str, Mapping[str, Any]] | Sequence[str] = ("web", "code"),
    weights: Mapping[str, float] | None = None,
    rows: int = 4,
    length: int = 32,
    micro_rows: int = 2,
    pack: Mapping[str, Any] | None = None,
    mix: Mapping[str, Any] | None = None,
    **changes: Any,
) -> MixConfig:
    """Return a mix of two token sources, four rows of 32 tokens a step; other top-level keys as they are."""
    if not isinstance(sources, Mapping):
        sources = {
            name: {"type": "parquet", "path": f"{name}/*.parquet", "tokens": "tokens"}
            for name in sources
        }
    stages = [{"from_step": 0, "weights": dict(weights or dict.fromkeys(sources, 1.0))}]
    return MixConfig.model_validate(
        {
            "version": 1,
            "seed": 7,
            "sources": dict(sources),
            "mix": ({} if "amounts" in (mix or {}) else {"stages": stages}) | dict(mix or {}),
            "pack": {"length": length} | dict(pack or {}),
            "batch": {"tokens": rows * length, "micro_tokens": micro_rows * length},
            "runtime": {"prefetch_steps": 4},
        }
        | changes
    )


def costs_of_packed_rows(num: int, *, length: int = 8_192, seed: int = 0) -> NDArray[np.float64]:
    """Return the costs of full rows of long-tailed documents, which end at the end of a row."""
    rng = np.random.default_rng(seed)
    ends = np.cumsum(np.clip(rng.lognormal(6.5, 1.4, num * length // 100), 1, length).astype(int))
    bounds = np.union1d(ends, np.arange(num + 1) * length)
    bounds = bounds[bounds <= num * length]
    lengths_P = np.diff(bounds)
    offsets = np.searchsorted(bounds, np.arange(num + 1) * length)
    return row_costs(QuadraticCost(768.0, 1.0)(lengths_P), offsets)


def with_overlong(mix: MixConfig, given: Sequence[str | None]) -> MixConfig:
    """Return a mix whose sources have their own setting for long documents, or leave it to the mix."""
    sources = {
        name: source.model_copy(update={"overlong": overlong})
        for (name, source), overlong in zip(mix.sources.items(), given, strict=True)
    }
    return mix.model_copy(update={"sources": sources})


def with_packs(mix: MixConfig, given: Sequence[Mapping[str, str] | None]) -> MixConfig:
    """Return a mix whose sources have their own packing, or leave it to the mix."""
    sources = {
        name: source.model_copy(update={"pack": pack and SourcePack.model_validate(pack)})
        for (name, source), pack in zip(mix.sources.items(), given, strict=True)
    }
    return mix.model_copy(update={"sources": sources})


def a_table(lengths: Sequence[int], *, start: int = 0) -> SampleTable:
    """Return the metadata of one sample for each raw position from ``start`` on."""
    count = len(lengths)
    return SampleTable(
        start=start,
        stop=start + count,
        positions_N=np.arange(start, start + count, dtype=np.int64),
        subs_N=np.zeros(count, np.int32),
        lengths_N=np.asarray(lengths, np.int32).reshape(count),
    )


def pieces_of(*rows: Sequence[int]) -> PieceTable:
    """Return pieces from rows of ``source, position, sub, start, stop, size``."""
    return PieceTable.from_rows(rows)


def resealed(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state whose digest fits, as anyone who tampers with a state can make."""
    return sealed({key: value for key, value in state.items() if key != "blake2b"})


@lru_cache(maxsize=1 << 14)
def tokens_of(source: int, position: int, sub: int, length: int) -> np.ndarray:
    """Return the tokens of a sample; each token shows the sample that it belongs to."""
    key = (source * 1_000_003 + position * 10_007 + sub * 101) % 2_000_000
    tokens = (key * 1000 + np.arange(length)).astype(np.int32)
    tokens.flags.writeable = False
    return tokens


@lru_cache(maxsize=1 << 14)
def mask_of(source: int, position: int, sub: int, length: int) -> np.ndarray | None:
    """Return which tokens of a sample are trained on; ``None`` if its source has no mask, as every other one."""
    if source % 2 == 0:
        return None
    places = np.arange(length) + position + 3 * sub
    return (places % 5 < 2) | (places % 7 == 0)


def a_plan(
    rows: Sequence[Sequence[Sequence[int]]],
    *,
    dp_ranks: Sequence[int] | None = None,
    microbatches: Sequence[int] | None = None,
    **changes: Any,
) -> StepPlan:
    """Return a plan of ``rows``, each a list of pieces; by default all rows are in one microbatch of rank 0."""
    pieces = pieces_of(*[piece for row in rows for piece in row])
    dp_ranks = [0] * len(rows) if dp_ranks is None else dp_ranks
    microbatches = [0] * len(rows) if microbatches is None else microbatches
    defaults = {
        "step": 0,
        "pieces": pieces,
        "row_offsets": np.cumsum([0, *map(len, rows)]).astype(np.int64),
        "dp_ranks_R": np.asarray(dp_ranks, np.int32),
        "microbatches_R": np.asarray(microbatches, np.int32),
        "num_microbatches": max(microbatches, default=0) + 1,
        "imbalance": 1.0,
        "bound": 1.0,
        "tokens_S": tuple(
            np.bincount(pieces.sources_P, weights=pieces.lengths_P, minlength=2)
            .astype(int)
            .tolist()
        ),
        "loss_tokens": int((stops_with_next(pieces) - pieces.starts_P).sum()) - len(pieces),
    }
    return StepPlan(**(defaults | changes))


def a_microbatch(
    rows: Sequence[Sequence[Sequence[int]]],
    *,
    length: int,
    scored: bool = False,
    own: Sequence[str] = (),
) -> Microbatch:
    """Return built rows of the pieces' own tokens (see ``tokens_of``); a score is the sample's position.

    Columns ``own``, by their internal names, have a value for each token: the token.
    """
    pieces = pieces_of(*[piece for row in rows for piece in row])
    stops = stops_with_next(pieces).tolist()
    fetched = Ragged.of(
        [
            tokens_of(source, position, sub, size)[start:stop]
            for (source, position, sub, start, _, size), stop in zip(
                pieces.rows(), stops, strict=True
            )
        ]
    )
    scores = Ragged.of(
        [np.array([row[1]] if row[3] == 0 else []) for row in pieces.rows()], np.float32
    )
    return build_rows(
        pieces,
        np.cumsum([0, *map(len, rows)]).astype(np.int64),
        Ranges.of([fetched]),
        length=length,
        others_K=({"scores": Ranges.of([scores], np.float32)} if scored else {})
        | {
            name: Ranges.of(
                [replace(fetched, values_V=fetched.values_V.astype(column_kind(name).dtype))]
            )
            for name in own
        },
    )


def some_facts(
    records: Sequence[int], order: str = "aa", shards: str = "cc", content: str = "ee"
) -> list[SourceFacts]:
    """Return the findings about sources with these numbers of records."""
    return [
        SourceFacts(
            positions_per_epoch=count,
            order_digest=order,
            shards_digest=shards,
            content_digest=content,
        )
        for count in records
    ]


def a_planner(
    mix: MixConfig | None = None,
    *,
    dp: int = 1,
    cp: int = 1,
    epoch: Sequence[int] | None = None,
    state: MixState | None = None,
    **changes: Any,
) -> Planner:
    """Return a planner of ``a_mix()`` for one rank at step 0, with 1000 records in every source."""
    mix = mix or a_mix()
    epoch = [1000] * len(mix.names) if epoch is None else epoch
    defaults = {
        "mix": mix,
        "world": World(tree=ClientPlaceTree.of(dp=dp, cp=cp)),
        "records_S": epoch,
        "state": state or MixState.start(len(mix.names)),
        "fingerprint": fingerprint_of(mix, some_facts(epoch)[: len(mix.names)]),
    }
    return Planner(**(defaults | changes))


def released_by(commands):
    """Return the steps up to which each constructor may release its steps, from the commands of a planner."""
    steps = []
    for command in commands:
        if isinstance(command, ReleaseSteps):
            steps.append(command.step)
        elif isinstance(command, PublishPlans):
            steps.append(command.released_to)
    return steps
