"""The strategy that a mix file names, run on the rows of a step.

The strategies themselves, chains of the paper's primitives, stand in ``omniload.plan.strategies``.
"""

from dataclasses import replace
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from omniload.batch.rows import stops_with_next
from omniload.mix.config import MixConfig
from omniload.mix.state import MixState
from omniload.plan.cost import QuadraticCost
from omniload.plan.dgraph import DGraph
from omniload.plan.images.dealt import ImagePlan
from omniload.plan.images.table import ImageTable
from omniload.plan.membership import Membership
from omniload.plan.place_tree import ClientPlaceTree
from omniload.plan.placement import num_microbatches_of
from omniload.plan.records import PieceFacts, StepPlan, of_documents
from omniload.plan.strategies import (
    PlacementRequest,
    columns_of,
    cost_of,
    deals_images,
    placed_by,
    strategy_of,
)

__all__ = ["dealt_by_chain", "place", "place_again"]

_LENGTHS_ALONE = PieceFacts()


class _Dealt(TypedDict):
    """What a plan says of ranks; everything else in it is the same whatever ranks there are."""

    num_microbatches: int
    dp_ranks_R: NDArray[np.int32]
    microbatches_R: NDArray[np.int32]
    imbalance: float
    bound: float
    images: ImagePlan | None


def place(
    mix: MixConfig,
    tree: ClientPlaceTree,
    state: MixState,
    membership: Membership,
    facts: PieceFacts = _LENGTHS_ALONE,
) -> StepPlan:
    """Deal the rows of a step to data-parallel ranks and microbatches, balanced by cost."""
    pieces = membership.pieces
    lengths = pieces.lengths_P
    return StepPlan(
        step=state.step,
        pieces=pieces,
        row_offsets=membership.row_offsets,
        tokens_S=tuple(
            np.bincount(pieces.sources_P, weights=lengths, minlength=len(mix.names))
            .astype(np.int64)
            .tolist()
        ),
        # A label is the token behind: all of a piece and the one behind its cut, less its first.
        loss_tokens=int((stops_with_next(pieces) - pieces.starts_P).sum())
        - len(pieces)
        - facts.labels_left_out,
        mix_revision=state.mix_revision,
        image_table=facts.images,
        documents=facts.documents,
        **_dealt(mix, tree, state.step, membership, facts),
    )


def place_again(mix: MixConfig, tree: ClientPlaceTree, plan: StepPlan) -> StepPlan:
    """Return the plan of the same step for other ranks, as it would be had they been there from the start."""
    # What is in the step stays as it was drawn, and so does its digest: only places change.
    facts = PieceFacts(images=plan.image_table, documents=plan.documents)
    return replace(plan, **_dealt(mix, tree, plan.step, plan, facts))


def _dealt(
    mix: MixConfig,
    tree: ClientPlaceTree,
    step: int,
    membership: Membership | StepPlan,
    facts: PieceFacts,
) -> _Dealt:
    """Return where each row and image goes, how many microbatches there are for it, and how even that is."""
    dp, num_rows = tree.size_of("dp"), len(membership.row_offsets) - 1
    num_microbatches = num_microbatches_of(num_rows, dp, mix.rows_per_microbatch)
    # The chain takes longer than the rest of a small step's plan: where there is one bucket, and no image to deal,
    # none is run.
    if dp * num_microbatches > 1 or deals_images(mix.balance.strategy):
        return dealt_by_chain(mix, tree, step, membership, num_microbatches, facts)
    # One array for both: neither is ever written to.
    everything = np.zeros(num_rows, np.int32)
    return {
        "num_microbatches": num_microbatches,
        "dp_ranks_R": everything,
        "microbatches_R": everything,
        "imbalance": 1.0,
        "bound": 1.0,
        "images": None,
    }


def dealt_by_chain(
    mix: MixConfig,
    tree: ClientPlaceTree,
    step: int,
    membership: Membership | StepPlan,
    num_microbatches: int,
    facts: PieceFacts = _LENGTHS_ALONE,
) -> _Dealt:
    """Return the rank and microbatch of each row by the mix's strategy, how even that is, and where images go.

    A strategy that deals images does so in every step, in one without images too: loops need no case for it.

    Raises:
        ConfigError: The strategy is a user's and fails, or its placement is not whole.
    """
    pieces, name = membership.pieces, mix.balance.strategy
    if facts.images is None and deals_images(name):
        facts = replace(facts, images=ImageTable.empty())
    cost, cost_columns = cost_of(mix.balance)
    # To costs and strategies a document is a piece, and an image lies in a document.
    costed = of_documents(pieces, membership.row_offsets, facts)
    request = PlacementRequest(
        tree=tree,
        step=step,
        microbatches=num_microbatches,
        rows_per_microbatch=mix.rows_per_microbatch,
        cost=cost,
        cost_columns=cost_columns,
        method=mix.balance.method,
        images=costed.images,
        encoder_cost=QuadraticCost(mix.balance.encoder_linear, mix.balance.encoder_quadratic),
        source_tags=mix.tags_S,
    )
    columns = columns_of(costed.pieces, request.source_tags, cost_columns, costed.images)
    rows = DGraph.of_rows(costed.pieces.lengths_P, costed.row_offsets, columns)
    placement = placed_by(strategy_of(name), name, rows, request)
    planned = None
    if facts.images is not None and placement.encoders_I is not None:
        row_offsets, length = membership.row_offsets, mix.pack.length
        planned = ImagePlan.of(facts.images, pieces, row_offsets, placement, length)
    return {
        "num_microbatches": num_microbatches,
        "images": planned,
        "dp_ranks_R": placement.buckets_N,
        "microbatches_R": placement.microbatches_N,
        "imbalance": placement.imbalance,
        "bound": placement.bound,
    }
