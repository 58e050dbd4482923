"""Images of samples as the planner knows them, and those that ranks encode apart from the rows of a step.

Shape suffixes:
    P  pieces
    I  images of the pieces, or of one step               U  samples that hold them
    M  embeddings that a rank makes                       E  embeddings of some images, or that a rank receives
    C  ranks that it sends to, or receives from
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from omniload.base.errors import IntegrityError
from omniload.base.ragged import Ranges
from omniload.batch.encoding import NO_ROUTE, EncoderShare, Route, counts_by_rank
from omniload.batch.slices import cp_places
from omniload.machine.messages import SliceRequest
from omniload.machine.metadata.reported import ReportedSpans
from omniload.mix.columns import GRIDS, IMAGE_SPANS, IMAGES, REJECTED_AT, ColumnRanges
from omniload.mix.pieces import PieceTable
from omniload.plan.images.dealt import ImagePlan
from omniload.plan.images.table import ImageTable

__all__ = ["ImageRequests", "ImageSpans", "routes_of"]


@dataclass(slots=True)
class ImageSpans(ReportedSpans):
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
