"""The Data Constructor machine: builds the batches of the coming steps for its ranks, exactly as planned."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product
from typing import Self

import numpy as np
from numpy.typing import NDArray

from omniload.base.errors import StateError
from omniload.batch.encoding import EncoderShare
from omniload.batch.microbatch import Batch, Microbatch
from omniload.batch.rows import RowBuilder, build_rows, split_rows, stops_with_next
from omniload.batch.slices import slice_for_cp
from omniload.machine.images import ImageRequests
from omniload.machine.messages import ReleaseSteps, SliceRequest
from omniload.machine.plans.building import (
    BatchesBuilt,
    BuildSteps,
    Commands,
    FetchSlices,
    SlicesFetched,
    SlicesMissing,
)
from omniload.machine.plans.fences import Giving
from omniload.machine.steps import Rank, RanksTold
from omniload.mix.columns import (
    COLUMNS,
    IMAGE_COLUMNS,
    LOSS_MASK,
    ColumnRanges,
    joined_ranges,
)
from omniload.mix.config import MixConfig
from omniload.mix.pieces import PieceTable
from omniload.mix.sources import tags_of, values_per_patch_of
from omniload.plan.records import StepPlan
from omniload.plan.world import Edition, RanksServed

__all__ = ["DataConstructor"]


@dataclass(slots=True)
class _Pending:
    """Steps whose samples are being fetched."""

    plans: Sequence[StepPlan]
    dp_ranks: Sequence[int]
    """Ranks that the steps are built for."""
    pieces: PieceTable
    """Pieces of all steps, in step order."""
    order_K: NDArray[np.int64]
    """Indices of the pieces in the order of the requests."""
    images: Sequence[ImageRequests | None]
    """For each step, the images that are dealt separately from its rows; ``None`` where there are none."""
    edition: tuple[int, int]
    """Number of the edition of the plans."""

    @classmethod
    def of(
        cls, plans: Sequence[StepPlan], dp_ranks: Sequence[int], edition: tuple[int, int]
    ) -> "_Pending":
        pieces = PieceTable.concatenated([plan.pieces for plan in plans])
        images = [
            None if plan.images is None else ImageRequests.of(plan.images, dp_ranks)
            for plan in plans
        ]
        order_K = pieces.sources_P.argsort(kind="stable")
        return cls(plans, dp_ranks, pieces, order_K, images, edition)


@dataclass(slots=True, kw_only=True)
class DataConstructor:
    """Builds every step for ``dp_ranks`` and holds its batches until all of these ranks have taken them."""

    dp_ranks: Sequence[int]
    names: Sequence[str]
    """Source names, by number."""
    row_length: int
    """Tokens in a row."""
    cp_size: int = 1
    """Peers that share a data-parallel rank's rows."""
    columns: tuple[str, ...] = (LOSS_MASK,)
    """Columns that its ranks use in addition to the tokens; other columns are never copied."""
    tags: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Tags by source name, for sources that have any."""
    values_per_patch: int = 0
    """Values of a patch of its sources' images; 0 without images."""
    rows: RowBuilder = build_rows
    """Lays out rows; a simulation passes one that leaves tokens out."""
    generation: int = field(default=0, init=False)
    """Generation of the ranks that it serves."""
    told: RanksTold = field(init=False)
    """How far its ranks reported that they are."""
    giving: Giving = field(default_factory=Giving, init=False)
    """Which steps may be given out, and which were."""
    _pending: dict[tuple[int, ...], _Pending] = field(default_factory=dict, init=False)
    _built: dict[tuple[int, int], Batch] = field(default_factory=dict, init=False)
    _released_to: int = field(default=0, init=False)
    _own: frozenset[str] = field(init=False)
    """User-defined columns, with one value per token or one per sample."""

    def __post_init__(self) -> None:
        self._own = frozenset(self.columns) - COLUMNS.keys()
        self.told = RanksTold.of(self._ranks())

    @classmethod
    def of(cls, mix: MixConfig, dp_ranks: Sequence[int], *, cp_size: int = 1) -> Self:
        """Return the constructor that serves ``dp_ranks`` in a run of ``mix``."""
        return cls(
            dp_ranks=dp_ranks,
            names=mix.names,
            tags=tags_of(mix.sources),
            row_length=mix.pack.length,
            cp_size=cp_size,
            columns=mix.columns_used,
            values_per_patch=values_per_patch_of(mix.sources),
        )

    def handle(self, event: BuildSteps | SlicesFetched | SlicesMissing | ReleaseSteps) -> Commands:
        """Apply one event and return the commands to carry out, in order; none where slices stay missing."""
        match event:
            case BuildSteps(plans=plans, served=served, released_to=step):
                self._release(step)
                return (self._begin_steps(plans, served),)
            case SlicesFetched(steps=steps):
                # The answer is for an earlier set of ranks, or a repetition of one that was used already.
                if self._asked_for(event) is None:
                    return ()
                event = self.lay_out(event)
                assert event.rows is not None, "of steps that are under way"
                self._build(self._pending.pop(steps), event.slices, event.rows)
                return (BatchesBuilt(steps=steps),)
            case SlicesMissing():
                return self._ask_again(event)
            case ReleaseSteps(step=step):
                self._release(step)
                return ()

    def lay_out(self, fetched: SlicesFetched) -> SlicesFetched:
        """Return an answer with its rows laid out, which is most of the work of building. The machine does not change.

        So other threads may let the machine handle events meanwhile. Rows that are laid out for ranks that have left by
        then are dropped when the answer is handled.
        """
        pending = self._asked_for(fetched)
        if fetched.rows is not None or pending is None:
            return fetched
        return replace(fetched, rows=self._microbatches(pending, fetched.slices))

    def _asked_for(self, answer: SlicesFetched | SlicesMissing) -> _Pending | None:
        """Return the steps that an answer belongs to; ``None`` where nobody waits for it."""
        pending = self._pending.get(answer.steps)
        is_of_now = answer.generation == self.generation
        return pending if is_of_now and pending and pending.edition == answer.edition else None

    @property
    def num_steps(self) -> int:
        """Number of steps that are built and not released."""
        # Batches are stored by step and rank, and a step is built for all ranks together.
        return len(self._built) // max(1, len(self.dp_ranks))

    def has(self, step: int) -> bool:
        """Return whether ``step`` is built and may be given out."""
        return self._is_built(step) and self.giving.may_give(step)

    def _is_built(self, step: int) -> bool:
        # With more constructors than ranks, some constructors serve no rank.
        return bool(self.dp_ranks) and (step, self.dp_ranks[0]) in self._built

    def is_released(self, step: int) -> bool:
        """Return whether every rank has taken ``step``, so that it will not be built again."""
        return step < self._released_to

    def batch_of(self, step: int, dp_rank: int, cp_rank: int = 0, *, lends: bool = False) -> Batch:
        """Give out the batch of one rank and step; or lend it, until the rank confirms that it takes it.

        Raises:
            StateError: The step is not held: it was released, it is not built yet, or its plan may be taken back.
        """
        batch = self._built.get((step, dp_rank)) if self.has(step) else None
        if batch is None:
            held = sorted({key[0] for key in self._built})
            raise StateError(
                f"step {step} of dp rank {dp_rank} is not held (steps {held}, dp ranks {list(self.dp_ranks)}); "
                "a rank takes steps in order, each once"
            )
        if not lends:
            self.giving.gave(step)
        if self.cp_size == 1:
            return batch
        sliced = (
            slice_for_cp(m, cp_rank, self.cp_size)
            for m in batch.microbatches
            if isinstance(m, Microbatch)
        )
        return replace(batch, microbatches=tuple(sliced))

    def _release(self, step: int) -> None:
        # Never backwards: a planner that takes over repeats earlier releases.
        self._released_to = max(self._released_to, step)
        for key in [key for key in self._built if key[0] < step]:
            del self._built[key]

    def _ranks(self) -> Iterable[Rank]:
        return product(self.dp_ranks, range(self.cp_size))

    def _serve(self, served: RanksServed) -> bool:
        """Serve the ranks of a later world from now on; return whether these are the ranks being served."""
        # Never backwards: a message about an earlier world may come late.
        if served.generation > self.generation:
            self.generation, self.dp_ranks = served.generation, served.dp_ranks
            self.told = RanksTold.of(self._ranks(), self.generation, self.told.number)
            # Answers that are still under way for the old ranks are dropped on arrival, by their generation.
            self._pending.clear()
            self._built.clear()
        return served.generation == self.generation

    def _turn_to(self, edition: Edition) -> bool:
        """Build plans of a later edition from now on; return whether this is the edition being built."""
        if self.giving.turn_to(edition):
            for key in [key for key in self._built if key[0] >= edition.since]:
                del self._built[key]
            for steps in [steps for steps in self._pending if steps[-1] >= edition.since]:
                del self._pending[steps]
        return edition == self.giving.edition

    def _begin_steps(
        self, plans: Sequence[StepPlan], served: RanksServed | None
    ) -> FetchSlices | BatchesBuilt:
        asked = BatchesBuilt(steps=tuple(plan.step for plan in plans))
        if served is not None:
            is_of_now = self._serve(served)
            if not self._turn_to(served.edition) or not is_of_now:
                return asked
        new = [p for p in plans if not (self._is_built(p.step) or self.is_released(p.step))]
        return self._fetch(new) if new and self.dp_ranks else asked

    def _ask_again(self, missing: SlicesMissing) -> Commands:
        """Ask again without the steps that every rank has taken by now.

        A constructor that has just replaced a lost one may have been told to build such steps.
        """
        steps, pending = missing.steps, self._asked_for(missing)
        if pending is None:
            return (BatchesBuilt(steps=steps),)
        needed = [p for p in pending.plans if not self.is_released(p.step)]
        # Every step is wanted yet, so the samples are missing for another reason, which is still to come.
        if len(needed) == len(steps):
            return ()
        del self._pending[steps]
        return (self._fetch(needed) if needed else BatchesBuilt(steps=steps),)

    def _fetch(self, plans: Sequence[StepPlan]) -> FetchSlices:
        steps = tuple(plan.step for plan in plans)
        number = self.giving.edition.number
        pending = self._pending[steps] = _Pending.of(plans, self.dp_ranks, number)
        requests = _requests(pending, self.columns)
        return FetchSlices(
            steps=steps, requests=requests, generation=self.generation, edition=number
        )

    def _build(
        self, pending: _Pending, slices: ColumnRanges, microbatches_M: Sequence[Microbatch]
    ) -> None:
        built = iter(microbatches_M)
        # Ranges of all pieces come first in the answer, then those of each step's images.
        first = len(pending.pieces)
        for plan, images in zip(pending.plans, pending.images, strict=True):
            # An edit may have added sources after the step was planned.
            by_name = dict(zip(self.names, plan.tokens_S, strict=False))
            tags = self.tags
            if len(by_name) < len(self.names):
                tags = {name: held for name, held in tags.items() if name in by_name}
            for dp_rank in self.dp_ranks:
                microbatches = tuple(islice(built, plan.num_microbatches))
                # Only here, once its rows are taken from `built`: those of the next rank follow there.
                if self.is_released(plan.step):
                    continue
                if images is not None:
                    found = np.arange(first, first + len(images.samples_U3))
                    shares = images.shares(
                        slices.take(found), dp_rank, len(microbatches), self.values_per_patch
                    )
                    microbatches = tuple(map(_with_share, microbatches, shares))
                self._built[plan.step, dp_rank] = Batch(
                    step=plan.step,
                    microbatches=microbatches,
                    loss_tokens=plan.loss_tokens,
                    imbalance=plan.imbalance,
                    bound=plan.bound,
                    microbatch_imbalance=plan.microbatch_imbalance,
                    microbatch_bound=plan.microbatch_bound,
                    tokens_by_source=by_name,
                    source_tags=tags,
                )
            first += 0 if images is None else len(images.samples_U3)

    def _microbatches(self, pending: _Pending, slices: ColumnRanges) -> tuple[Microbatch, ...]:
        """Return the microbatches of all steps, ordered by step and then by rank."""
        asked_K = np.empty(len(pending.order_K), np.int64)
        asked_K[pending.order_K] = np.arange(len(pending.order_K))
        counts_M, firsts_R, sizes_R = [], [], []
        before = 0
        for plan in pending.plans:
            for dp_rank in pending.dp_ranks:
                rows, counts = plan.rows_by_microbatch(dp_rank)
                counts_M += counts
                firsts_R.append(plan.row_offsets[rows] + before)
                sizes_R.append(plan.row_offsets[rows + 1] - plan.row_offsets[rows])
            before += len(plan.pieces)
        counts_R = np.concatenate(sizes_R)
        offsets = np.concatenate(([0], counts_R.cumsum()))
        at = (np.concatenate(firsts_R) - offsets[:-1]).repeat(counts_R) + np.arange(offsets[-1])
        # One build for all microbatches: most of the work is the same few array operations.
        fetched = slices.take(asked_K[at])
        others_K = dict(fetched.others)
        for name in self._own - others_K.keys():
            # No sample of these steps has this column, but loops read it from every batch.
            others_K[name] = joined_ranges(name, [fetched.tokens.lengths_N])
        built = self.rows(
            pending.pieces.take(at),
            offsets,
            fetched.tokens,
            length=self.row_length,
            others_K=others_K,
        )
        return split_rows(built, counts_M, offsets)


