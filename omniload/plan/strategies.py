"""Strategies: how the rows of a step are dealt to ranks and microbatches.

A strategy is a function from the rows of a step, a ``DGraph`` of metadata, to a
``Placement``. A mix file names one, and never a module::

    balance: {strategy: in_order}

A user's own is found by its name among the entry points ``omniload.strategies`` of what
is installed, a cost function among ``omniload.costs``. Those below are written as a
user writes hers. A strategy that reads tags of samples itself names them in an attribute
``of``, like a cost.

Which rows a step has is settled before a strategy is asked, so no strategy can change what
is trained on. What it returns is checked: a placement that loses or doubles a row, or
leaves a rank without work, is refused.

Source:
    OVERLORD / Omniload / MegaScale-Data, arXiv 2504.09844, on orchestration strategies.

Shape suffixes:
    R  rows        P  pieces        S  sources
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from omniload.base.errors import ConfigError
from omniload.base.settings.registry import FAILURES, registered
from omniload.mix.columns import NO_COLUMNS
from omniload.mix.config import BalanceConfig, MixConfig
from omniload.plan.balance_methods import BalanceMethod, imbalance_of
from omniload.plan.cost import CostFunction, QuadraticCost, require_costs, row_costs
from omniload.plan.costs.declared import (
    columns_of,
    columns_read_by,
    cost_of,
    tags_of_no_source,
    tags_read,
)
from omniload.plan.dgraph import DGraph
from omniload.plan.images.table import ImageTable
from omniload.plan.place_tree import ClientPlaceTree
from omniload.plan.placement import Placement
from omniload.plan.records import PieceFacts, PieceTags, StepPlan, of_documents

__all__ = [
    "BUILT_IN",
    "PlacementRequest",
    "Strategy",
    "balanced",
    "by_length",
    "columns_read",
    "costs_of_rows",
    "deals_images",
    "doubts_of_balance",
    "hybrid",
    "in_order",
    "placed_by",
    "require_balance",
    "require_strategy",
    "strategy_of",
    "tags_of_samples",
]

_STRATEGIES = "omniload.strategies"
"""Group of entry points."""


# The defaults of balance.encoder_linear and encoder_quadratic in a mix file.
_ENCODER = QuadraticCost(768.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """The input of a strategy."""

    tree: ClientPlaceTree
    """The trainers' topology."""
    step: int
    """Number of the step."""
    microbatches: int
    """Number of microbatches of every data-parallel rank."""
    rows_per_microbatch: int
    """Largest number of rows of one microbatch."""
    cost: CostFunction
    """The cost that the mix file declares."""
    cost_columns: tuple[str, ...] = ("lengths",)
    """Columns of metadata to call the cost with."""
    method: BalanceMethod = "greedy_swap"
    """The balancing algorithm that the mix file declares."""
    images: ImageTable | None = None
    """The images of the rows, if there are any."""
    encoder_cost: CostFunction = _ENCODER
    """Cost of encoding an image, by its number of patches."""
    source_tags: Sequence[Mapping[str, str]] = ()
    """Tags of each source, by its number in the column ``sources``."""

    def distributed(self, rows: DGraph) -> DGraph:
        """Return ``rows`` with their buckets declared: the data-parallel ranks and their microbatches."""
        return rows.distribute(
            "dp", microbatches=self.microbatches, max_count=self.rows_per_microbatch
        )


class Strategy(Protocol):
    """Deals the rows of a step; the same rows and request give the same placement."""

    def __call__(self, rows: DGraph, request: PlacementRequest, /) -> Placement:
        """Return where every row goes: its dp rank as bucket, and its microbatch there.

        Args:
            rows: The rows of a step; a column of metadata has a value for each of their pieces,
                ``lengths`` and ``sources`` always, ``tags.NAME`` and ``columns.NAME`` where the cost reads them, or an
                attribute ``of`` of this function names them.
            request: The ranks, the microbatches, and what the mix file says of balance.
        """
        ...


