"""The strategy that a mix file declares, as the chain of the paper's primitives.

The same chain can be written by hand against ``DGraph``; this is the one the planner runs.
"""

from typing import Any

import numpy as np

from omniload.batch.rows import stops_with_next
from omniload.mix.config import MixConfig
from omniload.mix.state import MixState
from omniload.plan.cost import QuadraticCost
from omniload.plan.dgraph import DGraph
from omniload.plan.membership import Membership
from omniload.plan.place_tree import ClientPlaceTree
from omniload.plan.placement import num_microbatches_of
from omniload.plan.records import StepPlan

__all__ = ["dealt_by_chain", "place"]


def place(
    mix: MixConfig, tree: ClientPlaceTree, state: MixState, membership: Membership
) -> StepPlan:
    """Deal the rows of a step to data-parallel ranks and microbatches, balanced by cost."""
    pieces = membership.pieces
    num_rows = len(membership.row_offsets) - 1
    num_microbatches = num_microbatches_of(num_rows, tree.size_of("dp"), mix.rows_per_microbatch)
    everything = np.zeros(num_rows, np.int32)
    dealt: dict[str, Any] = {
        "dp_ranks_R": everything,
        "microbatches_R": everything,
        "imbalance": 1.0,
        "bound": 1.0,
    }
    # The chain takes longer than the rest of a small step's plan: where there is one bucket, none is run.
    if tree.size_of("dp") * num_microbatches > 1:
        dealt = dealt_by_chain(mix, tree, membership, num_microbatches)
    lengths = pieces.lengths_P
    return StepPlan(
        step=state.step,
        pieces=pieces,
        row_offsets=membership.row_offsets,
        num_microbatches=num_microbatches,
        tokens_S=tuple(
            np.bincount(pieces.sources_P, weights=lengths, minlength=len(mix.names))
            .astype(np.int64)
            .tolist()
        ),
        loss_tokens=int((stops_with_next(pieces) - pieces.starts_P).sum()) - len(pieces),
        mix_revision=state.mix_revision,
        **dealt,
    )


def dealt_by_chain(
    mix: MixConfig, tree: ClientPlaceTree, membership: Membership, num_microbatches: int
) -> dict[str, Any]:
    """Return the rank and microbatch of each row by the chain of primitives, and how even that is."""
    placement = (
        DGraph.of_rows(membership.pieces.lengths_P, membership.row_offsets)
        .distribute("dp", microbatches=num_microbatches, max_count=mix.rows_per_microbatch)
        .cost(QuadraticCost(linear=mix.balance.linear, quadratic=mix.balance.quadratic))
        .balance(mix.balance.method)
        .broadcast_at("tp")
        .plan(tree)
    )
    return {
        "dp_ranks_R": placement.buckets_N,
        "microbatches_R": placement.microbatches_N,
        "imbalance": placement.imbalance,
        "bound": placement.bound,
    }
