"""Images that a data constructor's ranks encode: what it asks for, and what each rank gets.

Shape suffixes:
    I  images of one step        U  samples that hold them        W  ranks
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from omniload.base.errors import IntegrityError
from omniload.base.ragged import Ranges
from omniload.batch.encoding import EncoderShare
from omniload.machine.messages import SliceRequest
from omniload.mix.columns import GRIDS, IMAGES, ColumnRanges
from omniload.plan.images.dealt import ImagePlan

__all__ = ["ImageRequests"]


@dataclass(frozen=True, slots=True)
class ImageRequests:
    """The images of one step that some ranks encode; a sample is asked for once, with all its images."""

    plan: ImagePlan
    samples_U3: NDArray[np.int64]
    """Source, position and sub of the samples, sorted."""
    sample_I: NDArray[np.int64]
    """Sample of each image of the plan; -1 where no rank here encodes it."""

    @classmethod
    def of(cls, plan: ImagePlan, dp_ranks: Sequence[int]) -> "ImageRequests":
        """Return what is asked for so that ``dp_ranks`` can encode their part."""
        theirs = np.flatnonzero(np.isin(plan.encoders_I, dp_ranks))
        samples_U3, owner = np.unique(plan.keys_I4[theirs, :3], axis=0, return_inverse=True)
        sample_I = np.full(len(plan), -1, np.int64)
        sample_I[theirs] = owner.reshape(-1)
        return cls(plan, samples_U3, sample_I)

    def requests(self) -> list[SliceRequest]:
        """Return one request for each source; they ask for no token."""
        sources, firsts = np.unique(self.samples_U3[:, 0], return_index=True)
        bounds = [*firsts.tolist(), len(self.samples_U3)]
        nothing = np.zeros(len(self.samples_U3), np.int32)
        return [
            SliceRequest(
                source=source,
                positions_N=self.samples_U3[a:b, 1],
                subs_N=self.samples_U3[a:b, 2].astype(np.int32),
                starts_N=nothing[a:b],
                stops_N=nothing[a:b],
                columns=(IMAGES, GRIDS),
            )
            for source, a, b in zip(sources.tolist(), bounds, bounds[1:], strict=False)
        ]

    def shares(self, fetched: ColumnRanges, rank: int, num_microbatches: int) -> list[EncoderShare]:
        """Return what a rank encodes for each microbatch.

        Args:
            fetched: What was asked for, in the order asked for.
            rank: The rank, one of those asked for.
            num_microbatches: Microbatches of the step.

        Raises:
            IntegrityError: A source handed out other images than it had reported.
        """
        return [self._share(fetched, rank, m) for m in range(num_microbatches)]

    def _share(self, fetched: ColumnRanges, rank: int, microbatch: int) -> EncoderShare:
        plan, num_ranks = self.plan, self.plan.num_ranks
        mine, arriving = plan.encoded_by(rank, microbatch), plan.arriving_at(rank, microbatch)
        images, grids_I2 = self._images(fetched, mine)
        sizes = plan.tokens_I[arriving]
        starts = plan.places_I[arriving] - (np.cumsum(sizes) - sizes)
        return EncoderShare(
            images_I=images.packed(),
            grids_I2=grids_I2,
            keys_I4=plan.keys_I4[mine],
            sends_W=_counts(plan.dp_ranks_I[mine], plan.tokens_I[mine], num_ranks),
            receives_W=_counts(plan.encoders_I[arriving], sizes, num_ranks),
            places_E=np.repeat(starts, sizes) + np.arange(int(sizes.sum())),
        )

    def _images(
        self, fetched: ColumnRanges, mine: NDArray[np.int64]
    ) -> tuple[Ranges, NDArray[np.int32]]:
        """Return where the values of some images lie, and their grids."""
        if not len(mine):
            return Ranges.of([], np.uint8), np.empty((0, 2), np.int32)
        samples, numbers = self.sample_I[mine], self.plan.keys_I4[mine, 3]
        values, grids = fetched.others[IMAGES].take(samples), fetched.others[GRIDS].take(samples)
        packed = grids.packed()
        if (numbers >= packed.lengths_N // 2).any():
            at = int((numbers >= packed.lengths_N // 2).argmax())
            raise IntegrityError(
                f"sample {self.plan.keys_I4[mine[at]].tolist()[:3]} gave {packed.lengths_N[at] // 2} images where "
                f"{numbers[at] + 1} were planned; the source changed while it was read"
            )
        patches = packed.values_V[::2].astype(np.int64) * packed.values_V[1::2]
        before = np.concatenate(([0], np.cumsum(patches)))
        first = packed.offsets[:-1] // 2
        own = first + numbers
        depth = values.lengths_N // np.maximum(1, before[packed.offsets[1:] // 2] - before[first])
        starts = values.starts_N + (before[own] - before[first]) * depth
        ranges = Ranges(
            columns=values.columns,
            which_N=values.which_N,
            starts_N=starts,
            stops_N=starts + patches[own] * depth,
        )
        return ranges, packed.values_V.reshape(-1, 2)[own]


def _counts(
    ranks: NDArray[np.int32], sizes: NDArray[np.int64], num_ranks: int
) -> NDArray[np.int64]:
    return np.bincount(ranks, sizes, num_ranks).astype(np.int64)