def balanced(rows: DGraph, request: PlacementRequest, /) -> Placement:
    """Give every rank, and every microbatch of it, the same work: the default."""
    costed = request.distributed(rows).cost(request.cost, of=request.cost_columns)
    return costed.balance(request.method).broadcast_at("tp").plan(request.tree)


def in_order(rows: DGraph, request: PlacementRequest, /) -> Placement:
    """Deal rows in the order of the step, as loaders without balance do."""
    return balanced(rows, replace(request, method="none"))


def by_length(rows: DGraph, request: PlacementRequest, /) -> Placement:
    """Deal rows by their longest document, longest first, in turns: grouping by length.

    Rows of alike documents meet at the same place of every rank, so ranks wait less for
    one another than in order, and more than where the cost is balanced.
    """
    assert rows.row_offsets is not None, "the rows of a step have boundaries"
    counts_R = np.diff(rows.row_offsets)
    longest_R = np.zeros(len(rows), np.int64)
    filled = counts_R > 0
    longest_R[filled] = np.maximum.reduceat(
        rows.columns["lengths"].astype(np.int64), rows.row_offsets[:-1][filled]
    )
    turn_R = np.empty(len(rows), np.int64)
    turn_R[np.argsort(-longest_R, kind="stable")] = np.arange(len(rows))
    dp = request.tree.size_of("dp")
    buckets_R, rounds_R = turn_R % dp, turn_R // dp
    rows_of_B = np.bincount(buckets_R, minlength=dp)
    # Spread, not filled one after another: a microbatch without a row is refused while there are enough.
    microbatches_R = rounds_R * request.microbatches // np.maximum(rows_of_B[buckets_R], 1)
    costed = request.distributed(rows).cost(request.cost, of=request.cost_columns)
    return costed.deal(buckets_R, microbatches_R).broadcast_at("tp").plan(request.tree)


def hybrid(rows: DGraph, request: PlacementRequest, /) -> Placement:
    """Give every rank the same work of both modules: rows over DP for the backbone, images over WORLD for the encoder.

    The paper's hybrid balance of vision-language models. Embeddings then travel from where an image was
    encoded to where its row is. Images of a microbatch are encoded before it is run, so they are dealt
    microbatch by microbatch; the rank with the least behind it gets the most. Ranks that share rows, along cp,
    tp or pp, encode images each of its own.
    """
    backbone = balanced(rows, request)
    images, tree = request.images, request.tree
    if images is None:
        return backbone
    assert rows.row_offsets is not None, "the rows of a step have boundaries"
    microbatches_I = backbone.microbatches_N[images.rows_I(rows.row_offsets)]
    encoders_I = np.zeros(len(images), np.int32)
    work_W = np.zeros(tree.world_size)
    for microbatch in range(request.microbatches):
        mine = np.flatnonzero(microbatches_I == microbatch)
        encoder = (
            images.graph_of(mine)
            .distribute("world")
            .cost(request.encoder_cost, "encoder", of=("patches",))
            .balance(request.method)
            .plan(tree)
        )
        loads_W = encoder.loads_BM[:, 0]
        rank_of_W = np.empty(len(loads_W), np.int32)
        # Buckets of images are anybody's until here: what one microbatch leaves uneven the next makes up for.
        rank_of_W[np.argsort(-loads_W, kind="stable")] = np.argsort(work_W, kind="stable")
        encoders_I[mine] = rank_of_W[encoder.buckets_N]
        work_W[rank_of_W] += loads_W
    by_module = {**backbone.imbalance_of_module, "encoder": imbalance_of(work_W)}
    return replace(backbone, encoders_I=encoders_I, imbalance_of_module=MappingProxyType(by_module))


BUILT_IN: Mapping[str, Strategy] = MappingProxyType(
    {"balanced": balanced, "by_length": by_length, "hybrid": hybrid, "in_order": in_order}
)
"""Strategies by the name that a mix file gives."""


