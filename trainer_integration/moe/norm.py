"""Root-mean-square norm.

Shape suffixes:
    N  tokens        D  width
"""

import torch
from torch import Tensor, nn
from typing_extensions import override

__all__ = ["RMSNorm"]


class RMSNorm(nn.Module):
    """Scales every token to unit mean square, then by a learned weight.

    Source:
        Zhang and Sennrich, arXiv 1910.07467.
    """

    def __init__(self, dim: int, epsilon: float) -> None:
        super().__init__()
        self.weight_D = nn.Parameter(torch.ones(dim))
        self.epsilon = epsilon

    @override
    def forward(self, x_ND: Tensor) -> Tensor:
        """Return ``x / rms(x) * weight``; the mean square is taken in float32."""
        x32_ND = x_ND.float()
        scale_N1 = torch.rsqrt(x32_ND.square().mean(-1, keepdim=True) + self.epsilon)
        return (x32_ND * scale_N1).to(x_ND.dtype) * self.weight_D
