"""Runs the strategy of a mix on the rows of a step, with the cost of the mix.

The strategies themselves, chains of the paper's primitives, are in ``omniload.plan.strategies``.
"""

from dataclasses import dataclass, field, replace
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from omniload.batch.rows import stops_with_next
from omniload.machine.messages import ReadTimes
from omniload.mix.columns import NO_COLUMNS
from omniload.mix.config import MixConfig
from omniload.mix.edits.edit import MOST_EDITS, Edit, FitCost
from omniload.mix.edits.history import History
from omniload.mix.journal.times import MeasuredTimes
from omniload.mix.state import MixState
from omniload.plan.cost import QuadraticCost
from omniload.plan.costs.declared import columns_of, cost_of
from omniload.plan.dgraph import DGraph
from omniload.plan.fitting import Unfitted, fitted_cost
from omniload.plan.images.dealt import ImagePlan
from omniload.plan.images.table import ImageTable
from omniload.plan.membership import Membership
from omniload.plan.place_tree import ClientPlaceTree
from omniload.plan.placement import num_microbatches_of
from omniload.plan.records import PieceFacts, PieceTags, StepPlan, of_documents
from omniload.plan.strategies import (
    PlacementRequest,
    columns_read,
    deals_images,
    placed_by,
    strategy_of,
)

__all__ = ["CostFits", "dealt_by_chain", "place", "place_again"]

_LENGTHS_ALONE = PieceFacts()
_LEAST_MOVE = 0.05
"""Least difference of a fitted cost from the present one, as the share of token pairs in the work; with less, rows
hardly move."""
_MOST_FITS = 256
"""Most fitted costs of a run; each is an edit, which every later state carries."""


class _Dealt(TypedDict):
    """The part of a plan that depends on the ranks."""

    num_microbatches: int
    dp_ranks_R: NDArray[np.int32]
    microbatches_R: NDArray[np.int32]
    imbalance: float
    bound: float
    microbatch_imbalance: float
    microbatch_bound: float
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
        # A label is the next token: the labels of a piece are its tokens and the one after its cut, without its first.
        loss_tokens=int((stops_with_next(pieces) - pieces.starts_P).sum())
        - len(pieces)
        - facts.labels_left_out,
        mix_revision=state.mix_revision,
        image_table=facts.images,
        documents=facts.documents,
        **_dealt(mix, tree, state.step, membership, facts),
    )


def place_again(
    mix: MixConfig, tree: ClientPlaceTree, plan: StepPlan, tags: PieceTags = NO_COLUMNS
) -> StepPlan:
    """Return the plan of the same step for other ranks, equal to a plan that was made for them in the first place.

    Args:
        mix: The mix of the step.
        tree: The new ranks.
        plan: The plan for the old ranks.
        tags: The tags of its samples that costs and strategies read; a plan does not contain them.
    """
    # What is in the step stays as it was drawn, and so does its digest: only places change.
    facts = PieceFacts(images=plan.image_table, documents=plan.documents, tags=tags)
    return replace(plan, **_dealt(mix, tree, plan.step, plan, facts))


def _dealt(
    mix: MixConfig,
    tree: ClientPlaceTree,
    step: int,
    membership: Membership | StepPlan,
    facts: PieceFacts,
) -> _Dealt:
    """Return the places of rows and images, the number of microbatches, and the imbalance."""
    dp, num_rows = tree.size_of("dp"), len(membership.row_offsets) - 1
    num_microbatches = num_microbatches_of(num_rows, dp, mix.rows_per_microbatch)
    # For a single bucket without images the chain is skipped; it takes longer than the rest of a small step's plan.
    if dp * num_microbatches > 1 or deals_images(mix.balance.strategy):
        return dealt_by_chain(mix, tree, step, membership, num_microbatches, facts)
    # One array serves both purposes, as neither is ever written to.
    everything = np.zeros(num_rows, np.int32)
    return {
        "num_microbatches": num_microbatches,
        "dp_ranks_R": everything,
        "microbatches_R": everything,
        "imbalance": 1.0,
        "bound": 1.0,
        "microbatch_imbalance": 1.0,
        "microbatch_bound": 1.0,
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
    """Return the rank and microbatch of each row by the mix's strategy, the imbalance, and the places of images.

    A strategy that deals images does so in every step, even in one without images, so loops need no special case.

    Raises:
        ConfigError: A user's strategy fails, or its placement is not complete.
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
    columns = columns_of(costed, request.source_tags, columns_read(mix.balance))
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
        "microbatch_imbalance": placement.microbatch_imbalance,
        "microbatch_bound": placement.microbatch_bound,
    }


@dataclass(slots=True, kw_only=True)
class CostFits:
    """Fits the cost to the times that ranks report, as often as the mix says.

    Measured times differ between two runs of a seed. So a fitted cost is an edit, which takes effect at a step that no
    rank has heard of. A resume, and a planner that takes over, therefore deal every step as before.
    """

    first: int
    """First step of this planner; earlier times may come from other processors."""
    _due: int | None = field(default=None, init=False)
    """Step from which times are read next; ``None`` before the first look."""
    _found: FitCost | None = field(default=None, init=False)
    """A fitted cost that waits for a step at which it can take effect."""

    def hear(self, history: History, times: MeasuredTimes) -> None:
        """Fit the cost to times; ignore a fit that differs little from the present cost."""
        fitted, balance = fitted_cost(times), history.latest.balance
        self._found = None
        if not balance.fit_every or isinstance(fitted, Unfitted):
            return
        held = fitted.pair_share_by(balance.linear, balance.quadratic)
        if abs(fitted.pair_share - held) >= _LEAST_MOVE:
            self._found = FitCost(
                linear=fitted.cost.linear,
                quadratic=fitted.cost.quadratic,
                measured=fitted.measured,
                residual=round(fitted.residual, 6),
            )

    def at(
        self, history: History, step: int, *, planned: int
    ) -> tuple[History, tuple[ReadTimes, ...]]:
        """Return the history with a newly fitted cost, and the request for times that is due, at the start of a step.

        Args:
            history: The mix and its edits.
            step: The step.
            planned: First step that neither this planner nor a lost one has planned; ranks may have earlier ones.
        """
        every = history.base.balance.fit_every
        if not every:
            return history, ()
        if self._found is not None and step == planned and _has_room(history, step):
            edit = Edit(revision=len(history.edits) + 1, step=step, change=self._found, stages=())
            history, self._found = replace(history, edits=(*history.edits, edit)), None
        if self._due is not None and step < self._due:
            return history, ()
        reads = () if self._due is None else (ReadTimes(first=self.first),)
        self._due = step + every
        return history, reads


def _has_room(history: History, step: int) -> bool:
    """Return whether the planner may add an edit of its own at a step."""
    # Only after all other edits, because an edit of a coming step assumes the edits that existed before it.
    if step < history.edited_to:
        return False
    waiting = sum(stage.waits for stage in history.base.mix.stages)
    fits = sum(isinstance(edit.change, FitCost) for edit in history.edits)
    return fits < _MOST_FITS and len(history.edits) < MOST_EDITS - waiting