def strategy_of(name: str) -> Strategy:
    """Return the strategy of a name.

    Raises:
        ConfigError: None is registered, several are, or it cannot be imported.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    return cast("Strategy", registered(_STRATEGIES, name, tuple(BUILT_IN)).function)


def deals_images(name: str) -> bool:
    """Return whether a strategy may deal images separately from rows: ``hybrid``, or a user's."""
    return name == "hybrid" or name not in BUILT_IN


def columns_read(balance: BalanceConfig) -> tuple[str, ...]:
    """Return the columns that a mix file's cost reads, followed by further ones that its strategy reads.

    Raises:
        ConfigError: As for ``strategy_of`` and ``cost_of``.
    """
    return tuple(column for read in _columns_by_reader(balance).values() for column in read)


def _columns_by_reader(balance: BalanceConfig) -> dict[str, tuple[str, ...]]:
    _, of_cost = cost_of(balance)
    said = f"balance.strategy {balance.strategy!r}"
    of_strategy = columns_read_by(strategy_of(balance.strategy), said, ())
    return {"cost": of_cost, "strategy": of_strategy}


def tags_of_samples(mix: MixConfig) -> tuple[str, ...]:
    """Return the tags of samples that a mix's cost and strategy read, as columns are known inside.

    Raises:
        ConfigError: The mix has no such column in its batches; or as for ``columns_read``.
    """
    return tags_read(mix, _columns_by_reader(mix.balance))


def doubts_of_balance(mix: MixConfig) -> list[str]:
    """Return what a check says of a balance that can be dealt by, and likely not as it was meant.

    Raises:
        ConfigError: As for ``columns_read``.
    """
    return tags_of_no_source(mix, _columns_by_reader(mix.balance))


def costs_of_rows(
    mix: MixConfig, plan: StepPlan, tags: PieceTags = NO_COLUMNS
) -> NDArray[np.float64]:
    """Return what each row of a step costs by the mix file.

    Args:
        mix: The mix.
        plan: The step.
        tags: The tags of its samples that costs and strategies read.

    Raises:
        ConfigError: The cost is a user's and fails, or asks for a column that the step has not.
    """
    cost, wanted = cost_of(mix.balance)
    # As in a real step: a strategy that deals images gets a table of them even in a step without images.
    images = plan.image_table
    if images is None and deals_images(mix.balance.strategy):
        images = ImageTable.empty()
    facts = PieceFacts(images=images, documents=plan.documents, tags=tags)
    costed = of_documents(plan.pieces, plan.row_offsets, facts)
    tags_S = [source.tags for source in mix.sources.values()]
    pieces = costed.pieces
    columns = {"lengths": pieces.lengths_P} | columns_of(costed, tags_S, wanted)
    try:
        costs_P = require_costs(cost, columns, wanted, "backbone")
    except FAILURES as error:
        raise ConfigError(
            f"balance.cost {mix.balance.cost!r} failed on {len(pieces)} pieces: {type(error).__name__}: {error}; mend "
            "it, or use 'quadratic'"
        ) from error
    return row_costs(costs_P, costed.row_offsets)


def require_strategy(balance: BalanceConfig) -> None:
    """Refuse a strategy or a cost that nothing installed registers, before a step needs it.

    Raises:
        ConfigError: As for ``strategy_of`` and ``cost_of``.
    """
    for key, found in (
        ("strategy", partial(strategy_of, balance.strategy)),
        ("cost", partial(cost_of, balance)),
    ):
        try:
            found()
        except ConfigError as error:
            raise ConfigError(f"balance.{key}: {error}") from error


def require_balance(mix: MixConfig) -> None:
    """Refuse what ``require_strategy`` does, and a cost or strategy that reads what no batch of the mix brings.

    Raises:
        ConfigError: Says which.
    """
    require_strategy(mix.balance)
    tags_of_samples(mix)


