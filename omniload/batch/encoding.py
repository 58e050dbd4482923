"""The images that a rank encodes for a microbatch, and the routes of embeddings: an all-to-all in two lists of counts.

Shape suffixes:
    I  images that the rank encodes        M  embeddings that it makes of them
    W  ranks                               E  embeddings that it receives
    C  ranks that it sends to, or receives from
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from omniload.base.ragged import Ragged

__all__ = ["NO_ROUTE", "EncoderShare", "Route", "counts_by_rank"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The images that one rank encodes for a microbatch, and how embeddings travel; see ``EncoderShare``."""

    images: NDArray[np.int64]
    """Images of the plan that it encodes, in this order."""
    sends_C2: NDArray[np.int64]
    receives_C2: NDArray[np.int64]
    places_E: NDArray[np.int64]
    order_M: NDArray[np.int64] | None


NO_ROUTE = Route(
    images=np.empty(0, np.int64),
    sends_C2=np.empty((0, 2), np.int64),
    receives_C2=np.empty((0, 2), np.int64),
    places_E=np.empty(0, np.int64),
    order_M=None,
)
"""The route of a rank that encodes nothing and receives nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderShare:
    """Images of one rank for one microbatch, ordered by the data-parallel rank that their embeddings go to."""

    images_I: Ragged
    """Values of the patches of each image."""
    grids_I2: NDArray[np.int32]
    """Rows and columns of its patches."""
    keys_I4: NDArray[np.int64]
    """Source, position and sub of its sample, and its number in it."""
    num_ranks: int
    """Ranks among which images were dealt."""
    sends_C2: NDArray[np.int64]
    """Destination ranks, rising, and the number of embeddings for each; the numbers sum to those of the images."""
    receives_C2: NDArray[np.int64]
    """Ranks from which embeddings come, rising, and how many."""
    places_E: NDArray[np.int64]
    """Place in the flattened rows, or slice, of each embedding that comes, in the order of the ranks it comes from."""
    values_per_patch: int = 0
    """Values of a patch, also of a rank that has no image; 0 where no image tells it."""
    order_M: NDArray[np.int64] | None = None
    """Indices of the made embeddings in sending order; ``None`` if that is the order in which they are made."""
    others: tuple["EncoderShare", ...] = ()
    """Shares of the other ranks that take the same rows, by cp coordinate and then by peer number."""

    @classmethod
    def of_nothing(cls, num_ranks: int, values_per_patch: int) -> Self:
        """Return the share of a rank that encodes no image and gets no embedding."""
        none_C2 = np.empty((0, 2), np.int64)
        return cls(
            images_I=Ragged.of([], np.uint8),
            grids_I2=np.empty((0, 2), np.int32),
            keys_I4=np.empty((0, 4), np.int64),
            num_ranks=num_ranks,
            sends_C2=none_C2,
            receives_C2=none_C2,
            places_E=np.empty(0, np.int64),
            values_per_patch=values_per_patch,
        )

    @property
    def is_of_nothing(self) -> bool:
        """Whether its rank encodes no image and gets no embedding."""
        return not len(self.keys_I4) and not len(self.places_E)

    # Few of thousands of ranks take part in one microbatch, so full lists of counts are made only where they are used.
    @property
    def sends_W(self) -> NDArray[np.int64]:
        """Embeddings that go to each rank."""
        return _of_all(self.sends_C2, self.num_ranks)

    @property
    def receives_W(self) -> NDArray[np.int64]:
        """Embeddings that come from each rank."""
        return _of_all(self.receives_C2, self.num_ranks)

    @property
    def of_ranks(self) -> "tuple[EncoderShare, ...]":
        """This share without ``others``, followed by the others."""
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
        if len(ranks_W) != self.num_ranks:
            raise ValueError(
                f"images are dealt to {self.num_ranks} ranks, and {len(ranks_W)} are numbered; open the data plane "
                "with the mesh of all ranks"
            )
        number_W = np.asarray(ranks_W, np.int64)
        sends_C2, moved_M = _renumbered(self.sends_C2, number_W)
        receives_C2, moved_E = _renumbered(self.receives_C2, number_W)
        order_M = moved_M if self.order_M is None else self.order_M[moved_M]
        return replace(
            self,
            sends_C2=sends_C2,
            receives_C2=receives_C2,
            places_E=self.places_E[moved_E],
            order_M=None if np.array_equal(order_M, np.arange(len(order_M))) else order_M,
        )


def counts_by_rank(ranks_N: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """Return the ranks that are among some, rising, and how often each is, ``[C, 2]``."""
    return np.column_stack(np.unique(ranks_N, return_counts=True)).astype(np.int64)


def _of_all(counts_C2: NDArray[np.int64], num_ranks: int) -> NDArray[np.int64]:
    counts_W = np.zeros(num_ranks, np.int64)
    counts_W[counts_C2[:, 0]] = counts_C2[:, 1]
    return counts_W


def _renumbered(
    counts_C2: NDArray[np.int64], number_W: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return counts by other numbers of ranks, and the order in which what they count lies then."""
    ranks_C, counts_C = number_W[counts_C2[:, 0]], counts_C2[:, 1]
    order_C = np.argsort(ranks_C)
    moved = np.argsort(np.repeat(ranks_C, counts_C), kind="stable")
    return np.column_stack((ranks_C, counts_C))[order_C], moved
