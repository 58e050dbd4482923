"""What one rank encodes for a microbatch, and where embeddings go: an all-to-all in two lists of counts.

Shape suffixes:
    I  images that the rank encodes        M  embeddings that it makes of them
    W  ranks                               E  embeddings that it receives
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from omniload.base.ragged import Ragged

__all__ = ["EncoderShare"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderShare:
    """Images of one rank for one microbatch, ordered by the data-parallel rank that their embeddings go to."""

    images_I: Ragged
    """Values of the patches of each image."""
    grids_I2: NDArray[np.int32]
    """Rows and columns of its patches."""
    keys_I4: NDArray[np.int64]
    """Source, position and sub of its sample, and its number in it."""
    sends_W: NDArray[np.int64]
    """Embeddings that go to each rank; they sum to those of the images."""
    receives_W: NDArray[np.int64]
    """Embeddings that come from each rank."""
    places_E: NDArray[np.int64]
    """Place in the flattened rows, or slice, of each embedding that comes, in the order of the ranks it comes from."""
    values_per_patch: int = 0
    """Values of a patch, also of a rank that has no image; 0 where no image tells it."""
    order_M: NDArray[np.int64] | None = None
    """Which of those that are made is sent first, second, and so on; ``None`` where they are sent as they are made."""
    others: tuple["EncoderShare", ...] = ()
    """Those of the other ranks that take the same rows: by place along cp, then by number among peers."""

    @property
    def of_ranks(self) -> "tuple[EncoderShare, ...]":
        """This share alone, and those of the others."""
        return (replace(self, others=()), *self.others)

    def of_place(self, cp_rank: int, cp_size: int) -> "EncoderShare":
        """Return the shares of the ranks at one place along cp, of those at all of them."""
        shares = self.of_ranks
        peers = len(shares) // cp_size
        first, *others = shares[cp_rank * peers : (cp_rank + 1) * peers]
        return replace(first, others=tuple(others))

    def of_peer(self, peer: int) -> "EncoderShare":
        """Return the share of one rank alone."""
        return self.of_ranks[peer]

    def numbered(self, ranks_W: Sequence[int]) -> "EncoderShare":
        """Return this rank's share with ranks by other numbers.

        Args:
            ranks_W: The number that each rank is to have; none to leave all as they are.

        Raises:
            ValueError: They are of another number of ranks.
        """
        if not len(ranks_W):
            return self
        if len(ranks_W) != len(self.sends_W):
            raise ValueError(
                f"images are dealt to {len(self.sends_W)} ranks, and {len(ranks_W)} are numbered; open the data plane "
                "with the mesh of all ranks"
            )
        number_W = np.asarray(ranks_W, np.int64)
        sends_W, receives_W = np.empty_like(self.sends_W), np.empty_like(self.receives_W)
        sends_W[number_W], receives_W[number_W] = self.sends_W, self.receives_W
        moved_M, moved_E = (
            np.argsort(np.repeat(number_W, counts_W), kind="stable")
            for counts_W in (self.sends_W, self.receives_W)
        )
        order_M = moved_M if self.order_M is None else self.order_M[moved_M]
        return replace(
            self,
            sends_W=sends_W,
            receives_W=receives_W,
            places_E=self.places_E[moved_E],
            order_M=None if np.array_equal(order_M, np.arange(len(order_M))) else order_M,
        )