def placed_by(strategy: Strategy, name: str, rows: DGraph, request: PlacementRequest) -> Placement:
    """Run a strategy on the rows of a step, and return its placement after checking that it is complete.

    Args:
        strategy: The strategy.
        name: Its name, for messages.
        rows: The rows.
        request: What the strategy knows besides the rows.

    Raises:
        ConfigError: The placement loses, repeats or invents a row, or overfills or leaves out a microbatch; or the
            strategy itself failed, with its own error as the cause.
    """
    # Tests hold ours to the same; a look at every plan would cost each step.
    ours = name in BUILT_IN and isinstance(request.cost, QuadraticCost)
    if ours:
        return strategy(rows, request)
    who = f"strategy {name!r} at step {request.step}, with {len(rows)} rows,"
    if name in BUILT_IN:
        # If one of our strategies fails, the cause is the user's cost, which it calls.
        called = getattr(request.cost, "__name__", type(request.cost).__name__)
        who = (
            f"cost {called!r}, by which {name!r} deals the {len(rows)} rows of step {request.step},"
        )
    remedy = f"mend it, or choose one of {sorted(BUILT_IN)} and the cost 'quadratic'"
    shown = None if request.images is None else request.images.read_only()
    try:
        placement = strategy(rows, replace(request, images=shown))
    except FAILURES as error:
        raise ConfigError(f"{who} failed: {type(error).__name__}: {error}; {remedy}") from error
    if (fault := next(_faults(placement, rows, request), None)) is not None:
        raise ConfigError(f"{who} was refused: {fault}; {remedy}")
    encoders_I = placement.encoders_I
    # Copies: a strategy that fills one array in every step would change plans that ranks have not taken yet.
    return replace(
        placement,
        buckets_N=placement.buckets_N.astype(np.int32),
        microbatches_N=placement.microbatches_N.astype(np.int32),
        encoders_I=None if encoders_I is None else encoders_I.astype(np.int32),
    )


def _faults(placement: object, rows: DGraph, request: PlacementRequest) -> Iterator[str]:
    """Say what is wrong with a placement that a stranger's function made."""
    if not isinstance(placement, Placement):
        yield f"it returned {type(placement).__name__}, not the Placement that DGraph.plan gives"
        return
    num, dp, microbatches = len(rows), request.tree.size_of("dp"), request.microbatches
    columns = [
        ("row", num, "bucket", placement.buckets_N, dp),
        ("row", num, "microbatch", placement.microbatches_N, microbatches),
    ]
    if placement.encoders_I is not None:
        images, world = request.images, request.tree.world_size
        num_images = 0 if images is None else len(images)
        columns.append(("image", num_images, "rank of the tree", placement.encoders_I, world))
    if not np.array_equal(placement.members_N, np.arange(num)):
        yield f"its {len(placement.members_N)} rows are not the {num} of the step, each once and in order"
    for member, wanted, what, column, limit in columns:
        if (found := _numbers_in(column)) != wanted:
            yield f"it gives {found} of {wanted} {member}s a {what}, by whole numbers; every {member} goes somewhere"
        elif wanted and not 0 <= column.min() <= column.max() < limit:
            at = int(((column < 0) | (column >= limit)).argmax())
            yield f"{member} {at} goes to {what} {column[at]} of {limit}, numbered from 0"
    # Reached only with whole numbers in range, because the caller reports the first fault.
    places_R = placement.buckets_N.astype(np.int64) * microbatches + placement.microbatches_N
    counts = np.bincount(places_R, minlength=dp * microbatches)
    most, least = int(counts.argmax()), int(counts.argmin())
    if counts[most] > request.rows_per_microbatch:
        rank, microbatch = divmod(most, microbatches)
        yield (
            f"microbatch {microbatch} of dp rank {rank} has {counts[most]} rows, "
            f"more than {request.rows_per_microbatch}"
        )
    if num >= dp * microbatches and not counts[least]:
        rank, microbatch = divmod(least, microbatches)
        yield f"microbatch {microbatch} of dp rank {rank} has no row, though there are enough"


def _numbers_in(column: object) -> int:
    """Return how many whole numbers a column holds; none where it is no column of them."""
    # A rank of 0.5 lies within the limits, and no rank would ask for that row.
    if not isinstance(column, np.ndarray) or column.ndim != 1:
        return 0
    return len(column) if np.issubdtype(column.dtype, np.integer) else 0
