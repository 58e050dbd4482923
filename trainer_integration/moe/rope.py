"""Rotary positions.

Shape suffixes:
    N  tokens        H  heads        C  width of a head, C2 half of it
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

__all__ = ["Rotation"]


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines of every token's position, computed once for all layers."""

    cos_N1C2: Tensor
    """Cosine of each angle; the middle axis broadcasts over heads."""
    sin_N1C2: Tensor
    """Sine of each angle."""

    @classmethod
    def at(
        cls, positions_N: Tensor, head_dim: int, theta: float, dtype: torch.dtype = torch.float32
    ) -> Self:
        """Return the rotation of ``positions_N``, integers from 0, in float32 or in ``dtype``.

        Pair ``i`` of a head turns by ``position * theta ** (-2 i / head_dim)``. Angles are computed in float64, so that
        distant positions keep their exact difference.
        """
        device = positions_N.device
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim
        # In float32, neighbours beyond position 2**24 have one angle, and distant positions few exact bits of it.
        angles_NC2 = positions_N.double().outer(theta**-exponents)
        return cls(angles_NC2.cos().to(dtype).unsqueeze(1), angles_NC2.sin().to(dtype).unsqueeze(1))

    def apply(self, x_NHC: Tensor) -> Tensor:
        """Rotate the heads: component ``i`` pairs with ``i + C / 2``.

        The product of a rotated query and a rotated key depends only on their distance. Narrower heads are rotated in
        the type of the angles, and returned in their own.

        Source:
            Su et al., arXiv 2104.09864.
        """
        left_NHC2, right_NHC2 = x_NHC.chunk(2, dim=-1)
        return torch.cat(
            (
                left_NHC2 * self.cos_N1C2 - right_NHC2 * self.sin_N1C2,
                right_NHC2 * self.cos_N1C2 + left_NHC2 * self.sin_N1C2,
            ),
            dim=-1,
        ).to(x_NHC.dtype)
