"""What one rank encodes for a microbatch, and where embeddings go: an all-to-all in two lists of counts.

Shape suffixes:
    I  images that the rank encodes        W  ranks        E  embeddings that it receives
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from omniload.base.ragged import Ragged

__all__ = ["EncoderShare"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderShare:
    """Images of one rank for one microbatch, ordered by the rank that their embeddings go to."""

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
    """Place in the flattened rows of each embedding that comes, in the order of the ranks it comes from."""