def _with_share(microbatch: Microbatch, share: EncoderShare) -> Microbatch:
    """Return a microbatch with the images that its rank encodes, in place of the images of its rows."""
    columns_K = {n: c for n, c in microbatch.columns_K.items() if n not in IMAGE_COLUMNS}
    return replace(microbatch, encoding=share, columns_K=columns_K)


def _requests(pending: _Pending, columns: tuple[str, ...]) -> list[SliceRequest]:
    """Return the requests for pieces, followed by those for images, step by step."""
    dealt = [images for images in pending.images if images is not None]
    if len(dealt) == len(pending.images):  # rows come without their images
        columns = tuple(name for name in columns if name not in IMAGE_COLUMNS)
    return [
        *_requests_of_pieces(pending, columns),
        *(request for images in dealt for request in images.requests()),
    ]


def _requests_of_pieces(pending: _Pending, columns: tuple[str, ...]) -> list[SliceRequest]:
    pieces = pending.pieces.take(pending.order_K)
    sources, firsts = np.unique(pieces.sources_P, return_index=True)
    bounds = [*firsts.tolist(), len(pieces)]
    stops = stops_with_next(pieces)
    return [
        SliceRequest(
            source=source,
            positions_N=pieces.positions_P[a:b],
            subs_N=pieces.subs_P[a:b],
            starts_N=pieces.starts_P[a:b],
            stops_N=stops[a:b],
            columns=columns,
        )
        for source, a, b in zip(sources.tolist(), bounds, bounds[1:], strict=False)
    ]
