"""Metadata of samples beyond their length, as the planner keeps it, and the images that ranks encode.

Shape suffixes:
    P  pieces
    I  images of the pieces, or of one step               U  samples that hold them        W  ranks
    M  embeddings that a rank makes                       E  embeddings of some images, or that a rank receives
    C  ranks that it sends to, or receives from
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from omniload.base.errors import IntegrityError
from omniload.base.ragged import Ragged, Ranges, taken_across
from omniload.batch.encoding import NO_ROUTE, EncoderShare, Route, counts_by_rank
from omniload.batch.rows import stops_with_next
from omniload.batch.slices import cp_places
from omniload.machine.messages import SliceRequest
from omniload.machine.metadata.reported import Reports
from omniload.machine.metadata.tags import ReportedTags
from omniload.mix.columns import (
    DOCUMENT_STARTS,
    GRIDS,
    IMAGE_SPANS,
    IMAGES,
    LOSS_SPANS,
    NO_COLUMNS,
    REJECTED_AT,
    ColumnRanges,
    overlap_of,
)
from omniload.mix.pieces import PieceTable
from omniload.mix.samples import Coded, SampleTable
from omniload.plan.images.dealt import ImagePlan
from omniload.plan.images.table import ImageTable
from omniload.plan.records import PieceFacts, PieceTags, documents_between

__all__ = ["ImageRequests", "LossSpans", "SampleMetadata", "routes_of"]


@dataclass(slots=True)
class _ReportedSpans(Reports[Ragged]):
    """Reports of one column by source; sources without it cost nothing."""

    column: ClassVar[str]

    def add(self, source: int, table: SampleTable) -> None:
        """Add a report of a source."""
        spans_N = table.metadata.get(self.column)
        if spans_N is not None:
            self.keep(source, table, spans_N)


@dataclass(slots=True)
class LossSpans(_ReportedSpans):
    """Trained spans in samples of sources with a loss mask: the first token of a span, and the first one after it."""

    column: ClassVar[str] = LOSS_SPANS

    def labels_left_out(self, pieces: PieceTable) -> int:
        """Return how many labels of a step's pieces are not trained on; each token but a piece's first is a label."""
        masked, places, rows, spans = [], [], [], []
        for at, keys_P, reported in self.of_pieces(pieces):
            masked.append(at)
            for each in reported:
                here, found = each.rows_of(keys_P)
                if len(here):
                    places.append(at[here])
                    rows.append(found)
                    spans.append(each.held_N)
        if not masked:
            return 0
        # For all sources at once, because a small step has a few pieces each of many sources.
        starts_P, stops_P = pieces.starts_P + 1, stops_with_next(pieces)
        at = np.concatenate(masked)
        # Start with all labels of these pieces; those that spans cover are subtracted below.
        left_out = int((stops_P[at] - starts_P[at]).sum())
        if spans:
            at = np.concatenate(places)
            left_out -= overlap_of(taken_across(spans, rows), starts_P[at], stops_P[at])
        return left_out


@dataclass(slots=True)
class _ImageSpans(_ReportedSpans):
    """First placeholder, number of placeholders, and number of patches of each image in the samples of a source."""

    column: ClassVar[str] = IMAGE_SPANS

    def table_of(self, pieces: PieceTable) -> ImageTable | None:
        """Return the images of a step's pieces; ``None`` where they hold none."""
        owners, found = [], []
        for at, keys_P, reported in self.of_pieces(pieces):
            for each in reported:
                here, rows = each.rows_of(keys_P)
                spans_P = each.held_N.take(rows)
                owners.append(np.repeat(at[here], spans_P.lengths_N // 3))
                found.append(spans_P.values_V.reshape(-1, 3))
        if not sum(map(len, owners)):
            return None
        pieces_I, spans_I3 = np.concatenate(owners), np.concatenate(found)
        # A stable sort keeps the images of a piece together and in order.
        order_I = np.argsort(pieces_I, kind="stable")
        pieces_I, spans_I3 = pieces_I[order_I], spans_I3[order_I]
        numbers_I = np.arange(len(pieces_I)) - np.searchsorted(pieces_I, pieces_I)
        return ImageTable(
            pieces_I=pieces_I,
            numbers_I=numbers_I.astype(np.int32),
            firsts_I=spans_I3[:, 0],
            tokens_I=spans_I3[:, 1],
            patches_I=spans_I3[:, 2],
        )


@dataclass(slots=True)
class _DocumentStarts(_ReportedSpans):
    """Beginnings of documents inside samples that join several documents but keep their attention separate."""

    column: ClassVar[str] = DOCUMENT_STARTS

    def documents_of(self, pieces: PieceTable) -> Ragged | None:
        """Return the lengths of the documents of each piece; ``None`` if each piece is one document.

        A sample of several documents is never cut.
        """
        if not self._of_source:  # nearly every mix
            return None
        ends_P = np.cumsum(pieces.lengths_P, dtype=np.int64)
        begins_P, starts = ends_P - pieces.lengths_P, []
        for at, keys_P, reported in self.of_pieces(pieces):
            for here, rows, found in ((*each.rows_of(keys_P), each.held_N) for each in reported):
                found_P = found.take(rows)
                starts.append(np.repeat(begins_P[at[here]], found_P.lengths_N) + found_P.values_V)
        return documents_between(begins_P, ends_P, starts)


@dataclass(slots=True)
class SampleMetadata:
    """Reported metadata of samples beyond their length, from the planner's floor on.

    Sources that report none cost nothing.
    """

    tags: tuple[str, ...] = ()
    """Whole-sample columns, by their internal names, that costs and strategies read."""
    _loss_spans: LossSpans = field(default_factory=LossSpans, init=False)
    _image_spans: _ImageSpans = field(default_factory=_ImageSpans, init=False)
    _starts: _DocumentStarts = field(default_factory=_DocumentStarts, init=False)
    _tags: ReportedTags = field(init=False)

    def __post_init__(self) -> None:
        self._tags = ReportedTags(tags=self.tags)

    def add(self, source: int, table: SampleTable, tags: Mapping[str, Coded] = NO_COLUMNS) -> None:
        """Add a report of a source; ``tags`` are those of its samples.

        Raises:
            ConfigError: A tag has more different texts than a planner keeps.
        """
        for spans in (self._loss_spans, self._image_spans, self._starts):
            spans.add(source, table)
        self._tags.add(source, table, tags)

    def forget(self, source: int, position: int) -> None:
        """Forget a source's samples from ``position`` on, because they will be reported again."""
        for spans in (self._loss_spans, self._image_spans, self._starts):
            spans.forget(source, position)
        self._tags.forget(source, position)

    def release(self, floors: Mapping[int, int]) -> None:
        """Release samples before these positions."""
        for spans in (self._loss_spans, self._image_spans, self._starts):
            spans.release(floors)
        self._tags.release(floors)

    def of(self, pieces: PieceTable) -> PieceFacts:
        """Return the metadata of the pieces of a step."""
        return PieceFacts(
            labels_left_out=self._loss_spans.labels_left_out(pieces),
            images=self._image_spans.table_of(pieces),
            documents=self._starts.documents_of(pieces),
            tags=self.tags_of(pieces),
        )

    def tags_of(self, pieces: PieceTable) -> PieceTags:
        """Return the tags of pieces whose samples a rank may still ask for."""
        return self._tags.of(pieces)


@dataclass(frozen=True, slots=True)
class ImageRequests:
    """The images of one step that some ranks encode; each sample is requested once, with all its images."""

    plan: ImagePlan
    samples_U3: NDArray[np.int64]
    """Source, position and sub of the samples, sorted."""
    sample_I: NDArray[np.int64]
    """Sample of each image of the plan; -1 where no rank here encodes it."""

    @classmethod
    def of(cls, plan: ImagePlan, dp_ranks: Sequence[int]) -> "ImageRequests":
        """Return the requests that let ``dp_ranks`` encode their part."""
        # Chosen by the encoding rank, which may be another one than the rank that trains on the image's row.
        theirs = np.flatnonzero(plan.are_encoded_at(dp_ranks))
        # ``reshape``, because some releases of NumPy return a two-dimensional inverse.
        samples_U3, owner = np.unique(plan.keys_I4[theirs, :3], axis=0, return_inverse=True)
        sample_I = np.full(len(plan), -1, np.int64)
        sample_I[theirs] = owner.reshape(-1)
        return cls(plan, samples_U3, sample_I)

    def requests(self) -> list[SliceRequest]:
        """Return one request for each source; the requests ask for no tokens."""
        sources, firsts = np.unique(self.samples_U3[:, 0], return_index=True)
        bounds = [*firsts.tolist(), len(self.samples_U3)]
        nothing = np.zeros(len(self.samples_U3), np.int64)
        return [
            SliceRequest(
                source=source,
                positions_N=self.samples_U3[a:b, 1],
                subs_N=self.samples_U3[a:b, 2],
                starts_N=nothing[a:b],
                stops_N=nothing[a:b],
                columns=(IMAGES, GRIDS, REJECTED_AT),
            )
            for source, a, b in zip(sources.tolist(), bounds, bounds[1:], strict=False)
        ]

    def shares(
        self,
        fetched: ColumnRanges,
        dp_rank: int,
        num_microbatches: int,
        values_per_patch: int = 0,
    ) -> list[EncoderShare]:
        """Return the images that the ranks of a data-parallel rank encode for each microbatch.

        Args:
            fetched: The answers to ``requests``, in their order.
            dp_rank: A data-parallel rank among those that the requests were made for.
            num_microbatches: Microbatches of the step.
            values_per_patch: Values of each patch of the mix.

        Returns:
            For each microbatch the share of the first rank, which holds the shares of the others, by cp coordinate and
            then by peer.

        Raises:
            IntegrityError: A source handed out other images than it had reported.
        """
        shares = []
        for microbatch in range(num_microbatches):
            first, *others = (
                self._share(fetched, route, values_per_patch)
                for route in routes_of(self.plan, dp_rank, microbatch)
            )
            shares.append(replace(first, others=tuple(others)))
        return shares

    def _share(self, fetched: ColumnRanges, route: Route, values_per_patch: int) -> EncoderShare:
        if route is NO_ROUTE:
            return EncoderShare.of_nothing(self.plan.num_ranks, values_per_patch)
        images, grids_I2 = self._images(fetched, route.images)
        return EncoderShare(
            images_I=images.packed(),
            grids_I2=grids_I2,
            keys_I4=self.plan.keys_I4[route.images],
            num_ranks=self.plan.num_ranks,
            sends_C2=route.sends_C2,
            receives_C2=route.receives_C2,
            places_E=route.places_E,
            values_per_patch=values_per_patch,
            order_M=route.order_M,
        )

    def _images(
        self, fetched: ColumnRanges, mine: NDArray[np.int64]
    ) -> tuple[Ranges, NDArray[np.int32]]:
        """Return where the values of some images lie, and their grids."""
        if not len(mine):
            return Ranges.of([], np.uint8), np.empty((0, 2), np.int32)
        samples, numbers = self.sample_I[mine], self.plan.keys_I4[mine, 3]
        values, grids = fetched.others[IMAGES].take(samples), fetched.others[GRIDS].take(samples)
        # Grids are copied, unlike the images, because a grid is only two numbers.
        packed = grids.packed()
        if (numbers >= packed.lengths_N // 2).any():
            at = int((numbers >= packed.lengths_N // 2).argmax())
            raise IntegrityError(
                f"sample {self.plan.keys_I4[mine[at]].tolist()[:3]} gave {packed.lengths_N[at] // 2} images where "
                f"{numbers[at] + 1} were planned; the source changed while it was read"
            )
        # 64 bits, because the values of all images of a step are summed.
        patches = packed.values_V[::2].astype(np.int64) * packed.values_V[1::2]
        before = np.concatenate(([0], np.cumsum(patches)))
        first = packed.offsets[:-1] // 2
        own, held = first + numbers, packed.lengths_N // 2
        if (rejected := fetched.others.get(REJECTED_AT)) is not None:
            # Both sides of a preference pair share one copy of its images.
            held //= 1 + (rejected.take(samples).lengths_N > 0)
        # The values per patch are not stored; they follow from the sample's values and patches.
        depth = values.lengths_N // np.maximum(1, before[first + held] - before[first])
        starts = values.starts_N + (before[first + numbers % held] - before[first]) * depth
        stops = starts + patches[own] * depth
        ranges = replace(values, starts_N=starts, stops_N=stops)
        return ranges, packed.values_V.reshape(-1, 2)[own]


def routes_of(plan: ImagePlan, dp_rank: int, microbatch: int) -> Iterator[Route]:
    """Yield the routes of the ranks of a data-parallel rank, by cp coordinate and then by peer number.

    Embeddings travel from one rank to another in the order of the plan, which both ranks know.

    Args:
        plan: The images of a step, or the part of them that the rank encodes or trains on.
        dp_rank: Data-parallel rank.
        microbatch: Number of the microbatch.
    """
    encoded, arriving = (
        plan.encoded_at(dp_rank, microbatch),
        plan.arriving_at(dp_rank, microbatch),
    )
    takers_E, places_E = _embeddings_of(plan, arriving)
    origins_E = np.repeat(plan.encoders_I[arriving], plan.tokens_I[arriving])
    ranks = plan.tree.ranks_by_place()[dp_rank].reshape(-1)
    bounds = np.searchsorted(plan.encoders_I[encoded], (ranks, ranks + 1))
    # Most peers have no part in a given microbatch.
    takes = np.isin(ranks, takers_E)
    for rank, first, stop, takes_any in zip(ranks, *bounds, takes, strict=True):
        if first == stop and not takes_any:
            yield NO_ROUTE
            continue
        images = encoded[first:stop]
        takers_M, _ = _embeddings_of(plan, images)
        in_order = bool((np.diff(takers_M) >= 0).all())
        # Among peers with the same rows or slice, only one receives embeddings and broadcasts the first layer's input.
        mine = np.flatnonzero(takers_E == rank)
        mine = mine[np.argsort(origins_E[mine], kind="stable")]
        yield Route(
            images=images,
            sends_C2=counts_by_rank(takers_M),
            receives_C2=counts_by_rank(origins_E[mine]),
            places_E=places_E[mine],
            order_M=None if in_order else np.argsort(takers_M, kind="stable"),
        )


def _embeddings_of(
    plan: ImagePlan, images: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return for each embedding the rank that needs it, and its place in that rank's rows or slice."""
    sizes = plan.tokens_I[images]
    starts = plan.places_I[images] - (np.cumsum(sizes) - sizes)
    rows_E, columns_E = np.divmod(
        np.repeat(starts, sizes) + np.arange(int(sizes.sum())), plan.row_length
    )
    cp = plan.tree.size_of("cp")
    cp_ranks_T, places_T = _cp_places(plan.row_length, cp)
    # The rank with coordinate 0 on all other axes is the one that fetches.
    takers_DC = plan.tree.ranks_by_place()[:, :, 0]
    takers_E = takers_DC[np.repeat(plan.dp_ranks_I[images], sizes), cp_ranks_T[columns_E]]
    return takers_E, rows_E * (plan.row_length // cp) + places_T[columns_E]


_cp_places = lru_cache(maxsize=8)(cp_places)
