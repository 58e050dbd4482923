"""The Data Constructor machine: the samples of the coming steps, built and served to its ranks. It decides nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from omniload.base.errors import StateError
from omniload.base.ragged import Ranges
from omniload.build.microbatch import Batch, Microbatch
from omniload.build.rows import build_rows, split_rows, stops_with_next
from omniload.build.slices import slice_for_cp
from omniload.machine.messages import ReleaseSteps, SliceRequest
from omniload.plan.records import StepPlan

__all__ = ["BatchesBuilt", "BuildStep", "DataConstructor", "FetchSlices", "SlicesFetched"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildStep:
    """A plan was published: this is the part of it that concerns this constructor."""

    plan: StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicesFetched:
    """The source loaders have answered: the ranges asked for, request by request."""

    step: int
    slices: Ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchSlices:
    """Ask the source loaders, one request for each source of the step."""

    step: int
    requests: Sequence[SliceRequest]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchesBuilt:
    """The step can be served."""

    step: int


@dataclass(slots=True)
class _Pending:
    plan: StepPlan
    order_K: NDArray[np.int64]
    """Pieces in the order they were requested in."""


@dataclass(slots=True, kw_only=True)
class DataConstructor:
    """Builds every step for ``dp_ranks`` and holds it until all of them have taken it."""

    dp_ranks: Sequence[int]
    names: Sequence[str]
    """Source names, by number."""
    row_length: int
    """Tokens in a row."""
    cp_size: int = 1
    """Peers that share a data-parallel rank's rows."""
    _pending: dict[int, _Pending] = field(default_factory=dict, init=False)
    _built: dict[tuple[int, int], Batch] = field(default_factory=dict, init=False)
    _released_to: int = field(default=0, init=False)

    def handle(
        self, event: BuildStep | SlicesFetched | ReleaseSteps
    ) -> tuple[FetchSlices | BatchesBuilt, ...]:
        """Apply one event and return what must now be done, in order."""
        match event:
            case BuildStep(plan=plan):
                if self.has(plan.step) or self.is_released(plan.step):
                    return (BatchesBuilt(step=plan.step),)
                pending = _Pending(plan, np.argsort(plan.pieces.sources_P, kind="stable"))
                self._pending[plan.step] = pending
                return (FetchSlices(step=plan.step, requests=_requests(pending)),)
            case SlicesFetched(step=step, slices=slices):
                pending_step = self._pending.pop(step, None)
                if pending_step is None or self.is_released(step):
                    return ()
                self._build(pending_step, slices)
                return (BatchesBuilt(step=step),)
            case ReleaseSteps(step=step):
                self._released_to = max(self._released_to, step)
                for key in [key for key in self._built if key[0] < step]:
                    del self._built[key]
                return ()

    def has(self, step: int) -> bool:
        """Tell whether ``step`` is built."""
        return (step, self.dp_ranks[0]) in self._built

    def is_released(self, step: int) -> bool:
        """Tell whether every rank has taken ``step``, so that it will not be built again."""
        return step < self._released_to

    def batch_of(self, step: int, dp_rank: int, cp_rank: int = 0) -> Batch:
        """Return what one rank trains on in a built step.

        Raises:
            StateError: The step is not held: it was released, or not built yet.
        """
        batch = self._built.get((step, dp_rank))
        if batch is None:
            held = sorted({key[0] for key in self._built})
            raise StateError(
                f"step {step} of dp rank {dp_rank} is not held (steps {held}, dp ranks {list(self.dp_ranks)}); "
                "a rank takes steps in order, each once"
            )
        if self.cp_size == 1:
            return batch
        sliced = (
            slice_for_cp(m, cp_rank, self.cp_size)
            for m in batch.microbatches
            if isinstance(m, Microbatch)
        )
        return replace(batch, microbatches=tuple(sliced))

    def _build(self, pending: _Pending, slices: Ranges) -> None:
        plan = pending.plan
        asked_K = np.empty(len(pending.order_K), np.int64)
        asked_K[pending.order_K] = np.arange(len(pending.order_K))
        for dp_rank in self.dp_ranks:
            self._built[plan.step, dp_rank] = Batch(
                step=plan.step,
                microbatches=self._microbatches(plan, dp_rank, slices, asked_K),
                loss_tokens=plan.loss_tokens,
                imbalance=plan.imbalance,
                bound=plan.bound,
                tokens_by_source=_by_name(self.names, plan),
            )

    def _microbatches(
        self, plan: StepPlan, dp_rank: int, slices: Ranges, asked_K: NDArray[np.int64]
    ) -> tuple[Microbatch, ...]:
        rows_M = [plan.rows_of(dp_rank, number) for number in range(plan.num_microbatches)]
        rows = np.concatenate(rows_M)
        counts = np.diff(plan.row_offsets)[rows]
        offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
        at = np.repeat(plan.row_offsets[rows] - offsets[:-1], counts) + np.arange(offsets[-1])
        # One build for all microbatches: most of the work is the same few array operations.
        built = build_rows(
            plan.pieces.take(at), offsets, slices.take(asked_K[at]), length=self.row_length
        )
        return split_rows(built, [len(rows) for rows in rows_M], offsets)


def _requests(pending: _Pending) -> list[SliceRequest]:
    pieces = pending.plan.pieces.take(pending.order_K)
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
        )
        for source, a, b in zip(sources.tolist(), bounds, bounds[1:], strict=False)
    ]


def _by_name(names: Sequence[str], plan: StepPlan) -> Mapping[str, int]:
    return dict(zip(names, plan.tokens_S, strict=True))
